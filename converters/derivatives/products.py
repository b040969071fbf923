"""Products with a Jacobian and with a Hessian: `vjp`, `jvp` and `hvp`.

One table of rules serves all three. The gradient Jᵀu is linear in its seed u, so that its own gradient by u, seeded
with v, is J·v: a tangent is the adjoint of the adjoint, and what only Jᵀu needed goes. H·v is the gradient of <∇y, v>.
"""

from collections.abc import Iterable, Mapping
from typing import Unpack

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.seeds import at_once
from onnx_backprop.converters.derivatives.wanted import asks_shape, values_of
from onnx_backprop.converters.derivatives.work import Model, Names, Options, Work, named
from onnx_backprop.converters.prepare.ir_models import as_given
from onnx_backprop.converters.reverse.batching.batch import batch
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import drop_dead
from onnx_backprop.converters.reverse.forward import unsupported
from onnx_backprop.converters.reverse.known import dims, known_lengths
from onnx_backprop.converters.reverse.models.derivatives import Derivative
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.converters.reverse.sequences import is_optional
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import used_names


@as_given
def vjp(
    model: Model, wrt: Names = None, of: Names = None, *, batched: bool = False, **options: Unpack[Options]
) -> ModelProto:
    """Σ_y (∂y/∂x)ᵀ · `<y>_grad` as extra outputs `<x>_grad`; an input seeds every y, also a single number.

    Args:
        model, wrt, of, options (stop, free, kernels, inline, straight_through, strict, checkpoint, …): see `backward`.
        batched: several seeds in one run: `<y>_grad` and `<x>_grad` have an extra axis 0 of the same length, at least
            1, which each run chooses. What does not depend on the seeds is computed once.

    Returns and raises: what `backward` does.
    """
    work = Work(model, wrt, of, **options)
    stage, results = work.differentiate(wrt=wrt, of=of, seed_all=True)
    derivative = Derivative("vjp", stage.seeds, results, batched)
    if batched:
        _batch(work, derivative)
    return work.finish_derivative(derivative)


@as_given
def jvp(
    model: Model, wrt: Names = None, of: Names = None, *, batched: bool = False, **options: Unpack[Options]
) -> ModelProto:
    """Σ_x ∂y/∂x · `<x>_tangent` as extra outputs `<y>_tangent`: the change of y when each x changes by its tangent.

    Args:
        model, wrt, of, options (stop, free, kernels, inline, straight_through, strict, checkpoint, …): see `backward`.
        batched: several tangents in one run: `<x>_tangent` and `<y>_tangent` have an extra axis 0.

    Returns: the model with an input `<x>_tangent`, of the shape and type of x, for each of `wrt`, and an output
    `<y>_tangent` for each of `of`. A y that depends on no x gets zeros and a warning. Raises: what `backward` does.
    """
    work = Work(model, wrt, of, **options)
    derivative = tangents(work, wrt, of)
    if batched:
        derivative = Derivative(derivative.mode, derivative.seeds, derivative.results, batched=True)
        _batch(work, derivative)
    return work.finish_derivative(derivative)


@as_given
def hvp(
    model: Model, wrt: Names = None, of: Names = None, *, batched: bool = False, **options: Unpack[Options]
) -> ModelProto:
    """Σ_z ∂²y/∂x∂z · `<z>_direction` as extra outputs `<x>_hvp`, for an output y of one element.

    Args:
        model, wrt, options (stop, free, kernels, inline, straight_through, strict, checkpoint, …): see `backward`.
        of: the output, in a list of one. Default: the only float output.
        batched: several directions in one run: `<x>_direction` and `<x>_hvp` have an extra axis 0.

    Returns: the model with an input `<x>_direction`, of the shape and type of x, and an output `<x>_hvp` for each of
    `wrt`. If y is linear in all of them, these are zeros, with a warning; `strict` refuses that. Raises:
    InvalidArgumentError for a y of more elements, or of a shape that inference does not find, and what `backward`
    raises.
    """
    work = Work(model, wrt, of, **options)
    gradients = gradients_of_scalar(work, wrt, of)
    stage, second = work.differentiate(
        wrt=list(gradients),
        of=list(gradients.values()),
        seed_all=True,
        names=named(gradients, "_direction") | {x: f"{x}_hvp" for x in gradients},
    )
    seeds = {x: stage.seeds[g] for x, g in gradients.items()}
    work.drop_outputs(gradients.values())
    derivative = Derivative("hvp", seeds, second, batched)
    if batched:
        _batch(work, derivative)
    return work.finish_derivative(derivative)


@as_given
def scalar_gradient(
    model: Model, wrt: Names = None, of: Names = None, *, advice: str = "", **options: Unpack[Options]
) -> ModelProto:
    """`backward` of one number, seeded by 1: what `value_and_grad` runs. Raises: what `hvp` does, with advice."""
    work = Work(model, wrt, of, **options)
    return work.finish_derivative(Derivative("vjp", {}, gradients_of_scalar(work, wrt, of, advice)))


def gradients_of_scalar(work: Work, wrt: Names, of: Names, advice: str = "") -> dict[str, str]:
    """A first stage: {x: its gradient}, outputs, of the one number that a model computes."""
    if of is None:
        floats = [v for v in work.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
        of = [str(value.name) for value in floats]
    if isinstance(of, str) or len(of) != 1:
        advice = f"Write [{of!r}]" if isinstance(of, str) else "Name one number, whose derivatives these are"
        raise InvalidArgumentError(f"expected a list of one output, got {of!r}. {advice}", "of")
    value = values_by_name(work.graph).get(of[0])
    shape = None if value is None else known_lengths(value)
    if value is not None and (shape is None or set(shape) - {1}):
        raise InvalidArgumentError(
            f"expected an output of one element, {of[0]!r} has the shape {list(dims(value) or ['unknown'])}. "
            f"{advice or 'Add a ReduceSum to the model, or name another one'}",
            "of",
        )
    _, gradients = work.differentiate(wrt=wrt, of=of)
    work.infer_types()
    return gradients


def tangents(work: Work, wrt: Names, of: Names, **arguments: bool) -> Derivative:
    """Add the outputs of `jvp`; arguments: of `Differentiation`, as quiet and strict."""
    first, gradients = work.differentiate(wrt=wrt, of=of, seed_all=True, **arguments)
    shapes = {str(g.name): str(x.name) for x, g in first.gradients.items() if x.name}
    seeds = first.seeds
    work.infer_types()
    second, results = work.differentiate(
        wrt=list(seeds.values()),
        of=list(gradients.values()),
        seed_all=True,
        strict=False,
        quiet=True,
        names=named(gradients, "_tangent") | named(seeds, "_tangent"),
    )
    work.drop_outputs(gradients.values())
    _take_shapes_elsewhere(work.graph, shapes)
    _remove_seeds(work, seeds, results.values())
    return Derivative(
        "jvp", {x: second.seeds[g] for x, g in gradients.items()}, {y: results[seed] for y, seed in seeds.items()}
    )


def _take_shapes_elsewhere(graph: ir.Graph, shapes: Mapping[str, str]) -> None:
    """A gradient has the shape of its value: where that alone is asked for, the value serves, and the gradient goes.

    shapes: {gradient: value}. So do nodes that only lead to something that is asked for its shape.
    """
    values = values_by_name(graph)
    pairs = [(values[g], values[x]) for g, x in shapes.items() if g in values and x in values]
    same = {g: x for g, x in pairs if not is_optional(x)}  # whose gradient is that of what it holds
    wanted = values_of(graph, graph.outputs)
    for node in graph:
        decides = not wanted.isdisjoint(node.outputs)
        for index, value in enumerate(node.inputs):
            if value is None or (other := same.get(value)) is None:
                continue
            if asks_shape(node, index) or (not decides and other.dtype == value.dtype):
                node.replace_input_with(index, other)
    drop_dead(graph)


def _remove_seeds(work: Work, seeds: Mapping[str, str], results: Iterable[str]) -> None:
    """Take away the inputs that seeded the gradient: the tangent is its derivative by them, and constant in them.

    What still reads one wants a shape, of it or of what is made of it, and y has that too.
    """
    wanted = values_of(work.graph, work.outputs(results))
    outputs = {str(value.name): value for value in work.graph.outputs}
    for y, name in seeds.items():
        (seed,) = work.inputs([name])
        if seed in wanted:
            node = next(node for node, index in seed.uses() if not asks_shape(node, index))
            raise unsupported(node, f"the tangent of {y!r} cannot be found: a gradient rule is not linear in its seed")
        seed.replace_all_uses_with(outputs[y])
        work.graph.inputs.remove(seed)
    work.graph.sort()  # shapes are asked of what others make


def _batch(work: Work, derivative: Derivative) -> None:
    """Give the seeds and results of a derivative their axis."""
    by_rules = at_once(work, derivative.seeds.values())
    op = Builder(used_names(work.graph))
    seeds, results = work.inputs(derivative.seeds.values()), work.outputs(derivative.results.values())
    batch(work.graph, op, seeds, results, work.model.opset_imports, by_rules=by_rules)
    work.append(op)
