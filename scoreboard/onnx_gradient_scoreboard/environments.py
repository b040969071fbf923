"""An environment for each producer: they do not go together, onnxruntime-training owns the name onnxruntime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import which

from onnx_gradient_scoreboard.producers import Producer

_VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def folder(producer: Producer, environments: Path) -> Path:
    """Where the environment is: both of our routes have one."""
    return environments / producer.adapter.partition(":")[0]


def interpreter(producer: Producer, environments: Path) -> Path | None:
    """Its Python, if it is there."""
    python = folder(producer, environments) / "bin" / "python"
    return python if python.exists() else None


def build(producer: Producer, environments: Path) -> None:
    """Make it if it is not there; what pip says is printed, and another producer is none the worse for it."""
    place = folder(producer, environments)
    if (place / "installed").exists():
        return
    wanted = f"python{producer.python}"
    python = wanted if which(wanted) else sys.executable
    if producer.needs and not which(producer.needs):
        print(f"{producer.name} needs {producer.needs}: install it, and again", file=sys.stderr)
        return
    try:
        subprocess.run([python, "-m", "venv", str(place)], check=True)
        install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *producer.packages]
        subprocess.run(install, check=True)
    except subprocess.CalledProcessError as e:
        print(f"{producer.name} cannot be installed: {e}", file=sys.stderr)
        return
    (place / "installed").touch()


def versions(producer: Producer, python: Path) -> dict[str, str]:
    """Of the producer and what it computes with."""
    names = [producer.distribution, "onnx", "onnxruntime", "torch", "jax", "numpy"]
    output = subprocess.run([python, "-c", _VERSIONS, *names], check=True, capture_output=True, text=True).stdout
    return json.loads(output)
