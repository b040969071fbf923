"""The update of a training step: clipping, accumulation, the optimizer's functions, running means of the weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx import FunctionProto, ModelProto

from onnx_backprop.converters.prepare.ir_models import to_proto
from onnx_backprop.converters.prepare.selection import aliases, select
from onnx_backprop.converters.prepare.upgrade import MIN_OPSET
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.converters.training.modes import is_statistic
from onnx_backprop.converters.training.names import COUNTED, LEARNING_RATE, MICRO_STEP, OPTIMIZER_METADATA, STEP
from onnx_backprop.converters.training.optimizers import Optimizer
from onnx_backprop.converters.training.rewrites.sums import staged
from onnx_backprop.converters.training.slots import COUNTER, MEAN, MOMENT, PARAMETER, SUM, Slot
from onnx_backprop.converters.training.update.optimizer_function import (
    CLIP_FACTOR,
    EMA,
    FINITE,
    UpdateFunctions,
    one_element,
    update_function,
    work_type,
)
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.overloads import refuse_older_runtimes
from onnx_backprop.opset.functions.use_kernels import MIN_IR_VERSION

NORM_EPSILON = 1e-6  # added to the norm that gradients are scaled by, as torch does


class StepState:
    """What a step carries over: for each input that it renews the new value, and what else its `Slot` says."""

    def __init__(self) -> None:
        self.new: dict[ir.Value, ir.Value] = {}
        self._slots: dict[ir.Value, Slot] = {}

    def renew(self, x: ir.Value, new: ir.Value, role: str, start: float | None = None, of: str = "") -> None:
        """Let a step put a new value in the place of an input; role, start, of: see `Slot`."""
        self.new[x] = new
        self._slots[x] = Slot(str(x.name), "", role, start, of)

    def written(self, outputs: Mapping[ir.Value, str]) -> tuple[Slot, ...]:
        """The records, once the outputs have their names."""
        return tuple(replace(self._slots[x], output=name) for x, name in outputs.items())


def state_input(op: Builder, name: str, dtype: ir.DataType, shape: ir.Shape | None = None) -> ir.Value:
    """A new graph input for state, 0-D by default."""
    return ir.Value(name=op.unique(name), type=ir.TensorType(dtype), shape=ir.Shape([]) if shape is None else shape)


@dataclass(frozen=True)
class _Update:
    """What one update reads: by parameter its gradient, its state and its running mean; and the number of the step."""

    gradients: dict[ir.Value, ir.Value]
    step: ir.Value
    slots: dict[ir.Value, list[ir.Value]]
    means: dict[ir.Value, ir.Value]


class StepWriter:
    """Writes the update of all parameters behind their gradients."""

    def __init__(self, op: Builder, graph: ir.Graph, optimizer: Optimizer, opset: int) -> None:
        self.op, self.graph, self.optimizer = op, graph, optimizer
        self.counted: ir.Value | None = None  # what gradients are means over, where means of runs weigh by it, 0-D
        self.finite: ir.Value | None = None  # whether there is an update at all, 0-D; None: always
        self.functions = UpdateFunctions()
        self.state = StepState()
        self._opset = opset
        self.rate = ir.Value(name=op.unique(LEARNING_RATE), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
        self._numbers: dict[str, ir.Value] = {}
        self._square_sums: dict[ir.Value, ir.Value] = {}

    def attach(self, model: ir.Model) -> None:
        """Put the functions that the update calls into the model."""
        model.opset_imports[UPDATE_DOMAIN] = 1
        for function in self.functions.functions:
            parsed = ir.serde.deserialize_function(function)
            model.functions[parsed.identifier()] = parsed

    def norms(self, gradients: dict[ir.Value, ir.Value]) -> ir.Value:
        """√Σ g² of every gradient g, float32."""
        op = self.op
        norms = [op.Reshape(self._square_sum(op, self._widened(x, g)), [1]) for x, g in gradients.items()]
        return op.Cast(op.Sqrt(op.Concat(*norms, axis=0)), to=ir.DataType.FLOAT)

    def _square_sum(self, op: Builder, g: ir.Value) -> ir.Value:
        """Σ g², float64; once for what norms and clipping both ask for."""
        if op is not self.op:
            return staged(op, g, "ReduceSumSquare", ir.DataType.DOUBLE)
        if g not in self._square_sums:
            self._square_sums[g] = staged(op, g, "ReduceSumSquare", ir.DataType.DOUBLE)
        return self._square_sums[g]

    def write(self, gradients: dict[ir.Value, ir.Value]) -> None:
        """Emit the update along the gradients and fill `state`."""
        op, state, optimizer = self.op, self.state, self.optimizer
        op.prefix = "optimizer"
        if any(element_type(x) == ir.DataType.DOUBLE for x in gradients):
            self.rate.dtype = ir.DataType.DOUBLE
        wide = {x: self._widened(x, g) for x, g in gradients.items()}
        step = state_input(op, STEP, ir.DataType.INT64)
        names = optimizer.slots()
        slots = {x: [self._beside(x, name) for name in names] for x in gradients}
        means = {x: self._beside(x, "ema") for x in gradients} if optimizer.ema is not None else {}
        kept = [step, *gradients, *(s for of_x in slots.values() for s in of_x), *means.values()]
        update = _Update(wide, step, slots, means)
        new = self._update(op, update) if optimizer.accumulate == 1 else self._accumulated(update, kept)
        state.renew(step, new[step], COUNTER, 0, STEP)
        for x in gradients:
            state.renew(x, new[x], PARAMETER)
        for x, of_x in slots.items():
            for slot, start in zip(of_x, names.values(), strict=True):
                state.renew(slot, new[slot], MOMENT, start, str(x.name))
        for x, mean in means.items():
            state.renew(mean, new[mean], MEAN, of=str(x.name))

    def _beside(self, x: ir.Value, what: str) -> ir.Value:
        """An input for what is kept beside a parameter, of its shape."""
        return state_input(self.op, f"{x.name}.{what}", work_type(element_type(x)), x.shape)

    def _widened(self, x: ir.Value, g: ir.Value) -> ir.Value:
        """The gradient in the type of the update, also where it was rounded for the output alone."""
        wide, node = work_type(element_type(x)), g.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
        return _shaped(source if source is not None and source.dtype == wide else cast(self.op, g, wide), x)

    def _accumulated(self, update: _Update, kept: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """a ← a + g/k; in every k-th run the update along a, and a ← 0; in the others everything stays.

        With means over n tokens: a ← a + n·g, m ← m + n, and the update along a/m, or a where m = 0.
        """
        op, count = self.op, self.optimizer.accumulate
        micro = state_input(op, MICRO_STEP, ir.DataType.INT64)
        due = op.GreaterOrEqual(op.Add(micro, 1), count)
        if self.finite is not None:
            due = op.And(due, self.finite)
        sums: dict[ir.Value, ir.Value] = {}
        totals: dict[ir.Value, ir.Value] = {}
        for x, g in update.gradients.items():
            sums[x] = self._beside(x, "accumulated")
            factor = _number_like(1 / count, g, x) if self.counted is None else cast(op, self.counted, element_type(g))
            totals[x] = self.if_finite(op, op.Add(sums[x], op.Mul(g, factor)), sums[x])
        renewed = [*kept, micro, *sums.values()]
        tokens: tuple[ir.Value, ir.Value] | None = None  # before this run, and with it
        if self.counted is not None:
            before = state_input(op, COUNTED, ir.DataType.DOUBLE)
            seen = op.Add(before, cast(op, self.counted, ir.DataType.DOUBLE))
            tokens = before, self.if_finite(op, seen, before)
            renewed.append(before)
        then, otherwise = op.inside(), op.inside()
        then.prefix, otherwise.prefix = "optimizer/then", "optimizer/else"
        means = totals
        if tokens is not None:
            divisor = then.Where(then.Equal(tokens[1], 0), 1, tokens[1])
            means = {x: _shaped(then.Div(a, cast(then, divisor, element_type(a))), x) for x, a in totals.items()}
        updated = self._update(then, replace(update, gradients=means))
        updated[micro] = then.number(0, ir.DataType.INT64)
        updated |= {x: then.zeros(then.shape(x), x) for x in sums.values()}
        stays = dict(zip(kept, kept, strict=True)) | {sums[x]: total for x, total in totals.items()}
        stays[micro] = otherwise.Add(micro, 1 if self.finite is None else self._count(otherwise))
        if tokens is not None:
            updated[tokens[0]], stays[tokens[0]] = then.number(0, ir.DataType.DOUBLE), tokens[1]
        branches = [(then, [updated[v] for v in renewed]), (otherwise, [stays[v] for v in renewed])]
        new = dict(zip(renewed, op.choose(due, renewed, *branches), strict=True))
        self.state.renew(micro, new[micro], COUNTER, 0, MICRO_STEP)
        if tokens is not None:
            self.state.renew(tokens[0], new[tokens[0]], COUNTER, 0, COUNTED)
        for x, total in sums.items():
            self.state.renew(total, new[total], SUM, 0, str(x.name))
        return new

    def _update(self, op: Builder, update: _Update) -> dict[ir.Value, ir.Value]:
        """Every value of the state after one update."""
        optimizer, slots = self.optimizer, update.slots
        finite = self.finite if optimizer.accumulate == 1 else None  # with sums nothing else comes here
        new: dict[ir.Value, ir.Value] = {update.step: op.Add(update.step, 1 if finite is None else self._count(op))}
        count = op.Cast(new[update.step], to=ir.DataType.DOUBLE)
        rate = op.Cast(self.rate, to=ir.DataType.DOUBLE)
        clipped, factor = self._clipped(op, update.gradients)
        for index, members in self._groups(list(clipped)):
            group = None if index is None else optimizer.groups[index]
            decay = optimizer.weight_decay if group is None or group.weight_decay is None else group.weight_decay
            names = [*optimizer.hyper, *(["weight_decay"] if decay else [])]
            values = [self._number(name, getattr(optimizer, name)) for name in optimizer.hyper]
            if decay:
                grouped = group is not None and group.weight_decay is not None
                values.append(self._number(f"group{index}.weight_decay" if grouped else "weight_decay", decay))
            if optimizer.ema is not None:
                names.append(EMA)
                values.append(self._number(EMA, optimizer.ema))
            if factor is not None:
                names.append(CLIP_FACTOR)
                values.append(factor)
            if finite is not None:
                names.append(FINITE)
                values.append(op.Cast(finite, to=ir.DataType.DOUBLE))
            group_rate = rate
            if group is not None and group.rate != 1:
                group_rate = op.Mul(rate, self._number(f"group{index}.rate", group.rate))
            kept = {x: [*slots[x], *([update.means[x]] if update.means else [])] for x in members}
            tensors = [tensor for x in members for tensor in (x, clipped[x], *kept[x])]
            function = update_function(
                optimizer.name, names, members, list(optimizer.slots()), optimizer.update, self._opset
            )
            results = iter(self._call(op, function, [group_rate, count, *values, *tensors]))
            for x in members:
                for value in (x, *kept[x]):
                    new[value] = op.typed(next(results), value)
        return new

    def if_finite(self, op: Builder, new: ir.Value, old: ir.Value) -> ir.Value:
        """The new value of a tensor, or the old one where the gradients are not finite."""
        return op.typed(new if self.finite is None else op.Where(self.finite, new, old), old)

    def _count(self, op: Builder) -> ir.Value:
        assert self.finite is not None
        return op.Cast(self.finite, to=ir.DataType.INT64)

    def _call(self, op: Builder, function: FunctionProto, inputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
        overload = self.functions.overload(function)
        outputs = op.emit(function.name, inputs, {}, outputs=len(function.output), domain=UPDATE_DOMAIN)
        op.nodes[-1].overload = overload
        return outputs

    def _number(self, name: str, value: float) -> ir.Value:
        """A number of the optimizer: 0-D float64, an input of the graph with this default."""
        if name not in self._numbers:
            tensor = ir.tensor(np.array(value, np.float64), name=self.op.unique(f"optimizer.{name}"))
            number = ir.Value(name=tensor.name, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape([]))
            number.const_value = tensor
            self.graph.register_initializer(number)
            self._numbers[name] = number
        return self._numbers[name]

    @property
    def numbers(self) -> list[ir.Value]:
        """The numbers of the optimizer that its update reads."""
        return list(self._numbers.values())

    def _groups(self, parameters: list[ir.Value]) -> list[tuple[int | None, list[ir.Value]]]:
        """The parameters by the index of the group that takes them, None for those that no group takes."""
        rest = {str(x.name): x for x in parameters}
        result: list[tuple[int | None, list[ir.Value]]] = []
        for index, group in enumerate(self.optimizer.groups):
            if group.frozen:
                continue
            names = select(f"groups[{index}].parameters", group.parameters, aliases(parameters))
            members = [rest.pop(name) for name in names if name in rest]
            if members:
                result.append((index, members))
        return [(None, list(rest.values())), *result] if rest else result

    def _clipped(
        self, op: Builder, gradients: dict[ir.Value, ir.Value]
    ) -> tuple[dict[ir.Value, ir.Value], ir.Value | None]:
        """The gradients, each element clipped, and the factor that brings their norm to the limit, 0-D float64."""
        optimizer, result = self.optimizer, dict(gradients)
        if optimizer.clip_value is not None:
            for x, g in result.items():
                result[x] = _shaped(op.Clip(g, -optimizer.clip_value, optimizer.clip_value), x)
        if optimizer.clip_norm is None:
            return result, None
        norm = op.Add(op.Sqrt(op.Sum(*(self._square_sum(op, g) for g in result.values()))), NORM_EPSILON)
        return result, op.Min(op.Div(self._number("clip_norm", optimizer.clip_norm), norm), 1)


def write_outputs(op: Builder, graph: ir.Graph, state: StepState, writer: StepWriter | None) -> tuple[Slot, ...]:
    """Make inputs of everything in the state and outputs `<x>_new` of its new values; the records.

    The learning rate comes in front of the state, the numbers of the optimizer are the last inputs.
    """
    first, last = ([], []) if writer is None else ([writer.rate], writer.numbers)
    graph.inputs.extend([*first, *(x for x in state.new if x not in graph.inputs), *last])
    op.prefix = "optimizer"
    outputs: dict[ir.Value, str] = {}
    for x, new in state.new.items():
        computed = new.producer() in op.nodes or (is_statistic(new) and not new.uses())
        output = op.Identity(new) if not computed or new in graph.outputs else new
        output.name = op.unique(f"{x.name}_new")
        op.typed(output, x)
        graph.outputs.append(output)
        outputs[x] = str(output.name)
    return state.written(outputs)


def optimizer_graph(optimizer: Optimizer, parameters: Mapping[str, tuple[ir.DataType, Sequence[int]]]) -> ModelProto:
    """The update alone as a model: inputs `<p>`, `<p>_grad`, the learning rate and the state; outputs `<x>_new`.

    Its metadata are JSON: the name of the learning rate, and the records of the state.
    """
    graph = ir.Graph([], [], nodes=[], name="optimizer", opset_imports={"": MIN_OPSET})
    op = Builder(set())
    gradients: dict[ir.Value, ir.Value] = {}
    for name, (dtype, shape) in parameters.items():
        x, g = (
            ir.Value(name=op.unique(n), type=ir.TensorType(dtype), shape=ir.Shape(shape))
            for n in (name, f"{name}_grad")
        )
        graph.inputs.extend([x, g])
        gradients[x] = g
    writer = StepWriter(op, graph, optimizer, MIN_OPSET)
    writer.write(gradients)
    slots = write_outputs(op, graph, writer.state, writer)
    graph.extend(op.nodes)
    model = ir.Model(graph, ir_version=MIN_IR_VERSION, producer_name="onnx-backprop")
    writer.attach(model)
    proto = to_proto(model)
    about = {"learning_rate": writer.rate.name, "state": [slot.described() for slot in slots]}
    refuse_older_runtimes(proto)
    proto.metadata_props.add(key=OPTIMIZER_METADATA, value=json.dumps(about))
    return proto


def _number_like(number: float, value: ir.Value, x: ir.Value) -> np.ndarray:
    """A number of the type of a value that has the shape of x."""
    return np.full(one_element(x.shape), number).astype(element_type(value).numpy())


def _shaped(value: ir.Value, like: ir.Value) -> ir.Value:
    value.shape = like.shape
    return value
