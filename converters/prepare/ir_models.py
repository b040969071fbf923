"""Models to and from onnx_ir, which has no type for maps and sequences of them: those are carried beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from onnx import ModelProto, TypeProto

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.functions import use_kernels as kernels
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.lazy import ir, is_ir_model

_TYPE = "onnx_backprop.type"  # what a value's meta holds
Converter = TypeVar("Converter", bound=Callable[..., Any])


def as_given(convert: Converter) -> Converter:
    """A function from a model, its first argument, to a model: it answers an onnx_ir.Model where it is given one."""

    @wraps(convert)
    def converted(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = convert(model, *args, **kwargs)
        return to_ir(result) if is_ir_model(model) else result

    return cast(Converter, converted)


use_kernels = as_given(kernels.use_kernels)


def to_ir(proto: ModelProto) -> ir.Model:
    """`ir.from_proto` for models whose inputs and outputs may be maps, as of ZipMap.

    Errors: InvalidModelError for what onnx_ir does not read.
    """
    try:
        with _unlogged():
            return _to_ir(proto)
    except ir.serde.SerdeError as e:
        cause: BaseException = e
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InvalidModelError(f"the model cannot be read: {cause}") from e


def _to_ir(proto: ModelProto) -> ir.Model:
    model = _read(proto)
    if any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values()):
        from onnx_backprop.converters.prepare.mapped_tensors import share_files  # for which onnx_ir is imported

        share_files(model.graph)
    return model


def _read(proto: ModelProto) -> ir.Model:
    graph = proto.graph
    if not any(_has_map(value.type) for value in (*graph.input, *graph.output, *graph.value_info)):
        return ir.from_proto(proto)
    light = copied(proto)
    types: dict[str, TypeProto] = {}
    for value in (*light.graph.input, *light.graph.output, *light.graph.value_info):
        if _has_map(value.type):
            types[value.name] = copied(value.type)
            value.ClearField("type")
    model = ir.from_proto(light)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in types:
            value.meta[_TYPE] = types[value.name]
    return model


def to_proto(model: ir.Model) -> ModelProto:
    """`ir.to_proto`, with the types that `to_ir` set aside."""
    with _unlogged():
        proto = ir.to_proto(model)
    pairs = [(model.graph.inputs, proto.graph.input), (model.graph.outputs, proto.graph.output)]
    for values, infos in pairs:
        for value, info in zip(values, infos, strict=True):
            if _TYPE in value.meta:
                info.type.CopyFrom(value.meta[_TYPE])
    return proto


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what onnx_ir complains of off the terminal, where it writes names as they are: who is to blame says so."""

    def nothing(_: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("onnx_ir.serde")
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


def _has_map(type_: TypeProto) -> bool:
    kind = type_.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _has_map(getattr(type_, kind).elem_type)
    return kind == "map_type"
