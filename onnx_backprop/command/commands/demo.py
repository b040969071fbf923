"""`onnx-backprop demo`: train a super-resolution model on photographs; needs the source tree."""

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from onnx_backprop import __version__
from onnx_backprop.command.parser import Command
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop_command import PROGRAM


def run(arguments: argparse.Namespace) -> int:
    """Run the demo with the arguments that are handed on; its exit code."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "models" / "super_resolution.py").is_file():
        raise InvalidArgumentError(
            "the demo is a script of the source tree, models/super_resolution.py, which an installed package does not "
            f"hold. Get the source of {PROGRAM} {__version__} and run `make demo` in its top folder"
        )
    if absent := [name for name in ("matplotlib", "PIL", "skimage") if find_spec(name) is None]:
        raise InvalidArgumentError(
            f"the demo needs {', '.join(absent)}. Run `make demo`, or `pip install '.[demo]'` in {root}"
        )
    # as a module, since the scripts import each other; -P, or a folder `models` where the user stands would win
    command = [sys.executable, "-P", "-m", "models.super_resolution", *arguments.rest]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


COMMAND = Command(run=run, takes_rest=True)
