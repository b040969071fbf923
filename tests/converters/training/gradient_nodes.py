"""Models with nodes of `Gradient`, and running them expanded in stock onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime
from onnx import ModelProto, checker, parser

import onnx_backprop as ob

IMPORTS = '<ir_version: 10, opset_import: ["": 18, "ai.onnx.preview.training": 1]>'


def gradient(outputs: str, inputs: str, *, xs: str, y: str, zs: str = "", name: str = "gradient") -> str:
    """A Gradient node as text; xs and zs are names with spaces between."""
    lists = [f"xs = [{_quoted(xs)}]", *([f"zs = [{_quoted(zs)}]"] if zs else []), f'y = "{y}"']
    return f"[{name}] {outputs} = ai.onnx.preview.training.Gradient<{', '.join(lists)}>({inputs}) "


def _quoted(names: str) -> str:
    return ", ".join(f'"{name}"' for name in names.split())


def model_of(text: str) -> ModelProto:
    return parser.parse_model(f"{IMPORTS} {text}")


def run(model: ModelProto, **feeds: object) -> dict[str, np.ndarray]:
    """The expanded model in onnxruntime, with nothing registered."""
    expanded = ob.expand_gradients(model, kernels="onnx")
    assert all(node.domain != "ai.onnx.preview.training" for node in expanded.graph.node)
    checker.check_model(expanded, full_check=True)
    session = onnxruntime.InferenceSession(expanded.SerializeToString(), providers=["CPUExecutionProvider"])
    arrays = {name: np.asarray(value, np.float32) for name, value in feeds.items()}
    results = session.run(None, arrays)
    return dict(zip([o.name for o in session.get_outputs()], map(np.asarray, results), strict=True))
