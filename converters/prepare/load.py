"""From what a user hands over to a graph ready to be differentiated: loaded, checked, inlined, one opset, typed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, defs

from onnx_backprop.converters.prepare.accept import put_back_domains, put_in_order
from onnx_backprop.converters.prepare.branches import take_branches
from onnx_backprop.converters.prepare.exporters.detached import restore_detached
from onnx_backprop.converters.prepare.exporters.hidden_weights import lift_weights, mark_constants
from onnx_backprop.converters.prepare.exporters.merged import removed, separate_named, tie_reshaped
from onnx_backprop.converters.prepare.exporters.no_grad import restore_no_grad
from onnx_backprop.converters.prepare.exporters.origins import (
    BLOCKS,
    DETACHED,
    MERGED,
    NO_GRAD,
    REMOVED,
    SEPARATED,
    TIED,
    attach,
    origins,
)
from onnx_backprop.converters.prepare.exporters.restore import restore, tie_transposed, unfold
from onnx_backprop.converters.prepare.exporters.statistics import split_statistics
from onnx_backprop.converters.prepare.fused.expand import expand_fused
from onnx_backprop.converters.prepare.inference.conv_lengths import explicit_pads
from onnx_backprop.converters.prepare.inference.declared import LIKE_INPUT, as_declared, forget_declared
from onnx_backprop.converters.prepare.inference.driver import infer_corrected
from onnx_backprop.converters.prepare.inference.empty_axes import without_empty_axes
from onnx_backprop.converters.prepare.inference.equal_lengths import name_equal_lengths
from onnx_backprop.converters.prepare.inference.inner_constants import copy_constants
from onnx_backprop.converters.prepare.inference.loop_lengths import loop_states
from onnx_backprop.converters.prepare.inference.loop_sequences import loose_sequences
from onnx_backprop.converters.prepare.inference.resize_lengths import hidden_scales
from onnx_backprop.converters.prepare.inference.sequence_lengths import ranked_elements
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.large_weights import LargeWeights, set_aside
from onnx_backprop.converters.prepare.packed_products import pack_products
from onnx_backprop.converters.prepare.upgrade import upgrade
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, OnnxBackpropError, UnsupportedError
from onnx_backprop.opset.core.hints import suggest
from onnx_backprop.opset.core.mapped import PROTO_LIMIT, byte_size, is_mapped
from onnx_backprop.opset.core.op import DOMAIN
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.functions.long_vectors import infer_shapes
from onnx_backprop.opset.functions.overloads import NEEDS_DOMAIN, REFUSAL
from onnx_backprop.opset.functions.scope import custom_nodes
from onnx_backprop.opset.functions.use_kernels import DEFAULT_KERNELS, use_kernels
from onnx_backprop.opset.graphs.edit import assign, without_imports
from onnx_backprop.opset.graphs.walk import all_nodes, called

Names = TypeVar("Names", bound=Sequence[object])
Edit = Callable[[ModelProto, Mapping[str, TensorProto], Mapping[str, TypeProto]], None]
Free = Mapping[str, Mapping[int, str]]  # symbols by axes of inputs: see `lengths.free`
MOST_ELEMENTS = 2**47


def prepare(model: ModelProto | ir.Model | str | Path, edit: Edit | None = None) -> ModelProto:
    """A checked copy with model-local functions inlined and fused operators written out, opset 18 or later, and typed.

    Running statistics that an exporter merged with weights are tensors of their own. Of declared types and shapes those
    of graph inputs alone are believed, see `declared`.

    edit: changes the model in place before fused operators are written out; it is given the weights that
    inputs stand for too, and the types that the file declares.
    """
    proto, weights = _in_order(model)
    origins_by_name = origins(proto, weights.tensors)
    changes = restore(proto, origins_by_name)
    unfold(proto, origins_by_name, weights.tensors)
    transposed = tie_transposed(proto, origins_by_name, weights.tensors)
    changes[SEPARATED], tied = separate_named(proto, origins_by_name, weights.tensors)
    changes[TIED] = [*transposed, *tied, *tie_reshaped(proto, origins_by_name, weights.tensors)]
    changes[REMOVED] = removed(proto, origins_by_name)
    changes[DETACHED] = restore_detached(proto)
    changes[NO_GRAD], changes[BLOCKS], changes[MERGED] = restore_no_grad(proto)
    declared = forget_declared(proto)
    proto = _inline(proto)
    lift_weights(proto)
    take_branches(proto)
    copy_constants(proto)
    without_empty_axes(proto)
    proto = upgrade(proto)
    if edit is not None:
        edit(proto, weights.tensors, declared)
    pack_products(proto, weights.tensors)
    expand_fused(proto, declared)
    corrections = (loose_sequences, loop_states, explicit_pads, partial(as_declared, declared), hidden_scales)
    proto = infer_corrected(proto, infer, *corrections)
    result = weights.put_back(proto)
    split_statistics(result)
    attach(result, origins_by_name, changes)
    return result


def unfolded(model: ModelProto | ir.Model | str | Path) -> ModelProto:
    """A checked copy with model-local functions inlined and weights as initializers; else as it came."""
    proto, weights = _in_order(model)
    origins_by_name = origins(proto, weights.tensors)
    proto = _inline(proto)
    put_back_domains(proto)  # what comes of it is run by onnxruntime
    lift_weights(proto)
    result = weights.put_back(proto)
    attach(result, origins_by_name)
    return use_kernels(result, DEFAULT_KERNELS) if any(custom_nodes(result)) else result


def _in_order(model: ModelProto | ir.Model | str | Path) -> tuple[ModelProto, LargeWeights]:
    proto, weights = set_aside(load(model, mapped=True))
    put_in_order(proto)
    for tensor in weights.tensors.values():
        _check_tensor(tensor)
    return proto, weights


def infer(proto: ModelProto) -> ModelProto:
    """Type and shape inference; contradictions raise."""
    try:
        inferred = infer_corrected(proto, infer_shapes, ranked_elements)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise InvalidModelError(f"shape inference of the model failed: {e}") from e
    name_equal_lengths(inferred)
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        _check_lengths(value)
    return inferred


def _check_lengths(value: ValueInfoProto) -> None:
    """No arithmetic on lengths overflows where no tensor has more elements than any memory."""
    lengths = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    if any(length < 0 for length in lengths) or prod(filter(None, lengths)) > MOST_ELEMENTS:
        raise InvalidModelError(f"{value.name!r} has the lengths {lengths}, which no tensor has")


def infer_large(proto: ModelProto) -> ModelProto:
    """`infer` for a model whose large weights are better not copied."""
    light, weights = set_aside(proto)
    return weights.put_back(infer(light))


def _check_tensor(tensor: TensorProto) -> None:
    if not is_mapped(tensor) and byte_size(tensor) > PROTO_LIMIT:
        raise UnsupportedError(
            f"initializer {tensor.name!r} has {byte_size(tensor)} bytes, expected at most {PROTO_LIMIT}, "
            "all that one protobuf message can hold. Split it into several and join them with Concat"
        )


def _inline(proto: ModelProto) -> ModelProto:
    """Inline the model's own functions; bodies of our domain's operators are dropped, they are attached anew.

    A function stays whose gradient somebody has registered: its nodes are to meet that rule.
    """
    kept = [f for f in proto.functions if f.domain != DOMAIN and f.overload != REFUSAL]
    assign(proto.functions, kept)
    without_imports(proto, NEEDS_DOMAIN)
    if all((f.domain, f.name) in LIKE_INPUT for f in kept):
        return proto
    from onnx_ir.passes.common import InlinePass  # all passes: 1 MiB that models without functions do not need

    _align_opsets(proto)
    mark_constants(proto.functions)
    model = to_ir(proto)
    try:
        InlinePass(lambda f: (f.domain, f.name) not in LIKE_INPUT)(model)
    except (ValueError, RuntimeError) as e:  # for graphs as attributes, and values from outside of a function
        raise InvalidModelError(f"the model's functions cannot be written out: {e.__cause__ or e}") from e
    return to_proto(model)


def _align_opsets(proto: ModelProto) -> None:
    """Write the functions in the model's opsets, where that changes no operator; UnsupportedError where it does."""
    imported = {o.domain: o.version for o in proto.opset_import}
    for function in proto.functions:
        for opset in function.opset_import:
            version = imported.get(opset.domain)
            if version is None or version == opset.version:
                continue
            for node in all_nodes(function):
                if node.domain == opset.domain and _since(node, opset.version) != _since(node, version):
                    raise UnsupportedError(
                        f"it is written in opset {opset.version} of domain {opset.domain!r}, the model in {version}, "
                        f"and {node.op_type} is not the same in both. Convert one of them first",
                        op_type=f"{function.domain}::{function.name}",
                        node=called(node),
                    )
            opset.version = version


def _since(node: NodeProto, opset: int) -> int | None:
    """The version of an operator in an opset; None for one that onnx does not know, as another function."""
    try:
        return defs.get_schema(node.op_type, opset, node.domain).since_version
    except defs.SchemaError:
        return None


def check_names(argument: str, names: Names) -> Names:
    """The names; InvalidArgumentError for a single string, an empty list, and for what is no list."""
    given: object = names
    if not isinstance(given, Iterable):
        raise InvalidArgumentError(f"expected a list of names, got {given!r}", argument)
    if isinstance(names, str):
        raise InvalidArgumentError(f"expected a list of names, got the string {names!r}. Write [{names!r}]", argument)
    if not names:
        raise InvalidArgumentError("expected at least one name, got an empty list", argument)
    return names


def pick(names: Sequence[str], values: dict[str, ir.Value], *, argument: str, what: str) -> list[ir.Value]:
    """The values of the given names; InvalidArgumentError with near misses for an unknown or repeated one."""
    result: list[ir.Value] = []
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"expected names, got {name!r}", argument)
        if name not in values:
            raise InvalidArgumentError(f"expected the name of {what}, got {name!r}{suggest(name, values)}", argument)
        if values[name] in result:
            raise InvalidArgumentError(f"{name!r} is given twice", argument)
        result.append(values[name])
    return result
