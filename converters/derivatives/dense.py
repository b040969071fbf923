"""Whole Jacobians and Hessians, for small sizes: products with every unit vector, in one batched run."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Unpack

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.products import gradients_of_scalar, tangents
from onnx_backprop.converters.derivatives.seeds import at_once
from onnx_backprop.converters.derivatives.work import Model, Names, Options, Work
from onnx_backprop.converters.prepare.ir_models import as_given
from onnx_backprop.converters.reverse.batching.batch import batch
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import PerSample
from onnx_backprop.converters.reverse.known import dims, element_type, known_lengths
from onnx_backprop.converters.reverse.models.derivatives import Derivative
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import used_names

DIRECTIONS = ("auto", "reverse", "forward")
Table = dict[str, dict[str, str]]


@as_given
def jacobian(
    model: Model,
    wrt: Names = None,
    of: Names = None,
    *,
    direction: str = "auto",
    per_sample: PerSample = False,
    **options: Unpack[Options],
) -> ModelProto:
    """∂y/∂x as extra outputs `<y>_jacobian_<x>`, with the shape of y followed by that of x.

    Args:
        model, wrt, of, options (stop, free, kernels, inline, straight_through, strict, checkpoint, …): see `backward`.
        direction: "reverse" computes it by rows, one for each element of y; "forward" by columns, one for each element
            of x; "auto" by the fewer of them if all lengths are known, else by rows. What the rows share is computed
            once.
        per_sample: for each row of a batch alone, as `backward` takes it: (N, 3, 4) for y (N, 3) and x (N, 4).

    A block of zeros has a warning. Raises: what `backward` does.
    """
    if direction not in DIRECTIONS:
        allowed = ", ".join(map(repr, DIRECTIONS))
        raise InvalidArgumentError(f"direction: expected one of {allowed}, got {direction!r}")
    work = Work(model, wrt, of, **options)
    work.take_one_row(per_sample)
    stage = work.plan(wrt, of)
    xs, ys = ([str(value.name) for value in values] for values in (stage.wrt, stage.of))
    forward = direction == "forward" or (direction == "auto" and _elements(stage.wrt) < _elements(stage.of))
    results: Table = {y: {} for y in ys}
    for name in xs if forward else ys:
        for y, x, output in _columns(work, name, ys) if forward else _rows(work, name, xs):
            results[y][x] = _call(work, output, f"{y}_jacobian_{x}")
    return work.finish_derivative(Derivative("jacobian", {}, results))


@as_given
def hessian(model: Model, wrt: Names = None, of: Names = None, **options: Unpack[Options]) -> ModelProto:
    """∂²y/∂x∂z of one number y as extra outputs `<x>_hessian_<z>`, with the shape of x followed by that of z.

    Args:
        model, wrt, options (stop, free, kernels, inline, straight_through, strict, checkpoint, …): see `backward`.
        of: the output, of one element, in a list of one. Default: the only float output.

    There is a block for every pair of names in `wrt`. Raises: what `hvp` does.
    """
    work = Work(model, wrt, of, **options)
    gradients = gradients_of_scalar(work, wrt, of)
    results: Table = {x: {} for x in gradients}
    for x, gradient in gradients.items():
        for _, z, output in _rows(work, gradient, list(gradients), quiet=True, strict=False):
            results[x][z] = _call(work, output, f"{x}_hessian_{z}")
    work.drop_outputs(gradients.values())
    return work.finish_derivative(Derivative("hessian", {}, results))


def _elements(values: Sequence[ir.Value]) -> float:
    """How many there are; none where a length is unknown, which compares as neither less nor more."""
    counts = [_count(value) for value in values]
    return sum(one for one in counts if one is not None) if None not in counts else float("nan")


def _count(value: ir.Value) -> int | None:
    """How many elements a value has, where that is known."""
    lengths = known_lengths(value)
    return None if lengths is None else prod(lengths)


def _rows(work: Work, y: str, xs: Sequence[str], **arguments: bool) -> list[tuple[str, str, ir.Value]]:
    """(y, x, ∂y/∂x) for every x, by the gradients of every element of y."""
    stage, gradients = work.differentiate(wrt=xs, of=[y], seed_all=True, **arguments)
    blocks = _unit_products(work, stage.seeds, gradients)
    return [(y, x, block) for x, block in zip(gradients, blocks, strict=True)]


def _columns(work: Work, x: str, ys: Sequence[str]) -> list[tuple[str, str, ir.Value]]:
    """(y, x, ∂y/∂x) for every y, by the tangents along every element of x."""
    derivative = tangents(work, [x], ys)
    blocks = _unit_products(work, derivative.seeds, derivative.results, columns=True)
    return [(y, x, block) for y, block in zip(derivative.results, blocks, strict=True)]


def _unit_products(
    work: Work, seeds: Mapping[str, str], results: Mapping[str, str], *, columns: bool = False
) -> list[ir.Value]:
    """What each result is for every unit vector as the seed: blocks of the shapes of both, graph outputs.

    Without an axis of rows if there is one unit vector, or none, over which onnxruntime does not scan.
    """
    ((name, seed_name),) = seeds.items()
    by_rules = at_once(work, [seed_name], lambda: _count(values_by_name(work.graph)[name]))
    (seed,), ends = work.inputs([seed_name]), work.outputs(results.values())
    shapes = [dims(end) for end in ends]
    op = Builder(used_names(work.graph))
    op.prefix = f"{name}_unit"
    value = values_by_name(work.graph)[name]
    shape, shape_known, lengths = op.shape(value), dims(value), known_lengths(value)
    count = op.ReduceProd(shape) if lengths is None else op.ints([prod(lengths)])
    blocks: list[ir.Value] = []
    symbol, opsets = _count(value), work.model.opset_imports
    few = symbol in (0, 1)
    if few:
        batched = _for_one(work.graph, seed, ends, f"{name}_one", known_lengths(value) or ())
    else:
        unit = op.EyeLike(op.filled(op.joined(count, count), 0, element_type(seed)))
        unit = op.Reshape(unit, op.joined(count, shape), allowzero=1)
        batched = batch(work.graph, op, [seed], ends, opsets, stacked=[unit], symbol=symbol, by_rules=by_rules)
    op.prefix = f"{name}_unit"
    for end, result, rows in zip(ends, shapes, batched, strict=True):
        place = [value is rows for value in work.graph.outputs].index(True)
        lengths, parts = known_lengths(end), [shape_known, result]
        inner = op.Shape(rows, start=int(not few)) if lengths is None else op.ints(lengths)
        flat = rows
        if columns and symbol != 0:
            size = op.ReduceProd(inner) if lengths is None else op.ints([prod(lengths)])
            flat = op.Reshape(rows, op.joined(count, size), allowzero=1)
            flat = op.Transpose(flat, perm=[1, 0])
        whole = op.joined(*((inner, shape) if columns else (shape, inner)))
        block = op.Reshape(flat, whole, allowzero=1) if symbol != 0 else op.filled(whole, 0, element_type(end))
        block.type = end.type
        parts = parts[::-1] if columns else parts
        block.shape = None if None in parts else ir.Shape([length for part in parts for length in part or ()])
        work.graph.outputs[place] = block
        blocks.append(block)
    work.append(op)
    return blocks


def _for_one(
    graph: ir.Graph, seed: ir.Value, ends: Sequence[ir.Value], prefix: str, lengths: Sequence[int]
) -> list[ir.Value]:
    """The results for a seed of one number, which is 1: as they are, with no axis for rows.

    onnxruntime takes a row of one number for the number: of row / y · c it makes c / y, without the axis (1.32).
    """
    op = Builder(used_names(graph))
    op.prefix = prefix
    one = op.filled(op.ints(lengths), 1, element_type(seed))  # no initializer, which a training would ask about
    places = [list(graph.outputs).index(end) for end in ends]
    graph.inputs.remove(seed)
    seed.replace_all_uses_with(op.typed(one, seed), replace_graph_outputs=True)
    if nodes := list(graph):
        graph.insert_before(nodes[0], op.nodes)
    else:
        graph.extend(op.nodes)
    return [graph.outputs[place] for place in places]


def _call(work: Work, output: ir.Value, name: str) -> str:
    output.name = Builder(used_names(work.graph)).unique(name)
    return output.name
