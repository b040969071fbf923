"""What several tests of the operators need: element types, and evaluating an operator by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnx_backprop.opset.registry import BY_NAME

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def evaluate(
    op: str, attributes: Mapping[str, object], inputs: Sequence[np.ndarray | tuple[int, ...] | None], dtype: str = "f32"
) -> np.ndarray:
    """`Op.evaluate` with the floating-point inputs cast to `dtype`; int32 arrays stay what they are."""
    cast = [i.astype(DTYPES[dtype]) if isinstance(i, np.ndarray) and i.dtype.kind == "f" else i for i in inputs]
    return BY_NAME[op].evaluate(cast, attributes)


def assert_rounded_once(got: np.ndarray, exact: object, dtype: str) -> None:
    """`got` is the exact answer rounded to nearest: no tolerance, the type and the shape included."""
    np.testing.assert_array_equal(got, np.asarray(exact, np.float64).astype(DTYPES[dtype]), strict=True)
