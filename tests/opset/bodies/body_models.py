"""Models of one interpolation gradient with its body in standard operators, in sessions that know no other ones.

`KNOWLEDGE` is what a model tells of the shapes of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob
from tests.support import single_op
from tests.support.checks import evaluate, one_node_model

f32 = np.float32
KNOWLEDGE = ("static", "batch", "symbolic", "rank", "nothing")
CPU = ["CPUExecutionProvider"]
Arrays = Sequence[np.ndarray | None]


def int32s(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def int64s(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def floats(values: Sequence[float]) -> np.ndarray:
    return np.array(values, np.float32)


def plain_session(model: ModelProto) -> onnxruntime.InferenceSession:
    """With the bodies attached; no library is registered."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ob.use_kernels(model, "onnx").SerializeToString(), options, providers=CPU)


def model_of(op: str, attributes: Mapping[str, Any], arrays: Arrays, knowledge: str, constants: bool) -> ModelProto:
    """One node. Inputs that carry numbers are initializers (`constants`) or inputs of the run."""
    given: list[Any] = []
    for n, array in enumerate(arrays):
        if array is None:
            given.append(None)
        elif array.dtype != f32 or (op == "ResizeGrad" and n > 1):
            given.append(array if constants else list(array.shape) if knowledge == "static" else [None] * array.ndim)
        else:
            dims: dict[str, list[Any]] = {
                "static": list(array.shape),
                "batch": ["N", *array.shape[1:]][: array.ndim],
                "symbolic": [f"length_{n}_{k}" for k in range(array.ndim)],
                "rank": [None] * array.ndim,
                "nothing": [],
            }
            given.append(dims[knowledge])
    model = one_node_model(op, attributes, given)
    if knowledge == "nothing":
        for value in model.graph.input:
            value.type.tensor_type.ClearField("shape")
    return model


def run(session: onnxruntime.InferenceSession, op: str, arrays: Arrays) -> np.ndarray:
    accepted = {i.name for i in session.get_inputs()}
    feeds = {k: v for k, v in single_op.feeds(op, arrays).items() if k in accepted}
    return np.asarray(session.run(None, feeds)[0])


def answer(op: str, attributes: Mapping[str, Any], arrays: Arrays, knowledge: str, *, constants: bool) -> np.ndarray:
    return run(plain_session(model_of(op, attributes, arrays, knowledge, constants)), op, arrays)


def assert_right(
    op: str, attributes: Mapping[str, Any], arrays: Arrays, knowledge: str, *, constants: bool = False
) -> None:
    """The body's answer is the reference's, up to float32."""
    expected = evaluate(op, attributes, arrays)
    got = answer(op, attributes, arrays, knowledge, constants=constants)
    shapes = [a if a is None or (a.ndim == 1 and n) else a.shape for n, a in enumerate(arrays)]
    message = f"{op} {dict(attributes)} {shapes}, model knows {knowledge}, constants {constants}"
    atol = max(1e-5, 1e-6 * float(np.abs(expected).max(initial=0)))  # sums that cancel have the terms of the others
    np.testing.assert_allclose(got, expected, rtol=4e-6, atol=atol, err_msg=message, strict=True)


# Attributes of calls that the tests change
SPEC: dict[str, Any] = {"mode": "linear", "data_format": "NCX"}
RESAMPLE: dict[str, Any] = {
    "interpolation_mode": "LINEAR",
    "scales": [],
    "input_pixel_offsets": [],
    "output_pixel_offsets": [],
}
