"""The processors of `make processors`, and how a process on this one becomes one of them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

# architecture, vector length, registers
AVX2, AVX512, NEON = "x86_64 8 16", "x86_64 16 32", "aarch64 4 32"
CHOOSING = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ONNX_BACKPROP_VECTOR_LENGTH")


def inherited() -> dict[str, str]:
    """This process's variables, without those that choose a processor or what is compiled."""
    return {
        name: value for name, value in os.environ.items() if name not in (*CHOOSING, "NUMBA_CACHE_DIR", "NUMBA_OPT")
    }


def folder(root: Path, name: str) -> Path:
    """What is kept of one processor."""
    return root / "build" / "processors" / name


def avx2(root: Path) -> dict[str, str]:
    """Numba generates code for a Haswell, with what that processor has and nothing else."""
    cache = str(folder(root, "avx2") / "cache")
    return {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache}


def host_width() -> int:
    """The vector length of this host, whatever this process is told."""
    code = "from onnx_backprop.ort_ops.machine import WIDTH; print(WIDTH)"
    return int(subprocess.run([sys.executable, "-c", code], env=inherited(), capture_output=True, check=True).stdout)


def reason_against_avx2() -> str:
    """Why this host cannot run a Haswell's code; '' where it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"AVX2 needs an x86 host, this is {platform.machine()}"
    return "" if host_width() >= 8 else "this host has no AVX2"
