"""Processes whose kernels are those of a processor with registers of another length."""

from __future__ import annotations


def environment(length: int) -> dict[str, str]:
    """What such a process finds there besides this one's variables: where loops are cut depends on the length alone.

    Compiled anew every time and without LLVM's optimisation, which takes most of the time and knows no such cuts.
    """
    return {"ONNX_BACKPROP_VECTOR_LENGTH": str(length), "NUMBA_OPT": "0"}
