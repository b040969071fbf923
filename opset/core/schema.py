"""From an `Op` to what ONNX tools understand: a registered schema with inference, a reference-evaluator class."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
from onnx import AttributeProto, TensorProto, TensorShapeProto, TypeProto, helper, numpy_helper
from onnx.defs import OpSchema, has, register_schema

from onnx_backprop.opset.core.errors import InvalidModelError, RegistrationError
from onnx_backprop.opset.core.op import _SCHEMA_KIND, NUMBER_TYPES, Arg, Array, Attribute, Attributes, Input, Op
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.types import shape_dims, type_dims

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun

_SINGLE, _OPTIONAL = OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional


def build_schema(op: Op) -> OpSchema:
    """The ONNX schema of an operator, its Python type and shape inference attached."""
    schema = OpSchema(
        op.name,
        op.domain,
        op.version,
        textwrap.dedent(op.doc).strip() + (op.source and f"\n\nSource: {op.source}."),
        inputs=[_formal(i) for i in op.inputs],
        outputs=[
            OpSchema.FormalParameter(o.name, o.type_name, o.doc, param_option=_OPTIONAL if n else _SINGLE)
            for n, o in enumerate(op.outputs)
        ],
        type_constraints=_type_constraints(op),
        attributes=[_schema_attribute(a) for a in op.attributes],
    )
    schema.set_type_and_shape_inference_function(lambda context: infer(op, context))
    return schema


def _type_constraints(op: Op) -> list[tuple[str, Sequence[str], str]]:
    used = {formal.type_name for formal in (*op.inputs, *op.outputs)}
    return [(name, list(t.types), t.doc) for name, t in NUMBER_TYPES.items() if name in used]


def _formal(i: Input) -> OpSchema.FormalParameter:
    return OpSchema.FormalParameter(i.name, i.type_name, i.doc, param_option=_OPTIONAL if i.optional else _SINGLE)


def _schema_attribute(a: Attribute) -> OpSchema.Attribute:
    if a.default is not None:
        return OpSchema.Attribute(a.name, helper.make_attribute(a.name, a.default), a.doc)
    return OpSchema.Attribute(a.name, _SCHEMA_KIND[a.kind], a.doc, required=a.required)


def register(ops: Iterable[Op]) -> None:
    """Register the schemas with onnx, once per process; a foreign schema of the same name is an error."""
    for op in ops:
        if has(op.name, op.domain):
            raise RegistrationError(f"a schema for {op.domain}::{op.name} exists already", op_type=op.name)
        register_schema(build_schema(op))


def infer(op: Op, context: Any) -> None:
    """Carry types and shapes from an onnx InferenceContext into `op.shape` and back."""
    present = [context.has_input(n) for n in range(context.get_num_inputs())]
    op.require_inputs(present)
    args = [_arg(context, n, spec) if n < len(present) else None for n, spec in enumerate(op.inputs)]
    shapes = op.shapes(Attributes(op, _given_attributes(op, context)), args)
    tensors = [n for n, there in enumerate(present) if there and op.inputs[n].type_name == "T1"]
    types = [context.get_input_type(n) for n in tensors]
    known = next((t for t in types if t is not None), None)
    if known is None:  # behind an operator that onnx does not know: leave the output untyped as well
        return
    for n, (output, dims) in enumerate(zip(op.outputs, shapes, strict=True)):
        if n >= context.get_num_outputs():
            break
        result = TypeProto()
        element = known.tensor_type.elem_type if output.type_name == "T1" else TensorProto.FLOAT
        result.tensor_type.elem_type = element
        if dims is not None:
            result.tensor_type.shape.CopyFrom(_shape_proto(dims))
        context.set_output_type(n, result)


def _given_attributes(op: Op, context: Any) -> dict[str, object]:
    given: dict[str, object] = {}
    for a in op.attributes:
        proto: AttributeProto | None = context.get_attribute(a.name)
        if proto is not None and not proto.ref_attr_name:
            given[a.name] = helper.get_attribute_value(proto)
    return given


def _arg(context: Any, n: int, spec: Input) -> Arg | None:
    if not context.has_input(n):
        return None
    proto: TypeProto | None = context.get_input_type(n)
    dims = None if proto is None else type_dims(proto)
    if spec.tensor:
        return Arg(dims)
    data = context.get_input_data(n)
    if data is not None:
        return Arg.of_array(spec, dims, numpy_helper.to_array(data))
    whole = proto is not None and proto.tensor_type.elem_type in (TensorProto.INT32, TensorProto.INT64)
    symbolic = context.get_symbolic_input(n) if whole else None  # onnx joins floats into shapes of unknown lengths
    return Arg(dims, None if symbolic is None else shape_dims(symbolic))


def _shape_proto(dims: Dims) -> TensorShapeProto:
    result = TensorShapeProto()
    for d in dims:
        entry = result.dim.add()
        if isinstance(d, int):
            entry.dim_value = d
        elif d is not None:
            entry.dim_param = d
    return result


def reference_class(op: Op) -> type[OpRun]:
    """A class for `onnx.reference.ReferenceEvaluator(model, new_ops=[…])` that runs the float64 reference."""
    from onnx.reference.op_run import OpRun  # reads every schema of onnx, a tenth of what importing this package takes

    def _run(self: OpRun, *inputs: Array | None, **attributes: object) -> tuple[Array, ...]:
        given = {k: v for k, v in attributes.items() if v is not None}
        return op.evaluate_all(inputs, given)[: len(self.onnx_node.output)]

    return type(op.name, (OpRun,), {"op_domain": op.domain, "_run": _run, "__doc__": op.doc})


def attributes_of(node: onnx.NodeProto) -> dict[str, object]:
    """The attributes of a node as Python values."""
    if any(a.ref_attr_name for a in node.attribute):
        raise InvalidModelError("attributes refer to a function's", op_type=node.op_type, node=node.name)
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
