"""A small classifier with statistics and a Dropout, a batch for it, and one run of a checked model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

SEED = 77


def network(*, training: int = 0, element: str = "float") -> ModelProto:
    """Gemm, BatchNormalization, Relu, Dropout, Gemm; one metadata entry."""
    ones = ", ".join(["1.0"] * 5)
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        classifier ({element}[N, 4] x) => ({element}[N, 3] y)
        <{element}[5] layer__scale = {{1.0, 2.0, 3.0, 4.0, 5.0}}, {element}[5] layer__shift = {{{ones}}},
         {element}[5] layer__mean = {{{ones.replace("1", "0")}}}, {element}[5] layer__variance = {{{ones}}},
         float ratio = {{0.5}}, bool mode = {{{training}}}>
        {{
            hidden = Gemm(x, layer__weight, layer__bias)
            normal = BatchNormalization<training_mode = 0, momentum = 0.8>
                (hidden, layer__scale, layer__shift, layer__mean, layer__variance)
            positive = Relu(normal)
            [drop] kept = Dropout(positive, ratio, mode)
            y = Gemm(kept, head__weight, head__bias)
        }}
    """)
    model.metadata_props.add(key="author", value="somebody")
    for part in (*model.graph.node, *model.graph.initializer):
        if isinstance(part, onnx.NodeProto):
            part.input[:] = [name.replace("__", ".") for name in part.input]
        else:
            part.name = part.name.replace("__", ".")
    kind = np.float32 if element == "float" else np.float64
    rng = np.random.default_rng(SEED)
    shapes = {"layer.weight": (4, 5), "layer.bias": (5,), "head.weight": (5, 3), "head.bias": (3,)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(kind), name))
    return model


def batch(rows: int = 6, dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED + 1)
    return {"x": rng.standard_normal((rows, 4)).astype(dtype), "labels": rng.integers(0, 3, rows)}


def run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = ob.session(model, kernels=None)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(feeds))), strict=True))


def rate(value: float = 0.1) -> np.ndarray:
    return np.array(value, np.float32)
