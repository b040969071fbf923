"""The body of route "onnx": standard ONNX operators only, written for the attributes and shapes of one node."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import FunctionProto

from .body import FLOAT, Body, Tensor
from .errors import KernelError
from .function_protos import function, result_type
from .op import Arg, Attributes, Op


def standard_body(
    op: Op, attributes: Attributes, args: Sequence[Arg | None], opset: int, overload: str = ""
) -> FunctionProto:
    """What is known of the inputs is checked and becomes constants; the rest is found at run time.

    Raises what the operator's shape function raises, KernelError where a body needs to know more than is known.
    """
    out = op.shape(attributes, args)
    if op.body is None:
        raise KernelError("there is no body in standard operators", op_type=op.name)
    b = Body(op.name)
    tensors: list[Tensor | None] = []
    for spec, arg in zip(op.inputs, args, strict=True):
        if arg is None:
            tensors.append(None)
        elif spec.type_name == "T1" and not spec.shape_only:
            tensors.append(Tensor(b.Cast(spec.name, to=FLOAT), arg.dims))
        else:
            tensors.append(Tensor(spec.name, arg.dims, arg.value if arg.numbers is None else arg.numbers))
    result = op.body(b, attributes, out, *tensors)
    b.CastLike(result, result_type(op), name=op.output)
    present = tuple(arg is not None for arg in args)
    return function(op, present, b.needed(op.output), overload=overload, opset=opset)
