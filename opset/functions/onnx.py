"""The body of route "onnx": standard ONNX operators only, written for the attributes and shapes of one node."""

from collections import OrderedDict
from collections.abc import Sequence

from onnx import FunctionProto, helper

from onnx_backprop.opset.bodies.builder import FLOAT, Body, Tensor
from onnx_backprop.opset.core.op import Arg, Attributes, Op
from onnx_backprop.opset.functions.protos import function, in_its_type

# What has been written, by all that it depends on; equal nodes, and the same model converted once more, are many.
_MOST_BODIES, _MOST_BYTES = 256, 1 << 16
_written: OrderedDict[tuple[object, ...], FunctionProto] = OrderedDict()


def standard_body(
    op: Op,
    attributes: Attributes,
    args: Sequence[Arg | None],
    opset: int,
    outputs: int | None = None,
    *,
    single: bool = False,
) -> FunctionProto:
    """What is known of the inputs is checked and becomes constants; the rest is found at run time.

    single: the tensors are known to be float32. No node casts them then: onnxruntime takes such a node away, but not
    where its result is one of the graph.

    Raises what the operator's shape function raises, KernelError where a body needs to know more than is known.
    """
    arguments = repr((dict(attributes), [*args], opset, outputs, single))  # which tells 0.0 from -0.0
    key = op.key, op.shape, op.body, arguments
    result, known = FunctionProto(), _written.get(key)
    if known is not None:
        result.CopyFrom(known)
        return result
    written = _body(op, attributes, args, opset, outputs, single=single)
    if written.ByteSize() <= _MOST_BYTES:
        result.CopyFrom(written)
        _written[key] = result
        while len(_written) > _MOST_BODIES:
            _written.popitem(last=False)
    return written


def _body(
    op: Op, attributes: Attributes, args: Sequence[Arg | None], opset: int, outputs: int | None, *, single: bool
) -> FunctionProto:
    op.shapes(attributes, args)
    b = Body(op.name)
    tensors: list[Tensor | None] = []
    for spec, arg in zip(op.inputs, args, strict=True):
        if arg is None:
            tensors.append(None)
        elif spec.floats and not spec.shape_only and not single:
            tensors.append(Tensor(b.Cast(spec.name, to=FLOAT), arg.dims))
        else:
            tensors.append(Tensor(spec.name, arg.dims, arg.value))
    assert op.body is not None
    written = op.body(b, attributes, *tensors)
    results = [written] if isinstance(written, str) else written
    for output, result in zip(op.outputs, results, strict=True):
        if not single:
            b.nodes.append(in_its_type(op, output, result))
        elif len(results) == 1 and b.nodes and list(b.nodes[-1].output) == [result]:
            b.nodes[-1].output[0] = output.name  # nobody reads what the last node makes
        else:
            b.nodes.append(helper.make_node("Identity", [result], [output.name]))
    present = tuple(arg is not None for arg in args)
    nodes = b.needed(*(output.name for output in op.outputs[:outputs]))
    return function(op, present, nodes, overload="", opset=opset, outputs=outputs)
