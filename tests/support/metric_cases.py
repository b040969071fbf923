"""A model whose output is its input, so that tests of metrics choose the prediction; and batches of unequal size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper, parser

import onnx_backprop as ob


def trainer(shape: str, loss: Any, **options: Any) -> ob.Trainer:
    """y = x · s with s = 1. shape: of x, as N, 3."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[{shape}] x) => (float[{shape}] y) {{ y = Mul(x, s) }}'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "s"))
    return ob.Trainer(ob.training_graph(model, loss=loss, optimizer="sgd", trainable=["s"]), kernels="onnx", **options)


def parts(arrays: Mapping[str, np.ndarray], sizes: Iterable[int] = (3, 1, 5)) -> list[dict[str, np.ndarray]]:
    """Batches of these sizes, and one of the rest."""
    ends = np.cumsum([0, *sizes])
    rows = len(next(iter(arrays.values())))
    bounds = zip(ends, [*ends[1:], rows], strict=True)
    return [{name: array[start:end] for name, array in arrays.items()} for start, end in bounds if start < rows]
