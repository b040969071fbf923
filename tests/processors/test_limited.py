"""A quick part of `make processors`: a processor with AVX2 and 16 registers, where this one has more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onnx_backprop.ort_ops.compiler import machine
from tests.processors import limited
from tests.processors.emulated import ROOT

TILE = """
import functools, re
from llvmlite import ir
from onnx_backprop.ort_ops.compiler import llvm, machine
from onnx_backprop.ort_ops.vector import gemm_tile
module = ir.Module()
module.triple = machine.TRIPLE
tile = functools.partial(gemm_tile._tile, rows=gemm_tile.ROWS, vectors=gemm_tile.VECTORS)
llvm.function_of(module, "tile", 12, tile)
text = machine.assembly(str(module))
registers = {int(number) for number in re.findall(r"%[xyz]mm([0-9]+)", text)}
kept = [line for line in text.splitlines() if re.search(r"mm[0-9]+, -?[0-9]*[(]%rsp[)]", line)]
print(max(registers), "%zmm" in text, len(kept), text.count("vfmadd"))
"""


def python(*arguments: str, **variables: str) -> str:
    """What a process on the limited processor prints."""
    environment = limited.inherited() | limited.avx2(ROOT) | variables
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.skipif(not machine.TRIPLE.startswith("x86_64"), reason="AVX2 is x86's")
def test_the_largest_tile_fits_into_16_registers() -> None:
    """12 sums, two vectors and a scalar; nothing is put aside, and nothing is wider or further than this has."""
    assert python("-c", TILE) == "14 False 0 12\n"


@pytest.mark.skipif(machine.WIDTH == 8, reason="all tests are run on such a processor")
def test_a_sample() -> None:
    """Compiled once, into build/processors/."""
    if reason := limited.reason_against_x86(8):
        pytest.skip(reason)
    printed = python("-m", "tests.processors.sample", "--expect", limited.AVX2, "--every", "4")
    assert int(printed.split("passed: ")[1]) >= 100, printed
    with pytest.raises(AssertionError, match="code is generated for 'x86_64 16 32', not for 'x86_64 8 16'"):
        python("-m", "tests.processors.sample", "--expect", limited.AVX2, NUMBA_CPU_FEATURES="+avx512f")
