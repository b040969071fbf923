"""Lowering: a model as a session of one route runs it, and the order of the rewrites for the route "native"."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from onnx import ModelProto

from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.functions.native import write_out
from onnx_backprop.opset.functions.scope import state_types
from onnx_backprop.opset.functions.use_kernels import attach_kernels


class NativeGraph(NamedTuple):
    """A model for a session with kernels=None, and what a run of it may overwrite.

    in_place: the inputs whose new values may lie in their memory. guard: the input that says whether they do, "" where
    there are none, see `update_in_place`.
    """

    model: ModelProto
    in_place: frozenset[str] = frozenset()
    guard: str = ""


def lower(
    model: ModelProto,
    kernels: str | None,
    ends: Collection[str] = (),
    updates: Mapping[str, str] | None = None,
    *,
    matrices: bool = True,
) -> NativeGraph:
    """The model for a route, changed in place: `native`, or the bodies of another; None: the model as it is.

    Errors: InvalidModelError for a model that is not sound; what `use_kernels` raises.
    """
    return (
        NativeGraph(model)
        if kernels is None
        else lower_sound(load(model, mapped=True), kernels, ends, updates, matrices=matrices)
    )


def lower_sound(
    model: ModelProto,
    kernels: str,
    ends: Collection[str] = (),
    updates: Mapping[str, str] | None = None,
    *,
    matrices: bool = True,
) -> NativeGraph:
    """`lower` of a model that `load` has checked."""
    if kernels == "native":
        return native(model, ends, updates, matrices=matrices)
    attach_kernels(model, kernels)
    return NativeGraph(model)


def native(
    model: ModelProto, ends: Collection[str] = (), updates: Mapping[str, str] | None = None, *, matrices: bool = True
) -> NativeGraph:
    """The model with everything that native kernels do otherwise than standard operators, in place.

    ends: the outputs of the forward pass of a training step, the loss first; none for a model that is no step, whose
    operators stay, as onnxruntime may fuse them its own way. updates: {input: the output that is its new value}, where
    these may share memory, as `update_in_place` allows it. matrices: whether all that is to run it has registers of
    matrices where this processor has them.

    The order, and why:
    1. `fuse_attention`, `replace_operators` and `replace_products`, which recognise the operators that the file has,
       the second after the first, which leaves attention no products;
    2. `fuse_elementwise`, before the next two, since a whole chain may be cheap enough to be computed again;
    3. `fuse_batch_norms`, which take chains in that are not computed again then;
    4. `rematerialize`, while the backward pass alone lies behind the loss;
    5. `fuse_updates`, so that
    6. `update_in_place` finds the updates; behind all that adds readers of values, since no reader may come after it;
    7. the native kernels take the place of the operators of the domain, those of 1 among them, and of their functions:
       of one node each where types are stated, so that onnxruntime keeps the order.
    """
    # not above: llvmlite, which other routes do without
    from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
    from onnx_backprop.ort_ops.rewrites.fuse_attention import fuse_attention
    from onnx_backprop.ort_ops.rewrites.fuse_batch_norms import fuse_batch_norms
    from onnx_backprop.ort_ops.rewrites.fuse_elementwise import fuse_elementwise
    from onnx_backprop.ort_ops.rewrites.fuse_updates import fuse_updates
    from onnx_backprop.ort_ops.rewrites.in_place import update_in_place
    from onnx_backprop.ort_ops.rewrites.rematerialize import rematerialize
    from onnx_backprop.ort_ops.rewrites.replace_operators import replace_operators
    from onnx_backprop.ort_ops.rewrites.replace_products import replace_products

    if ends:
        fuse_attention(model)
        replace_operators(model)
        if matrices and matrix_tiles():
            replace_products(model)
        fuse_elementwise(model)
        fuse_batch_norms(model)
        rematerialize(model, ends)
    fuse_updates(model)
    in_place, guard = update_in_place(model, next(iter(ends)), updates) if updates else (frozenset[str](), "")
    state_types(model)
    attach_kernels(model, "native")
    write_out(model)
    return NativeGraph(model, in_place, guard)
