"""A new axis on inputs of a model and on all its outputs; one row of a batch, and all of them again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.batch import batch, free_symbol
from onnx_backprop.converters.reverse.batching.folding import moved
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import PerSample
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import dims, in_training, inputs_of
from onnx_backprop.opset import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import all_nodes, subgraphs


def add_axis(
    model: ir.Model,
    axes: Mapping[str, int],
    out_axes: Mapping[str, int],
    symbol: str | None = None,
    instead: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Give inputs, initializers and all outputs an axis, whose length is `symbol`, else a new one.

    axes, out_axes: where it stands. instead: axes of length 1 of a row that go meanwhile, by the names of inputs and
    outputs.
    """
    graph, gone = model.graph, instead or {}
    symbol = symbol or free_symbol(graph, "batch")
    op = Builder(used_names(graph))
    op.prefix = "rows"
    seeds = [value for value in inputs_of(graph).values() if value.name in axes]
    stacked = [_whole(op, graph, seed, axes[str(seed.name)], symbol, gone.get(str(seed.name), ())) for seed in seeds]
    rows = [(str(value.name), dims(value)) for value in graph.outputs]
    batch(graph, op, seeds, list(graph.outputs), model.opset_imports, stacked=stacked, symbol=symbol)
    op.prefix = "rows"
    for place, (value, (name, shape)) in enumerate(zip(list(graph.outputs), rows, strict=True)):
        new = value
        if drop := gone.get(name, ()):
            shape = None if shape is None else tuple(length for n, length in enumerate(shape) if n not in drop)
            new = op.Squeeze(new, [n + 1 for n in drop])
        if shape is not None:
            axis = out_axes.get(name, 0) % (len(shape) + 1)
            new = moved(op, new, len(shape) + 1, 0, axis)
            if new is not value:
                new.shape = ir.Shape([*shape[:axis], symbol, *shape[axis:]])
        if new is not value:
            new.type = value.type
            value.name, new.name = op.unique(f"{name}_in_front"), value.name
            graph.outputs[place] = new
    drop_unread(op.nodes, graph.outputs)
    graph.extend(op.nodes)
    if any(node.domain == DOMAIN for node in all_nodes(op.nodes)):
        model.opset_imports.setdefault(DOMAIN, OPSET_VERSION)


def _whole(op: Builder, graph: ir.Graph, seed: ir.Value, axis: int, symbol: str, gone: Sequence[int]) -> ir.Value:
    """A new input in the place of one of a row; returned with the rows in front, and the axes that go."""
    shape = dims(seed)
    new = ir.Value(name=seed.name, type=seed.type)
    if seed.is_initializer():
        graph.initializers.pop(str(seed.name))
        seed.const_value = None
    if seed.is_graph_input():
        graph.inputs.insert(list(graph.inputs).index(seed), new)
    else:
        graph.inputs.extend([new, seed])
    if shape is None:
        return new
    kept = [length for n, length in enumerate(shape) if n not in gone]
    place = axis % (len(kept) + 1)
    new.shape = ir.Shape([*kept[:place], symbol, *kept[place:]])
    front = moved(op, new, len(kept) + 1, place, 0)
    return op.Unsqueeze(front, [n + 1 for n in gone]) if gone else front


@dataclass(frozen=True)
class OneRow:
    """A graph of batches that has become one of a single row, whose batch has the length 1.

    symbols: what the batch was called. before: the shapes that its values had.
    """

    symbols: frozenset[str]
    before: Mapping[str, Dims | None]

    def axis(self, name: str, alone: Dims | None) -> int | None:
        """Where a value has the rows: the length had their symbol, or was not known and is 1 for one row."""
        shape = self.before.get(name) or ()
        if alone is None or len(alone) != len(shape):
            return None
        return next(
            (n for n, d in enumerate(shape) if d in self.symbols or (not isinstance(d, int) and alone[n] == 1)), None
        )

    def first(self, graph: ir.Graph) -> ir.Value:
        """An input with the rows in front."""
        return next(value for value in graph.inputs if (dims(value) or (None,))[0] in self.symbols)

    def spread(self, model: ir.Model, like: Mapping[str, Sequence[str]]) -> None:
        """Give the rows back, to inputs that had them and to all outputs; in the place of the axes that they had.

        like: values whose shapes, one after the other, an input or an output has that came meanwhile.
        """
        axes: dict[str, int] = {}
        gone: dict[str, list[int]] = {}
        alone = {str(value.name): dims(value) for node in model.graph for value in node.outputs}
        alone |= {name: dims(value) for name, value in inputs_of(model.graph).items()}
        for value in (*model.graph.inputs, *model.graph.outputs):
            name, start, positions = str(value.name), 0, list[int]()
            for part in like.get(name, [name]):
                if (axis := self.axis(part, alone.get(part))) is not None:
                    positions.append(start + axis)
                start += len(self.before.get(part) or ())
            if positions or name in like or not value.is_graph_input():
                axes[name], gone[name] = positions[0] if positions else 0, positions
        inputs = {str(value.name) for value in model.graph.inputs}
        places = {name: axis for name, axis in axes.items() if name in inputs}
        add_axis(model, places, axes, min(self.symbols), {name: drop for name, drop in gone.items() if drop})


def take_one_row(graph: ir.Graph, per_sample: PerSample, declared: Mapping[str, Dims]) -> OneRow:
    """Let the batch have the length 1: axis 0 of inputs that `per_sample` names, else of all that have a symbol there.

    Other inputs may have that symbol at another axis, as a first state of an RNN. declared: shapes of outputs in the
    file, believed where the rows are not found otherwise: an axis of another length than 1 there fails the run.

    Errors: InvalidArgumentError, which names the inputs whose rows are not known. A warning for what mixes rows.
    """
    inputs = {str(value.name): dims(value) for value in graph.inputs if not value.is_initializer()}
    symbols = frozenset(_symbols_of_rows(inputs, per_sample))
    for name, shape in inputs.items():
        if sum(length in symbols for length in shape or ()) > 1:
            raise InvalidArgumentError(f"{name!r} has the shape {list(shape or ())}: two axes of rows", "per_sample")
    mixing = [label(node) for node in all_nodes(graph) if in_training(node)]
    if mixing:
        warn(
            f"per_sample: BatchNormalization {', '.join(map(repr, mixing))} in training mode has the statistics of "
            "each row alone. Export the model in evaluation mode"
        )
    before: dict[str, Dims | None] = {}
    for one in (graph, *(inner for node in all_nodes(graph) for inner in subgraphs(node))):
        for value in (*one.inputs, *one.initializers.values(), *(y for node in one for y in node.outputs)):
            shape = dims(value)
            if one is graph:
                before[str(value.name)] = shape
            if shape is not None and symbols.intersection(shape):
                value.shape = ir.Shape([1 if length in symbols else length for length in shape])
    for name, shape in declared.items():
        if symbols.intersection(shape) and not symbols.intersection(before.get(name) or ()):
            before[name] = shape
    return OneRow(symbols, before)


def _symbols_of_rows(inputs: Mapping[str, Dims | None], per_sample: PerSample) -> set[str]:
    advice = "Name the inputs whose axis 0 has the rows, as per_sample=['x']"
    if isinstance(per_sample, str) or (per_sample is not True and not isinstance(per_sample, Sequence)):
        raise InvalidArgumentError(f"expected True or a list of inputs, got {per_sample!r}", "per_sample")
    names = list(inputs) if per_sample is True else list(per_sample)
    if unknown := [name for name in names if name not in inputs]:
        raise InvalidArgumentError(f"the model has no input {', '.join(map(repr, unknown))}", "per_sample")
    first = {name: shape[0] if (shape := inputs[name]) else None for name in names}
    if per_sample is True:
        unclear = [n for n, shape in inputs.items() if shape is None or (shape and shape[0] is None)]
        symbols = {length for length in first.values() if isinstance(length, str)}
        if unclear or len(symbols) > 1:
            unclear = unclear or [name for name, length in first.items() if isinstance(length, str)]
            shapes = ", ".join(f"{name!r} {_shown(inputs[name])}" for name in unclear)
            raise InvalidArgumentError(f"which axis has the rows is not known of {shapes}. {advice}", "per_sample")
        if not symbols:
            shapes = ", ".join(f"{name!r} {_shown(shape)}" for name, shape in inputs.items())
            raise InvalidArgumentError(
                f"no input has a symbol for its number of rows: {shapes}. "
                f"free={{{next(iter(inputs), 'x')!r}: {{0: 'batch'}}}} makes one of a fixed length",
                "per_sample",
            )
        return symbols
    fixed = [name for name, length in first.items() if not isinstance(length, str)]
    if fixed or not names:
        raise InvalidArgumentError(
            f"{', '.join(map(repr, fixed)) or 'an empty list'}: expected inputs with a symbol at axis 0. "
            f"free={{{fixed[0] if fixed else 'x'!r}: {{0: 'batch'}}}} makes one of a fixed length",
            "per_sample",
        )
    return {length for length in first.values() if isinstance(length, str)}


def _shown(shape: Dims | None) -> str:
    return "of unknown rank" if shape is None else str(list(shape))
