"""What several tests of the operators need: element types, evaluating an operator by its name, static models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.support.single_op import KINDS, results_of

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

NUMBER_ELEMENTS: dict[str, int] = {
    "T2": TensorProto.INT32,
    "T3": TensorProto.FLOAT,
    "T4": TensorProto.INT64,
    "T5": TensorProto.FLOAT,
    "T6": TensorProto.UINT8,
    "T7": TensorProto.INT64,
}

Shape = Sequence[int | str | None]


def evaluate(
    op: str,
    attributes: Mapping[str, object],
    inputs: Sequence[np.ndarray | tuple[int, ...] | None],
    dtype: str = "f32",
    operators: Mapping[str, Op] = BY_NAME,
) -> np.ndarray:
    """The first output of `evaluate_all`."""
    return evaluate_all(op, attributes, inputs, dtype, operators)[0]


def evaluate_all(
    op: str,
    attributes: Mapping[str, object],
    inputs: Sequence[np.ndarray | tuple[int, ...] | None],
    dtype: str = "f32",
    operators: Mapping[str, Op] = BY_NAME,
) -> tuple[np.ndarray, ...]:
    """`Op.evaluate_all`, T1 tensors of float32 cast to `dtype`; numbers and every other array stay what they are."""
    tensors = [spec.type_name == "T1" for spec in BY_NAME[op].inputs]
    cast = [
        i.astype(DTYPES[dtype]) if isinstance(i, np.ndarray) and i.dtype == np.float32 and tensor else i
        for i, tensor in zip(inputs, [*tensors, *[True] * len(inputs)], strict=False)
    ]
    return operators[op].evaluate_all(cast, attributes)


def assert_rounded_once(got: np.ndarray, exact: object, dtype: str) -> None:
    """`got` is the exact answer rounded to nearest: no tolerance, the type and the shape included."""
    assert got.dtype == DTYPES[dtype]
    wanted = np.asarray(exact, np.float64).astype(DTYPES[dtype])
    # a NaN is one in float64 only
    np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64), strict=True)


def assert_rounded(got: np.ndarray, exact: np.ndarray, dtype: str, *, error: float, message: str = "") -> None:
    """The same type and shape, within `error` of the largest entry, and one unit of `dtype` in the last place."""
    assert (got.dtype, got.shape) == (exact.dtype, exact.shape), message
    unit = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype] if error else 0
    allowed = error * np.abs(exact).max(initial=0) + unit * np.abs(exact)
    worst = np.abs(got - exact) - allowed
    assert worst.max(initial=0) <= 0, (
        f"{message}: {worst.max()} more than allowed at {np.unravel_index(worst.argmax(), got.shape)}"
    )


def one_node_model(
    op: str,
    attributes: Mapping[str, object],
    inputs: Sequence[Shape | np.ndarray | None],
    *,
    element_type: int = TensorProto.FLOAT,
    output_ranks: Sequence[int] | None = None,
) -> ModelProto:
    """One node. A shape makes a graph input of it, an array an initializer, None an absent input.

    A graph input that carries numbers is written as a shape too: their type is the operator's own statement.
    """
    node_inputs, graph_inputs, initializers = [], [], []
    for spec, given in zip(BY_NAME[op].inputs, inputs, strict=False):
        node_inputs.append("" if given is None else spec.name)
        if isinstance(given, np.ndarray):
            initializers.append(numpy_helper.from_array(given, spec.name))
        elif given is not None:
            element = NUMBER_ELEMENTS.get(spec.type_name, element_type)
            graph_inputs.append(helper.make_tensor_value_info(spec.name, element, given))
    while node_inputs and not node_inputs[-1]:
        node_inputs.pop()
    results = results_of(op)
    node = helper.make_node(op, node_inputs, results, domain=ob.DOMAIN, name="the_node")
    kinds = {a.name: KINDS.get(a.kind) for a in BY_NAME[op].attributes}
    for name, value in attributes.items():
        empty = isinstance(value, list | tuple) and not value
        node.attribute.append(helper.make_attribute(name, value, attr_type=kinds.get(name) if empty else None))
    outputs = []
    for n, (name, spec) in enumerate(zip(results, BY_NAME[op].outputs, strict=True)):
        output_type = element_type if spec.type_name == "T1" else TensorProto.FLOAT
        dims = None if output_ranks is None else [None] * output_ranks[n]
        outputs.append(helper.make_tensor_value_info(name, output_type, dims))
    graph = helper.make_graph([node], "g", graph_inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def infer(model: ModelProto) -> ModelProto:
    """Strict shape inference with everything onnx can check switched on."""
    return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def inferred(model: ModelProto, name: str | None = None) -> list[int | str | None] | None:
    """The dimensions of a value (the first output) after strict inference; None for no shape, and for no number.

    The model must pass onnx's checker as well. Names that onnx makes up count as unknown.
    """
    model = infer(model)
    values = [*model.graph.output, *model.graph.value_info]
    value = next(v for v in values if name is None or v.name == name)
    if value.type.tensor_type.HasField("shape"):
        checker.check_model(model, full_check=True)
    return dims_of(value)


def dims_of(value: ValueInfoProto) -> list[int | str | None] | None:
    """The dimensions of an inferred value; None for no shape, and for no number."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else None if d.dim_param.startswith("unk__") else d.dim_param or None
        for d in value.type.tensor_type.shape.dim
    ]
