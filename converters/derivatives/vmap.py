"""`vmap`: a model for many rows at once."""

from collections.abc import Mapping

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.work import Model, Work
from onnx_backprop.converters.prepare.exporters.statistics import rejoin
from onnx_backprop.converters.prepare.ir_models import as_given
from onnx_backprop.converters.prepare.load import pick
from onnx_backprop.converters.reverse.batching.add_axis import add_axis
from onnx_backprop.converters.reverse.known import dims, inputs_of
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.order import descendants

Axes = Mapping[str, int | None]


@as_given
def vmap(
    model: Model,
    axes: Axes,
    out_axes: int | Mapping[str, int] = 0,
    *,
    kernels: str = DEFAULT_KERNELS,
    inline: bool = False,
) -> ModelProto:
    """y_n = f(x_n, w) for all n at once: the model with a new axis on chosen inputs, and on every output.

        rows = ob.vmap("model.onnx", {"x": 0})  # x (1, D) becomes (batch, 1, D), and y (1, K) becomes (batch, 1, K)

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed. It may be a result of this
            function, or have derivatives: `vmap`, `vjp`, `jvp`, `hvp` and `jacobian` combine in any order.
        axes: {input: the place of its new axis}; negative ones count from the end of the shape with that axis. An input
            that is not named, or is named with None, is shared by all rows. A named initializer becomes an input
            without a default, for example for an ensemble. A seed of a derivative gets the axis if its value has it,
            unless it is named: `<y>_grad` with y, `<x>_tangent` with x.
        out_axes: the place of the axis in the outputs, for all or {output: axis}; 0 for those that are not named. An
            output that depends on none of the inputs is repeated.
        kernels, inline: see `backward`.

    Every operator works: with a batching rule, by an operator for all rows; branches and loops that run alike for all
    rows, by their bodies; others by a Scan over the rows, for which onnxruntime needs at least 1 row. A random operator
    draws for each row if it reads something that differs between rows, else once for all. Lengths that depend on
    values, as of NonZero, must be equal for all rows if they reach an output; otherwise the run fails. An output that
    is an input too becomes `<x>_rows`.

    Raises: InvalidArgumentError (names that the model does not have, axes beyond its shapes), UnsupportedError if an
    output is no tensor.
    """
    work = Work(model, None, None, kernels=kernels, inline=inline)
    chosen = _checked(work.graph, axes)
    outputs = _out_axes(work.graph, out_axes)
    add_seeds(work, chosen, outputs)
    add_axis(work.model, {name: axis for name, axis in chosen.items() if axis is not None}, outputs)
    return work.finish_short()


def _checked(graph: ir.Graph, axes: Axes) -> dict[str, int | None]:
    example = "axes={'x': 0}"
    if not isinstance(axes, Mapping) or not axes:
        raise InvalidArgumentError(f"expected an axis by input, as {example}, got {axes!r}", "axes")
    values = pick(list(axes), inputs_of(graph), argument="axes", what="an input or an initializer")
    rejoin(graph, values)
    for value, axis in zip(values, axes.values(), strict=True):
        if axis is not None:
            _check_axis(value, axis, "axes")
            if not isinstance(value.type, ir.TensorType | None):
                raise InvalidArgumentError(f"{value.name!r} is no tensor, so that it has no axes. Leave it out", "axes")
    if all(axis is None for axis in axes.values()):
        raise InvalidArgumentError(f"expected an axis for one input at least, as {example}, got {axes!r}", "axes")
    return dict(axes)


def _check_axis(value: ir.Value, axis: object, argument: str) -> None:
    shape = dims(value)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise InvalidArgumentError(f"{value.name!r}: expected the number of an axis, got {axis!r}", argument)
    if shape is None and axis:
        raise InvalidArgumentError(f"{value.name!r} has a rank that is not known: expected 0, got {axis}", argument)
    if shape is not None and not -len(shape) - 1 <= axis <= len(shape):
        raise InvalidArgumentError(
            f"{value.name!r} has {len(shape) + 1} axes with the new one, got axis {axis}", argument
        )


def _out_axes(graph: ir.Graph, out_axes: int | Mapping[str, int]) -> dict[str, int]:
    outputs = {str(value.name): value for value in graph.outputs}
    given: dict[str, int] = dict.fromkeys(outputs, out_axes) if not isinstance(out_axes, Mapping) else dict(out_axes)
    if isinstance(out_axes, Mapping):
        pick(list(given), outputs, argument="out_axes", what="an output")
    for name, axis in given.items():
        _check_axis(outputs[name], axis, "out_axes")
    return {name: given.get(name, 0) for name in outputs}


def add_seeds(work: Work, axes: dict[str, int | None], out_axes: Mapping[str, int]) -> None:
    """Give the seeds of derivatives that are not named the axis of what they belong to."""
    inputs = inputs_of(work.graph)
    pairs = [pair for derivative in derivatives(work.original) for pair in derivative.seeds.items()]
    while True:
        reached = [inputs[name] for name, axis in axes.items() if axis is not None]
        differing = {str(v.name) for node in descendants(work.graph, reached) for v in node.outputs}
        differing |= {str(value.name) for value in reached}
        matches = {seed: of for of, seed in pairs if seed in inputs and seed not in axes and of in differing}
        if not matches:
            return
        for seed, of in matches.items():
            axes[seed] = axes[of] if axes.get(of) is not None else out_axes.get(of, 0)
