"""One ONNX function that updates several tensors: `onnx_backprop.training::AdamW`.

Its inputs are the learning rate, the number of the step, the optimizer's numbers, then for every tensor its value, its
gradient and its state, these two in the type to work in; its outputs are the new values and states in that order.
Numbers are 0-D float64. They are turned into what the formulas need once, in float64, and cast to the tensors' type.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx import FunctionProto, NodeProto, TensorProto, helper

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import HALF_TYPES
from onnx_backprop.opset.bodies.builder import Body
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.update_functions import GRADIENT, VALUE, formal_names
from onnx_backprop.opset.graphs.names import rename

CLIP_FACTOR = "clip_factor"  # the number that gradients are multiplied by, where there is any
EMA = "ema"  # the number that says how slowly running means follow, where there are any
FINITE = "finite"  # the number that is 0 where everything is to stay as it is, where there is any
_MEAN = "running_mean"  # where slots have their names
Write = Callable[..., Sequence[str]]


def work_type(dtype: ir.DataType) -> ir.DataType:
    """The type that a parameter of type `dtype` is updated in and that its state has."""
    return ir.DataType.FLOAT if dtype in HALF_TYPES else dtype


class Update:
    """What one update is written with: `u.Mul(a, b)` emits a node, `u.number("beta1")` is a number, 0-D.

    `u.exact` emits in float64, for numbers; `u.scalar(name, write)` casts what `write` emits there, once for each type
    of tensor. `exact_number`: a number of the optimizer in float64. `cast`: to the type of the tensor that is updated.
    """

    def __init__(self, body: Body, rate: str, step: str, exact_number: Callable[[str], str]) -> None:
        self.exact = body
        self.exact_rate, self.exact_step, self.exact_number = rate, step, exact_number
        self.exact_one = body.constant(np.array(1, np.float64))
        self.decay: str | None = None  # the name of λ, where there is any
        self._cast: Callable[[str], str] = str
        self._type: object = None
        self._scalars: dict[tuple[str, object], str] = {}

    def of_type(self, key: object, cast: Callable[[str], str]) -> None:
        """Go on with tensors of another type; `key`: equal for equal types."""
        self._type, self._cast = key, cast

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        return getattr(self.exact, op_type)

    def once(self, name: str, write: Callable[[], str]) -> str:
        """What `write` emits in float64, once."""
        if (name, None) not in self._scalars:
            self._scalars[name, None] = write()
        return self._scalars[name, None]

    def scalar(self, name: str, write: Callable[[], str]) -> str:
        """What `write` emits in float64, cast to the type of the tensor."""
        if (name, self._type) not in self._scalars:
            self._scalars[name, self._type] = self._cast(self.once(name, write))
        return self._scalars[name, self._type]

    def number(self, name: str) -> str:
        """A number of the optimizer."""
        return self.scalar(name, lambda: self.exact_number(name))

    def rest(self, name: str) -> str:
        """1 less a number of the optimizer."""
        return self.scalar(f"1-{name}", lambda: self.exact.Sub(self.exact_one, self.exact_number(name)))

    @property
    def rate(self) -> str:
        """The learning rate η."""
        return self.scalar("η", lambda: self.exact_rate)

    def one_less_power(self, name: str) -> str:
        """1 - βᵗ in float64: most of its digits would be lost in float32."""
        return self.exact.Sub(self.exact_one, self.exact.Pow(self.exact_number(name), self.exact_step))

    def newest(self, name: str) -> str:
        """(1 - d) / (1 - dᵗ), the part that the newest value has of a mean of t values."""

        def part() -> str:
            return self.exact.Div(self.exact.Sub(self.exact_one, self.exact_number(name)), self.one_less_power(name))

        return self.scalar(f"(1-{name})/(1-{name}ᵗ)", part)

    def decayed(self, x: str, g: str) -> str:
        """G + λ·x."""
        return g if self.decay is None else self.Add(g, self.Mul(self.number(self.decay), x))

    def shrunk(self, x: str) -> str:
        """X·(1 - η·λ)."""
        decay, b = self.decay, self.exact
        if decay is None:
            return x
        product = self.scalar("1-ηλ", lambda: b.Sub(self.exact_one, b.Mul(self.exact_rate, self.exact_number(decay))))
        return self.Mul(x, product)


def one_element(shape: ir.Shape | None) -> list[int]:
    """The shape of a number that is combined with tensors of a shape.

    Of as many axes: where the last ones have length 1, as of the weights of 1×1 convolutions, onnxruntime takes 70
    times as long for one of fewer.
    """
    return [] if shape is None or len(shape) < 2 else [1] * len(shape)


def _cast_to(body: Body, dtype: ir.DataType, shape: list[int]) -> Callable[[str], str]:
    def cast(value: str) -> str:
        value = value if dtype == ir.DataType.DOUBLE else body.Cast(value, to=dtype.value)
        return body.Reshape(value, body.ints(shape)) if shape else value

    return cast


def _truth(body: Body, shape: list[int]) -> str:
    truth = body.Cast(FINITE, to=TensorProto.BOOL)
    return body.Reshape(truth, body.ints(shape)) if shape else truth


def _written(name: str, write: Write, update: Update, x: str, g: str, *state: str) -> Sequence[str]:
    """What an optimizer's `update` returns; InvalidArgumentError where it fails or returns something else."""
    try:
        results = write(update, x, g, *state)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise InvalidArgumentError(
            f"optimizer {name}: update raised {type(e).__name__}: {str(e).rstrip('.')}. It emits nodes with its "
            "first argument, as u.Sub(x, g) for x - g"
        ) from e
    results = (results,) if isinstance(results, str) else results
    named = isinstance(results, tuple | list) and all(isinstance(value, str) for value in results)
    if not named or len(results) != 1 + len(state):
        raise InvalidArgumentError(
            f"optimizer {name}: update returned {results!r}, expected the new value and one for each of "
            f"{len(state)} slots, as nodes of its first argument return them"
        )
    return results


def update_function(
    name: str, numbers: Sequence[str], tensors: Sequence[ir.Value], slots: Sequence[str], write: Write, opset: int
) -> FunctionProto:
    """The function that updates tensors of the types and ranks of these, each with a tensor of state for each slot.

    With the number `EMA` each has a running mean behind these: m ← m + (1 - d) / (1 - dᵗ)·(x - m). That is
    Σ dᵗ⁻ⁱ·xᵢ / Σ dᵗ⁻ⁱ over the values after the updates i = 1 … t.
    """
    body = Body(name)
    update = Update(body, "learning_rate", "step", str)
    update.decay = "weight_decay" if "weight_decay" in numbers else None
    averaged = [_MEAN] if EMA in numbers else []
    kinds = (VALUE, GRADIENT, *slots, *averaged)
    arguments, new_names = formal_names(kinds, len(tensors))
    outputs: list[str] = []
    for n, tensor in enumerate(tensors):
        dtype = element_type(tensor)
        wide, shape = work_type(dtype), one_element(tensor.shape)
        update.of_type((wide, len(shape)), _cast_to(body, wide, shape))
        x, g, *state = arguments[n * len(kinds) : (n + 1) * len(kinds)]
        if CLIP_FACTOR in numbers:
            g = update.Mul(g, update.number(CLIP_FACTOR))
        now, old = x if dtype == wide else body.Cast(x, to=wide.value), state[: len(slots)]
        new, *kept = _written(name, write, update, now, g, *old)
        results = [new if dtype == wide else body.Cast(new, to=dtype.value), *kept]
        if averaged:
            value = new if dtype == wide else body.Cast(results[0], to=wide.value)
            results.append(update.Add(state[-1], update.Mul(update.newest(EMA), update.Sub(value, state[-1]))))
        if FINITE in numbers:
            finite = update.once(f"finite, {len(shape)} axes", partial(_truth, body, shape))
            results = [body.Where(finite, *pair) for pair in zip(results, (x, *state), strict=True)]
        outputs += results
    inputs = ["learning_rate", "step", *numbers, *arguments]
    nodes = _named(body.nodes, inputs, dict(zip(new_names, outputs, strict=True)))
    return helper.make_function(UPDATE_DOMAIN, name, inputs, new_names, nodes, [helper.make_opsetid("", opset)])


def _named(nodes: list[NodeProto], inputs: Sequence[str], outputs: Mapping[str, str]) -> list[NodeProto]:
    """The nodes, whose values are called as the outputs that they are: onnxruntime would run an Identity as a copy."""
    names: dict[str, str] = {}
    for output, value in outputs.items():
        if value in inputs or value in names:
            nodes.append(helper.make_node("Identity", [value], [output]))
        else:
            names[value] = output
    for node in nodes:
        rename(node, names)
    return nodes


class UpdateFunctions:
    """The functions of one model, each once; nodes that need different ones call different overloads."""

    def __init__(self) -> None:
        self.functions: list[FunctionProto] = []
        self._overloads: dict[bytes, str] = {}

    def overload(self, function: FunctionProto) -> str:
        """The overload that a node has to call to run this function."""
        key = function.SerializeToString(deterministic=True)
        if key not in self._overloads:
            same = sum(f.name == function.name for f in self.functions)
            function.overload = f"variant_{same + 1}" if same else ""
            self._overloads[key] = function.overload
            self.functions.append(function)
        return self._overloads[key]
