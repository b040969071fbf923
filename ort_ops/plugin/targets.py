"""Systems and processors that a library may be made for, and what links it there."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.functions.declared import PLANS
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.ort_ops.compiler.machine import MATRICES, TRIPLE_VARIABLE, levels, matrix_tiles

_MAKER = "onnx_backprop.ort_ops.plugin.library"


class Target(NamedTuple):
    """triple, processor: LLVM's. zig: its triple. gcc: a compiler of Debian's for it. suffix: of a library.

    features: of the processor, beside what its name says.
    """

    triple: str
    processor: str
    zig: str
    gcc: str
    suffix: str
    features: str = ""


def _x86(system: str, *target: str) -> dict[str, Target]:
    triple, *rest = target
    names = {"": "x86-64", "-v3": "x86-64-v3", "-v4": "x86-64-v4"}
    return {f"{system}-x86_64{end}": Target(triple, name, *rest) for end, name in names.items()}


AMX = "linux-x86_64-amx"  # AVX-512 and registers of matrices
# x86-64 without a level is SSE2 alone. glibc 2.17 is what the wheels of this package ask for.
TARGETS = {
    **_x86("linux", "x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.17", "x86_64-linux-gnu-gcc", "so"),
    **_x86("windows", "x86_64-w64-windows-gnu", "x86_64-windows-gnu", "x86_64-w64-mingw32-gcc", "dll"),
    **_x86("macos", "x86_64-apple-macosx11.0.0", "x86_64-macos.11.0", "", "dylib"),
    "linux-aarch64": Target(
        "aarch64-unknown-linux-gnu", "generic", "aarch64-linux-gnu.2.17", "aarch64-linux-gnu-gcc", "so"
    ),
    "macos-arm64": Target("arm64-apple-macosx11.0.0", "apple-m1", "aarch64-macos.11.0", "", "dylib"),
}
TARGETS[AMX] = TARGETS["linux-x86_64-v4"]._replace(features=MATRICES)
_SYSTEMS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def here() -> str:
    """The name of this system and this processor, at its highest level."""
    system, machine = _SYSTEMS.get(platform.system(), platform.system()), platform.machine()
    machine = _MACHINES.get(machine, machine)
    if machine == "aarch64":
        return "macos-arm64" if system == "macos" else f"{system}-aarch64"
    level = next((name for name in levels() if name.startswith("x86-64-")), "x86-64")
    name = f"{system}-x86_64{level.removeprefix('x86-64')}"
    return AMX if name == "linux-x86_64-v4" and matrix_tiles() else name


def checked(name: str) -> Target:
    """The target of a name; InvalidArgumentError where there is none, KernelError where nothing links for it."""
    if name not in TARGETS:
        raise InvalidArgumentError(f"expected {', '.join(TARGETS)}, got {name!r}{near(name, TARGETS)}", "target")
    linker(name)
    return TARGETS[name]


def linker(name: str) -> list[str]:
    """The command that compiles and links C for a target: this system's compiler for itself, gcc, or zig for all.

    KernelError where there is none.
    """
    target = TARGETS[name]
    native = here() in TARGETS and target.triple == TARGETS[here()].triple
    compiler = (os.environ.get("CC") or shutil.which("cc")) if native else shutil.which(target.gcc)
    if compiler:
        end = ["-dynamiclib"] if target.suffix == "dylib" else ["-shared", "-s"]
        return [*compiler.split(), "-fPIC", *end]
    if importlib.util.find_spec("ziglang") is None:
        missing = "no C compiler (cc) was found" if native else f"no C compiler for {name} was found"
        raise KernelError(f"{missing}. Install one that does: pip install 'onnx-backprop[plugin]'")
    return [sys.executable, "-m", "ziglang", "cc", "-target", target.zig, "-fPIC", "-shared", "-s"]


def _modules(requests: Mapping[str, Any]) -> list[str]:
    """What another process imports to have the kernels of other domains; KernelError for what none can import."""
    asked = {spec["op"] for spec in requests["specs"]}
    modules = {key: plan.__module__ for key, plan in PLANS.items() if NATIVE_PREFIX + key in asked}
    if alone := [key for key, module in modules.items() if module == "__main__"]:
        raise KernelError(
            f"the kernel of {alone[0]} is defined in the program that runs, and another process makes the library. "
            "Define it in a module"
        )
    return sorted(set(modules.values()))


def make(requests: Mapping[str, Any], name: str) -> bytes:
    """A library for a target, whatever this process makes code for; KernelError where that fails."""
    target = checked(name)
    # in the place of what this process may make code for
    others = {k: v for k, v in os.environ.items() if k != "ONNX_BACKPROP_VECTOR_LENGTH"}
    processor = {
        TRIPLE_VARIABLE: target.triple,
        "NUMBA_CPU_NAME": target.processor,
        "NUMBA_CPU_FEATURES": target.features,
    }
    package = Path(sys.modules[__name__.partition(".")[0]].__file__ or "").parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"), *sys.path)))
    with tempfile.TemporaryDirectory() as folder:
        asked, library = Path(folder) / "requests.json", Path(folder) / f"onnx_backprop.{target.suffix}"
        asked.write_text(json.dumps({**requests, "target": name, "modules": _modules(requests)}))
        done = subprocess.run(
            [sys.executable, "-m", _MAKER, str(asked), str(library), *linker(name)],
            env={**others, **processor, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not library.is_file():
            raise KernelError(f"no library for {name} was made: {done.stderr.strip()[-2000:]}")
        return library.read_bytes()
