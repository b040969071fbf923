"""MatMulNBits of com.microsoft, which stays in a training graph: its schema, which onnx lacks, and its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TypeProto, helper
from onnx.defs import OpSchema, has, register_schema

from onnx_backprop.opset.core.op import FLOAT_TYPES
from onnx_backprop.opset.maths.packed import dequantised, lengths_of

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun

MICROSOFT, NAME = "com.microsoft", "MatMulNBits"
DEFAULTS = {"bits": 4, "accuracy_level": 0, "weight_prepacked": 0}
ATTRIBUTES = ("K", "N", "block_size", "bits")  # that say what the weight is
_REQUIRED = ATTRIBUTES[:3]
_TYPES = [("T1", FLOAT_TYPES, ""), ("T2", ["tensor(uint8)"], ""), ("T4", ["tensor(int32)"], "")]
_TYPES.append(("T3", ["tensor(uint8)", *FLOAT_TYPES], ""))
_INPUTS = {"A": "T1", "B": "T2", "scales": "T1", "zero_points": "T3", "g_idx": "T4", "bias": "T1"}


def register() -> None:
    """Let onnx infer what the operator makes; nothing where a schema of it is registered already."""
    if has(NAME, MICROSOFT):
        return
    single, optional = OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional
    schema = OpSchema(
        NAME,
        MICROSOFT,
        1,
        "y = A · Wᵀ + bias, W (N, K) = (B - zero_points) · scales. Source: onnxruntime, ContribOperators.md.",
        inputs=[
            OpSchema.FormalParameter(name, kind, "", param_option=optional if n > 2 else single)
            for n, (name, kind) in enumerate(_INPUTS.items())
        ],
        outputs=[OpSchema.FormalParameter("Y", "T1", "")],
        type_constraints=_TYPES,
        attributes=[
            *(OpSchema.Attribute(name, OpSchema.AttrType.INT, "", required=True) for name in _REQUIRED),
            *(OpSchema.Attribute(name, helper.make_attribute(name, value), "") for name, value in DEFAULTS.items()),
        ],
    )
    schema.set_type_and_shape_inference_function(_infer)
    register_schema(schema)


def _infer(context: Any) -> None:
    """Y has the type and the shape of A, but N for the last length."""
    known: TypeProto | None = context.get_input_type(0)
    if known is None or not known.tensor_type.elem_type:
        return
    result = TypeProto()
    result.CopyFrom(known)
    if len(result.tensor_type.shape.dim):
        result.tensor_type.shape.dim[-1].Clear()
        result.tensor_type.shape.dim[-1].dim_value = helper.get_attribute_value(context.get_attribute("N"))
    context.set_output_type(0, result)


def rounds(node: NodeProto) -> bool:
    """Whether onnxruntime rounds what a node multiplies."""
    return node.op_type == NAME and any(a.name == "accuracy_level" and a.i == 4 for a in node.attribute)


def reference_class() -> type[OpRun]:
    """For `onnx.reference.ReferenceEvaluator(model, new_ops=[…])`; what `accuracy_level` rounds is not rounded."""
    from onnx.reference.op_run import OpRun

    def _run(
        _self: OpRun, a: np.ndarray, b: np.ndarray, scales: np.ndarray, *more: Any, **given: Any
    ) -> tuple[np.ndarray]:
        points, _, bias = (*more, None, None, None)[:3]
        attributes = DEFAULTS | {name: value for name, value in given.items() if value is not None}
        shapes = lengths_of(attributes)
        if points is not None:
            points = points.reshape(shapes[2 if points.dtype == np.uint8 else 3])
        w = dequantised(attributes, b.reshape(shapes[0]), scales.reshape(shapes[1]), points)
        y = a @ w.T.astype(a.dtype)
        return (y if bias is None else y + bias,)

    return type(NAME, (OpRun,), {"op_domain": MICROSOFT, "_run": _run})
