"""`backward`: a forward model in, the same model with its gradients as further outputs out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.parameters.choice import choose
from onnx_backprop.converters.parameters.report import warn_of
from onnx_backprop.converters.prepare.free import Free
from onnx_backprop.converters.prepare.ir_models import as_given, to_ir, to_proto
from onnx_backprop.converters.prepare.load import Edit, infer_large, pick
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.prepare.stops import prepared, put_identity
from onnx_backprop.converters.prepare.writing.inline import check_inline, inlined
from onnx_backprop.converters.prepare.writing.short_names import shorten_names
from onnx_backprop.converters.prepare.writing.unsaid import without_inferred
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import (
    GradientPath,
    Progress,
    describe_stops,
    explain_unreached,
    find_path,
    refuse_rounding,
    walk_back,
)
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import element_type, is_float, known_lengths
from onnx_backprop.converters.reverse.models.derivatives import Derivative, record
from onnx_backprop.converters.reverse.models.faults import avoid_faults
from onnx_backprop.converters.reverse.models.named import INPUT, OUTPUT, pick_values, require_floats
from onnx_backprop.converters.reverse.sequences import held_type, is_sequence
from onnx_backprop.opset import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.functions.half import note_optimisers
from onnx_backprop.opset.functions.use_kernels import DEFAULT_KERNELS, attach_kernels, check_kernels
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.order import dependencies
from onnx_backprop.opset.graphs.walk import all_nodes, is_standard


@as_given
def backward(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    stop: Patterns | None = None,
    free: Free | None = None,
    kernels: str = DEFAULT_KERNELS,
    inline: bool = False,
    straight_through: bool = False,
    strict: bool = False,
    checkpoint: int = 0,
    progress: Progress = shown,
) -> ModelProto:
    """D of / d wrt as further outputs of the model: `<x>_grad` = Σ_y (∂y/∂x)ᵀ · `<y>_grad`.

        model = ob.backward("model.onnx", wrt=["x"], of=["y"])
        y, dx = ob.session(model).run(None, {"x": x, "y_grad": np.ones_like(x)})

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed. It may be a result of this
            function, to any order.
        wrt: graph inputs and initializers to differentiate by. Default: every float initializer that influences
            `of` along a differentiable path and is a parameter; exponents, limits, scales, statistics and the like
            define the function and are none. A float value v inside the graph may be named too: `<v>_grad` = ∂y/∂v
            through all that reads v, as if v were an input. Beside it, ∂y/∂x of an x that v depends on stays the
            whole derivative, the part through v included.
        of: graph outputs to differentiate, or float values inside the graph, which become outputs behind the model's
            own. Default: every float output that depends on `wrt`.
        stop: values inside the graph that no gradient passes: names, globs (`layer1.*`) or regular expressions
            (`re:…`) of values and of nodes, which mean what they compute, in branches and loops too. y = stop(x) is x
            with dy/dx = 0, and so in derivatives of any order. So is an Identity that has `onnx_backprop.stop` in its
            metadata, and a `detach` node of an exporter, which becomes one.
        free: fixed lengths of inputs that any length may take the place of, as {"x": {0: "batch"}}: the axis and the
            name of its symbol. Constants that hold the old length are rewritten: shapes of Reshape and Expand, sizes of
            Resize, rows of one kind that are joined to a batch or are the first state of an RNN. A node that keeps to
            the old length is an UnsupportedError.
        kernels: how the operators of our domain run, see `use_kernels`.
        inline: write these into the graph itself, in the lowest opset and IR version, and leave no node of our domain.
            For runtimes before onnxruntime 1.27, which does not know overloads of functions; the kernels are "onnx"
            and cannot be exchanged any more.
        straight_through: differentiate QuantizeLinear as if it did not round, within the range of its type, and
            DynamicQuantizeLinear with the integer products behind it. Without it such a node on the way is refused,
            since the derivative of rounding is zero almost everywhere.
        strict: refuse a name in `wrt` or `of` where the derivative is zero, as through Sign, or where `of` does not
            depend on it at all. Without it the gradient is zeros, and a warning names the nodes that stop it.
        checkpoint: store the states of a Loop or a Scan at every so many steps only and compute those between again,
            √n being the least memory for n steps. 0: store all.
        progress: wraps the list of nodes while they are walked. Default: a progress bar where a person is watching, on
            a terminal or in a notebook; `iter` for none.

    Returns: a model whose outputs are the model's own, other values of `of`, then `<x>_grad` in the order of `wrt`,
    each of the shape and type of x. A one-element output is seeded with 1; any other gets a graph input `<y>_grad` of
    its own shape. Initializers in `wrt` become graph inputs that keep their value as default. A name that is taken gets
    a number behind it, as `x_grad_2`: `derivatives(result)` tells them. An onnx_ir.Model where one was given.

    Symbolic dimensions stay symbolic. Models below opset 18 are converted to it.

    Raises: InvalidArgumentError (unknown or integer names, and those that only nodes without a derivative lead to, as
    a random choice or the scales of a Resize), InvalidModelError, UnsupportedOpError
    (every missing rule at once, with node names), UnsupportedAttributeError.
    """
    draft = Draft(
        model,
        stop=stop,
        free=free,
        kernels=kernels,
        inline=inline,
        straight_through=straight_through,
        strict=strict,
        checkpoint=checkpoint,
        progress=progress,
        names={"wrt": wrt, "of": of},
    )
    stage, gradients = draft.differentiate(wrt=wrt, of=of)
    return draft.done(Derivative("vjp", stage.seeds, gradients))


def finish(ir_model: ir.Model, original: ModelProto, kernels: str, *, inline: bool) -> ModelProto:
    """Serialise, keep what the graph library drops, attach kernels."""
    _expose_statistics(ir_model.graph)
    avoid_faults(ir_model)
    proto = infer_large(to_proto(ir_model))
    proto.training_info.extend(original.training_info)
    note_optimisers(proto)
    attach_kernels(proto, kernels)
    return inlined(proto) if inline else proto


def _expose_statistics(graph: ir.Graph) -> None:
    """Make running statistics that a BatchNormalization in training mode renews inputs with their values as defaults.

    onnxruntime keeps one of equal constants, as the zeros of a fresh mean and of a fresh bias, and renews a constant
    mean in place before it reads the bias: its outputs are wrong. Of inputs it does neither.
    """
    for node in graph:
        mode = node.attributes.get("training_mode")
        if is_standard(node, "BatchNormalization") and mode is not None and mode.as_int():
            for value in node.inputs[3:5]:
                if value is not None and value.is_initializer() and not value.is_graph_input():
                    graph.inputs.append(value)


class Differentiation:
    """One differentiation of a model's main graph: what to differentiate, by what, and the nodes that do it."""

    def __init__(
        self,
        model: ir.Model,
        *,
        wrt: Sequence[str] | None,
        of: Sequence[str] | None,
        without: Mapping[str, str] | None = None,
        inputs: Sequence[str] = (),
        inputs_alone: bool = False,
        argument: str = "wrt",
        straight_through: bool = False,
        strict: bool = False,
        checkpoint: int = 0,
        progress: Progress = iter,
        names: Mapping[str, str] | None = None,
        seed_all: bool = False,
        quiet: bool = False,
        all_reached: bool = True,
    ) -> None:
        """`argument`: what the caller calls `wrt`. `without`: what its default leaves out, and why; None: constants.

        `inputs`: graph inputs to differentiate by in front of those; `inputs_alone`: there may be no other.

        `names`: other names than `<x>_grad` of the gradient or the seed of a value. `seed_all`: a graph input seeds
        a one-element output too. `quiet`: no warning of zeros. `all_reached`: whether a gradient for each of `wrt` must
        be; else those without one are left out.
        """
        self.model = model
        self.graph = model.graph
        self.progress = progress
        self.straight_through = straight_through
        self.strict = strict
        self.checkpoint = check_checkpoint(checkpoint)
        self.argument = argument
        self.given = wrt is not None and all_reached
        self.without = without
        self.chosen_names = names or {}
        self.seed_all = seed_all
        self.quiet = quiet
        self.seeds: dict[str, str] = {}  # name of y -> its seed, where that is a graph input
        self.names = used_names(self.graph)
        self.of = self._targets(of)
        known = {str(value.name): value for value in self.graph.inputs if not value.is_initializer()}
        picked = pick(inputs, known, argument="wrt_inputs", what="an input of the model")
        self.inputs = require_floats(picked, "wrt_inputs")
        self.inputs_alone = inputs_alone
        self.wrt, self.path = self._variables(wrt)
        if self.inputs:
            self.wrt = [*self.inputs, *self.wrt]
            self.path = find_path(self.graph, self.of, self.wrt)
        refuse_rounding(self.graph, self.of, self.path)
        if of is None:
            self.of = [y for y in self.of if y in self.path.active] or self.of
        self.zeros = self._zeros(self.wrt)

    def _targets(self, of: Sequence[str] | None) -> list[ir.Value]:
        outputs = {str(value.name): value for value in self.graph.outputs}
        if of is None:
            return [value for value in outputs.values() if is_float(value) and not value.is_initializer()]
        picked = require_floats(pick_values(self.graph, of, outputs, argument="of", what=OUTPUT), "of")
        self.graph.outputs.extend(value for value in picked if value not in outputs.values())
        return picked

    def _zeros(self, wrt: Sequence[ir.Value]) -> list[ir.Value]:
        """Those of `wrt` whose derivative is zero, told in a warning; an error with `strict` or where none exists."""
        zeros = [x for x in wrt if x not in self.path.active]
        idle = [y for y in self.of if y not in self.path.active]
        leads = dependencies(self.graph, self.of)
        reasons: dict[str, None] = {}
        for x, of in [*((x, self.of) for x in zeros), *((None, [y]) for y in idle)]:
            path = find_path(self.graph, of, wrt if x is None else [x])
            stops = {n: stop for n, stop in path.stops.items() if not leads.isdisjoint(n.outputs)}
            unknown = {n: stop for n, stop in stops.items() if not stop.zero}
            if self.strict or unknown:
                path = replace(path, stops=unknown or stops)
                if x is None:
                    raise InvalidArgumentError(
                        f"{of[0].name!r} does not depend differentiably on {_listed(wrt)}. Leave it out of `of`", "of"
                    )
                raise explain_unreached(str(x.name), [str(y.name) for y in of], path, argument=self._argument(x))
            reasons |= dict.fromkeys([describe_stops(stops)] if stops else [f"{_listed(of)} does not depend on it"])
        if (zeros or idle) and not self.quiet:
            what = f"by {_listed(zeros)}" if zeros else f"of {_listed(idle)}"
            text = f"the derivative {what} is zero: {'; '.join(reasons)}"
            warn(text, argument=self._argument(*zeros[:1]))
        return zeros

    def _variables(self, wrt: Sequence[str] | None) -> tuple[list[ir.Value], GradientPath]:
        initializers = {str(v.name): v for v in self.graph.initializers.values()}
        if wrt is None:
            floats = [v for name, v in initializers.items() if is_float(v) and name not in (self.without or ())]
            path = find_path(self.graph, self.of, floats)
            reached = [value for value in floats if value in path.active]
            if self.without is None:
                choice = choose(self.graph, reached)
                reached = [value for value in reached if value not in choice.left_out]
                self.without = {str(value.name): what for value, what in choice.left_out.items()}
                if not self.quiet:
                    warn_of(self.graph, choice, reached, share=False)
                path = find_path(self.graph, self.of, reached)
            if not reached and not (self.inputs and self.inputs_alone):
                raise self._nothing_to_differentiate_by()
            return reached, path
        values = initializers | {str(v.name): v for v in self.graph.inputs}
        picked = pick_values(self.graph, wrt, values, argument=self.argument, what=INPUT)
        picked = [self._apart(value) for value in require_floats(picked, self.argument)]
        return picked, find_path(self.graph, self.of, picked)

    def _apart(self, value: ir.Value) -> ir.Value:
        """A variable that no gradient rule reads but where the graph itself does.

        The rule of what makes a value inside the graph may read it, as that of Exp does; a second derivative by the
        value would take that for a part of the function. So an Identity comes between, whose rule reads nothing.
        """
        node = value.producer()
        if node is None or node.op_type == "Identity":
            return value
        new = put_identity(self.graph, value, self.names)
        self.of = [new if y is value else y for y in self.of]
        return new

    def _nothing_to_differentiate_by(self) -> InvalidArgumentError:
        of = ", ".join(str(y.name) for y in self.of) or "a float output"
        hints: list[str] = []
        if self.without:
            shown = ", ".join(f"{name!r} ({what})" for name, what in list(self.without.items())[:5])
            more = f" and {len(self.without) - 5} more" if len(self.without) > 5 else ""
            hints.append(f"; left out are {shown}{more}, which {self.argument} can name")
            if any(what.startswith("quantization scale") for what in self.without.values()):
                hints.append(
                    ". Weights stored as integers cannot be trained: ob.dequantize(model) makes floats of them"
                )
        inputs = [v for v in self.graph.inputs if is_float(v)]
        path = find_path(self.graph, self.of, inputs)
        leads = dependencies(self.graph, self.of)
        shapes = ("Shape", "Size")
        stops = {n: s for n, s in path.stops.items() if n.op_type not in shapes and not leads.isdisjoint(n.outputs)}
        if not self.without and (stops or path.nodes):
            shown = describe_stops(stops) or ", ".join(f"{n.op_type} '{label(n)}'" for n in path.nodes[:3])
            hints.append(f": {shown}" if stops else f": {shown} and what follows hold none")
        if inputs and self.argument == "wrt":
            names = ", ".join(str(v.name) for v in inputs)
            hints.append(f"; name graph inputs ({names}) to differentiate by them")
        elif stops:
            hints.append(". Choose an output that depends on weights")
        elif inputs:
            hints.append(". backward(model, wrt=[…]) differentiates by graph inputs")
        return InvalidArgumentError(
            f"no float initializer{' of the rest' if self.without else ''} influences {of} along a "
            f"differentiable path, there is nothing to differentiate by{''.join(hints)}",
            self.argument,
        )

    def _unreached(self, value: ir.Value, path: GradientPath) -> InvalidArgumentError:
        of = [str(y.name) for y in self.of]
        return explain_unreached(str(value.name), of, path, argument=self._argument(value))

    def _argument(self, *values: ir.Value) -> str:
        """What the caller calls the list that names a value."""
        return "wrt_inputs" if values and values[0] in self.inputs else self.argument

    def emit(self) -> dict[str, str]:
        """Append the backward nodes and the outputs; return {name of x: name of its gradient}."""
        op = Builder(self.names)
        op.straight_through, op.checkpoint = self.straight_through, self.checkpoint
        gradient_names = {value: self._gradient_name(op, value) for value in self.wrt}
        seeds = {y: self._seed(op, y) for y in self.of}
        gradients = walk_back(self.path, seeds, op, self.model.opset_imports, self.progress)
        self.gradients = dict(gradients)
        gradients |= {x: op.zeros_like(x) for x in self.zeros}
        # every path to the rest ends in an input that its rule gives no gradient for, such as a Resize's scales
        unreached = [x for x in self.wrt if x not in gradients and (self.given or x in self.inputs)]
        if unreached:
            raise self._unreached(unreached[0], self.path)
        self.wrt = [x for x in self.wrt if x in gradients]
        if not self.wrt:
            raise self._nothing_to_differentiate_by()
        outputs: list[ir.Value] = []
        for x in self.wrt:
            outputs.append(_named(op, gradients[x], gradient_names[x], like=x, taken=outputs))
        drop_unread(op.nodes, outputs)
        self.graph.extend(op.nodes)
        self.graph.outputs.extend(outputs)
        for x in self.wrt:
            if x.is_initializer() and not x.is_graph_input():
                self.graph.inputs.append(x)
        if any(node.domain == DOMAIN for node in all_nodes(self.graph)):
            self.model.opset_imports.setdefault(DOMAIN, OPSET_VERSION)
        return {str(x.name): gradient_names[x] for x in self.wrt}

    def _gradient_name(self, op: Builder, value: ir.Value) -> str:
        name = str(value.name)
        return op.unique(self.chosen_names.get(name, f"{name}_grad"))

    def _seed(self, op: Builder, y: ir.Value) -> ir.Value:
        """1 for a one-element output, else a graph input of the output's shape."""
        shape = known_lengths(y)
        if shape is not None and set(shape) <= {1} and not (self.seed_all or is_sequence(y)):
            return op.constant(np.ones(shape, element_type(y).numpy()))
        seed = ir.Value(name=self._gradient_name(op, y), type=held_type(y), shape=y.shape)
        self.seeds[str(y.name)] = str(seed.name)
        self.graph.inputs.append(seed)
        return seed


class Draft:
    """A model under conversion: the message that came, and the graph that stages add to. Values go by their names."""

    def __init__(
        self,
        model: ModelProto | ir.Model | str | Path,
        *,
        stop: Patterns | None = None,
        free: Free | None = None,
        kernels: str = DEFAULT_KERNELS,
        inline: bool = False,
        straight_through: bool = False,
        strict: bool = False,
        checkpoint: int = 0,
        progress: Progress = shown,
        names: Mapping[str, Patterns | None] | None = None,
        edit: Edit | None = None,
    ) -> None:
        """The keywords of `backward`; edit: of `prepare`; names: the caller's other arguments that name values."""
        check_kernels(kernels)
        check_inline(kernels, inline=inline)
        self.kernels, self._inline = kernels, inline
        self._how = {"straight_through": straight_through, "strict": strict, "checkpoint": checkpoint}
        self._progress: Progress = progress
        self.original, self.model = prepared(model, stop=stop, free=free, edit=edit, **(names or {}))

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def differentiate(self, **arguments: Any) -> tuple[Differentiation, dict[str, str]]:
        """A stage of the reverse mode, and {x: its gradient}; arguments: of `Differentiation`."""
        stage = Differentiation(self.model, progress=self._progress, **(self._how | arguments))
        return stage, stage.emit()

    def infer_types(self) -> None:
        """Give what a stage has emitted its types and shapes, which the next one wants to know; values are new ones."""
        self.model = to_ir(infer_large(to_proto(self.model)))

    def finish(self) -> ModelProto:
        """The converted model."""
        return finish(self.model, self.original, self.kernels, inline=self._inline)

    def done(self, derivative: Derivative) -> ModelProto:
        """The model with a derivative, which it notes, and without what nobody reads: inferred types, long names."""
        record(self.model, derivative)
        return without_inferred(shorten_names(self.finish(), used_names(self.original.graph)))


def check_checkpoint(checkpoint: int) -> int:
    """Raise for what is no number of steps."""
    if not isinstance(checkpoint, int) or isinstance(checkpoint, bool) or checkpoint < 0:
        raise InvalidArgumentError(f"checkpoint: expected a number of steps, or 0 to store all, got {checkpoint!r}")
    return checkpoint


def _listed(values: Iterable[ir.Value]) -> str:
    return ", ".join(repr(str(value.name)) for value in values)


def _named(op: Builder, gradient: ir.Value, name: str, *, like: ir.Value, taken: list[ir.Value]) -> ir.Value:
    """The gradient under its public name, with the type and shape of what it is the gradient of."""
    producer = gradient.producer()
    if producer is None or producer.graph is not None or producer.op_type == "Constant" or gradient in taken:
        op.prefix = name
        gradient = op.Identity(gradient)
    gradient.name = name
    return op.like(gradient, like)
