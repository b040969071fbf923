"""The processors of `make processors`, and how a process on this one becomes one of them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

# architecture, vector length, registers
SSE2, AVX2, AVX512, NEON = "x86_64 4 16", "x86_64 8 16", "x86_64 16 32", "aarch64 4 32"
CHOOSING = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ONNX_BACKPROP_VECTOR_LENGTH")


def inherited() -> dict[str, str]:
    """This process's variables, without those that choose a processor or what is compiled."""
    return {
        name: value for name, value in os.environ.items() if name not in (*CHOOSING, "NUMBA_CACHE_DIR", "NUMBA_OPT")
    }


def folder(root: Path, name: str) -> Path:
    """What is kept of one processor."""
    return root / "build" / "processors" / name


def cache(root: Path, name: str) -> str:
    """The cache for one processor. A change of the kernels' sources makes a new one, and the old ones go."""
    digest = hashlib.sha256()
    for path in sorted((root / "ort_ops").rglob("*.py")):
        digest.update(path.read_bytes())
    kept = folder(root, name) / f"cache-{digest.hexdigest()[:12]}"
    for old in folder(root, name).glob("cache*"):
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)
    return str(kept)


def avx2(root: Path) -> dict[str, str]:
    """LLVM generates code for a Haswell, with what that processor has and nothing else."""
    return {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache(root, "avx2")}


def sse2(root: Path) -> dict[str, str]:
    """LLVM generates code for any x86-64 processor."""
    return {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache(root, "sse2")}


def host_width() -> int:
    """The vector length of this host, whatever this process is told."""
    code = "from onnx_backprop.ort_ops.compiler.machine import WIDTH; print(WIDTH)"
    return int(subprocess.run([sys.executable, "-c", code], env=inherited(), capture_output=True, check=True).stdout)


def reason_against_x86(width: int) -> str:
    """Why this host cannot run an x86 processor's code with vectors of this length; '' where it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"this needs an x86-64 host, not {platform.machine()}"
    return "" if host_width() >= width else f"this needs a host with vectors of {width} float32, not {host_width()}"
