"""One differentiation of a model's main graph: by which variables, along which path, and the nodes that do it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.parameters.choice import choose
from onnx_backprop.converters.parameters.report import warn_of
from onnx_backprop.converters.parameters.structure import is_scale
from onnx_backprop.converters.prepare.exporters.statistics import rejoin
from onnx_backprop.converters.prepare.load import pick
from onnx_backprop.converters.prepare.stops import put_identity
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import Progress, walk_back
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import element_type, is_float, known_lengths
from onnx_backprop.converters.reverse.models.named import INPUT, OUTPUT, pick_values, require_floats
from onnx_backprop.converters.reverse.path import (
    GradientPath,
    describe_stops,
    explain_unreached,
    find_path,
    refuse_rounding,
)
from onnx_backprop.converters.reverse.sequences import held_type, is_sequence
from onnx_backprop.opset import OPSET_VERSION
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.order import dependencies
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_nodes


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
        rejoin(self.graph, (value for value in self.graph.inputs if value.is_initializer()))  # which a run may feed
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
        rejoin(self.graph, picked)
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
            if any(map(is_scale, self.without.values())):
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
        for domain in {node.domain for node in all_nodes(self.graph)}.difference(DEFAULT_DOMAINS):
            self.model.opset_imports.setdefault(domain, OPSET_VERSION)  # as of com.microsoft, whose operators ours have
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
