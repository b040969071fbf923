"""Processes whose kernels are those of a processor with registers of another length."""

from __future__ import annotations


def environment(length: int) -> dict[str, str]:
    """What such a process finds there besides this one's variables: where loops are cut depends on the length alone."""
    return {"ONNX_BACKPROP_VECTOR_LENGTH": str(length)}
