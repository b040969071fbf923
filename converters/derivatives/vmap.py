"""`vmap`: a model for many rows at once."""

from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.work import Model, Work
from onnx_backprop.converters.prepare.ir_models import as_given
from onnx_backprop.converters.prepare.load import pick
from onnx_backprop.converters.reverse.batching.batch import batch
from onnx_backprop.converters.reverse.batching.moves import moved
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.walk import all_nodes

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

        rows = ob.vmap("one.onnx", {"x": 0})  # x (1, D) becomes (batch, 1, D), and y (1, K) becomes (batch, 1, K)

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed. It may be a result of this
            function, or have derivatives: `vmap`, `vjp`, `jvp`, `hvp` and `jacobian` go together in any order.
        axes: {input: where its new axis stands}, negative ones counting from the end of the shape with that axis. An
            input that is not named, or is named with None, is shared by all rows. An initializer that is named becomes
            an input without a default, as for an ensemble. A seed of a derivative gets the axis where what it belongs
            to has it, unless it is named: `<y>_grad` with y, `<x>_tangent` with x.
        out_axes: where the axis stands in the outputs, for all or {output: axis}; 0 for those that are not named. An
            output that depends on none of the inputs is repeated.
        kernels, inline: see `backward`.

    Every operator is served: one that has a batching rule by an operator for all rows, others by a Scan over them.
    A random operator that reads what differs between rows draws numbers for each row, any other once for all of them.
    Lengths that depend on numbers, as of NonZero, must be the same for all rows where they reach an output; otherwise
    the run fails. A Scan takes no lengths from 0 rows: an output of one has the length 0 wherever it is not known.

    Raises: InvalidArgumentError (names that the model does not have, axes beyond its shapes), UnsupportedError where an
    output is no tensor.
    """
    work = Work(model, None, None, kernels=kernels, inline=inline)
    chosen = _checked(work.graph, axes)
    outputs = _out_axes(work.graph, out_axes)
    add_seeds(work, chosen, outputs)
    add_axis(work, chosen, outputs)
    return work.finish_short()


def add_axis(work: Work, axes: Mapping[str, int | None], out_axes: Mapping[str, int]) -> str:
    """Give inputs, and all outputs, the axis; the name of its symbol."""
    graph = work.graph
    symbol = unique("batch", set(_symbols(graph)))
    op = Builder(used_names(graph))
    op.prefix = "vmap"
    seeds = [value for value in _inputs(graph).values() if axes.get(str(value.name)) is not None]
    stacked = [_with_axis(op, graph, seed, axes[str(seed.name)] or 0, symbol) for seed in seeds]
    results = list(graph.outputs)
    ranks = {str(value.name): dims(value) for value in results}
    batch(graph, op, seeds, results, work.model.opset_imports, stacked=stacked, symbol=symbol)
    for place, value in enumerate(list(graph.outputs)):
        name, shape = str(value.name), ranks[str(value.name)]
        if axis := out_axes[name]:
            assert shape is not None
            axis = axis % (len(shape) + 1)
            new = moved(op, value, len(shape) + 1, 0, axis)
            if new is not value:
                new.dtype, new.shape = value.dtype, ir.Shape([*shape[:axis], symbol, *shape[axis:]])
                value.name, new.name = op.unique(f"{name}_rows"), name
                graph.outputs[place] = new
    work.append(op)
    return symbol


def _with_axis(op: Builder, graph: ir.Graph, seed: ir.Value, axis: int, symbol: str) -> ir.Value:
    """A new input in the place of one, with the axis, which is in front in what is returned."""
    shape = dims(seed)
    new = ir.Value(name=seed.name, type=seed.type)
    if shape is None:
        place = 0
    else:
        place = axis % (len(shape) + 1)
        new.shape = ir.Shape([*shape[:place], symbol, *shape[place:]])
    if seed.is_initializer():
        graph.initializers.pop(str(seed.name))
        seed.const_value = None
    if not seed.is_graph_input():
        graph.inputs.append(seed)
    graph.inputs.insert(list(graph.inputs).index(seed), new)
    seed.name = f"{seed.name}_of_row"
    return new if shape is None else moved(op, new, len(shape) + 1, place, 0)


def _inputs(graph: ir.Graph) -> dict[str, ir.Value]:
    """Inputs and initializers by name."""
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}


def _symbols(graph: ir.Graph) -> Iterable[str]:
    values = [*_inputs(graph).values(), *(value for node in all_nodes(graph) for value in node.outputs)]
    return (length for value in values for length in dims(value) or () if isinstance(length, str))


def _checked(graph: ir.Graph, axes: Axes) -> dict[str, int | None]:
    example = "axes={'x': 0}"
    if not isinstance(axes, Mapping) or not axes:
        raise InvalidArgumentError(f"expected an axis by input, as {example}, got {axes!r}", "axes")
    values = pick(list(axes), _inputs(graph), argument="axes", what="an input or an initializer")
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


def _out_axes(graph: ir.Graph, out_axes: object) -> dict[str, int]:
    outputs = {str(value.name): value for value in graph.outputs}
    given = dict.fromkeys(outputs, out_axes) if not isinstance(out_axes, Mapping) else dict(out_axes)
    if isinstance(out_axes, Mapping):
        pick(list(given), outputs, argument="out_axes", what="an output")
    for name, axis in given.items():
        _check_axis(outputs[name], axis, "out_axes")
    return {name: given.get(name, 0) for name in outputs}


def add_seeds(work: Work, axes: dict[str, int | None], out_axes: Mapping[str, int]) -> None:
    """Give the seeds of derivatives that are not named the axis of what they belong to."""
    inputs = {str(value.name): value for value in work.graph.inputs}
    pairs = [(made, of, seed) for made in derivatives(work.original) for of, seed in made.seeds.items()]
    while True:
        reached = [inputs[name] if name in inputs else work.graph.initializers[name] for name, a in axes.items() if a is not None]
        differing = {str(v.name) for node in descendants(work.graph, reached) for v in node.outputs}
        differing |= {str(value.name) for value in reached}
        found = {seed: of for _, of, seed in pairs if seed in inputs and seed not in axes and of in differing}
        if not found:
            return
        for seed, of in found.items():
            axes[seed] = axes[of] if axes.get(of) is not None else out_axes.get(of, 0)
