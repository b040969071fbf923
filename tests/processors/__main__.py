"""`make processors`: the kernels as other processors run them. Ends with 1 if anything is wrong or missing.

avx512: vectors of 16 and 32 registers, where the host has it.
avx2: vectors of 8 and 16 registers, on an x86 host that has it: LLVM is told so, and generates nothing else. Of these
two, all tests of kernels are run.
sse2: vectors of 4 and 16 registers, likewise: a sample.
neon: aarch64, vectors of 4, 32 registers: a sample, under emulation, which is ten times slower.

What was compiled and downloaded lies in build/processors/ and is used again.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onnx_backprop.ort_ops.compiler import machine

from . import emulated, limited
from .emulated import MissingError

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/ort_ops",
    "tests/property",
    "tests/opset/operators",
    "tests/opset/test_golden.py",
    "tests/opset/test_worked_examples.py",
)


def call(*command: str, **variables: str) -> None:
    """Run and show; a failure ends the run of this processor."""
    if subprocess.run(command, cwd=ROOT, env=limited.inherited() | variables, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command[-8:])}")


def require_x86(width: int) -> None:
    if reason := limited.reason_against_x86(width):
        raise MissingError(reason)


def sample(variables: dict[str, str], expected: str) -> None:
    call(sys.executable, "-m", "tests.ort_ops.compile_kernels", **variables)
    call(sys.executable, "-m", "tests.processors.sample", "--expect", expected, **variables)


def tests_of_kernels(variables: dict[str, str], expected: str) -> None:
    sample(variables, expected)
    call(
        sys.executable, "-m", "pytest", "--quiet", "--numprocesses", "auto", "--dist", "worksteal", *TESTS, **variables
    )


def sse2() -> None:
    require_x86(4)
    sample(limited.sse2(ROOT), limited.SSE2)


def avx2() -> None:
    require_x86(8)
    tests_of_kernels(limited.avx2(ROOT), limited.AVX2)


def avx512() -> None:
    tests_of_kernels({}, limited.AVX512)


def neon() -> None:
    if platform.machine() in ("aarch64", "arm64"):
        tests_of_kernels({}, limited.NEON)
        return
    start = time.perf_counter()
    python, variables = emulated.environment(limited.folder(ROOT, "neon"))
    variables["NUMBA_CACHE_DIR"] = limited.cache(ROOT, "neon")
    print(f"aarch64: Python and packages after {time.perf_counter() - start:.0f} s", flush=True)
    parts = machine.cores()
    guest = [*python, "-W", "ignore", "-m", "tests.processors.sample", "--expect", limited.NEON]
    shares = [
        subprocess.Popen([*guest, "--compile", f"{n}/{parts}"], cwd=ROOT, env=limited.inherited() | variables)
        for n in range(parts)
    ]
    codes = [share.wait() for share in shares]
    if any(codes):
        raise SystemExit("failed: compiling the kernels")
    call(*guest, **variables)


RUNS: dict[str, Callable[[], None]] = {"avx512": avx512, "avx2": avx2, "sse2": sse2, "neon": neon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RUNS, action="append", help="one of them (may be repeated)")
    chosen = parser.parse_args().only or list(RUNS)
    outcome = {}
    for name in chosen:
        if name == "avx512" and limited.host_width() < 16:
            outcome[name] = "not run: this host has none"
            continue
        print(f"===== {name}", flush=True)
        start = time.perf_counter()
        try:
            RUNS[name]()
            outcome[name] = f"passed in {time.perf_counter() - start:.0f} s"
        except MissingError as e:
            outcome[name] = f"MISSING: {e}"
        except SystemExit as e:
            outcome[name] = f"FAILED: {e}"
    print("processors:", "; ".join(f"{name}: {text}" for name, text in outcome.items()))
    if any(text.startswith(("MISSING", "FAILED")) for text in outcome.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
