"""One ONNX function that updates several tensors: `onnx_backprop.training::AdamW`.

Its inputs are the learning rate, the number of the step, the optimizer's numbers, then for every tensor its value, its
gradient and its state, these two in the type to work in; its outputs are the new values and states in that order.
Numbers are 0-D float64. They are turned into what the formulas need once, in float64, and cast to the tensors' type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import FunctionProto, helper

from onnx_backprop.converters.rules.common import HALF_TYPES
from onnx_backprop.opset.bodies.builder import Body

UPDATE_DOMAIN = "onnx_backprop.training"
Write = Callable[..., Sequence[str]]


def work_type(own: ir.DataType) -> ir.DataType:
    """The type that a parameter of type `own` is updated in and that its state has."""
    return ir.DataType.FLOAT if own in HALF_TYPES else own


class Update:
    """What one update is written with: `u.Mul(a, b)` emits a node, `u.number("beta1")` is a number, 0-D.

    `u.exact` emits in float64, for numbers; `u.scalar(name, write)` casts what `write` emits there, once.
    """

    def __init__(self, body: Body, numbers: Sequence[str]) -> None:
        self.exact = body
        self.exact_rate, self.exact_step = "learning_rate", "step"
        self.exact_one = body.constant(np.array(1, np.float64))
        self.type = ir.DataType.FLOAT
        self._numbers = frozenset(numbers)
        self._scalars: dict[tuple[str, ir.DataType], str] = {}

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        return getattr(self.exact, op_type)

    def exact_number(self, name: str) -> str:
        """A number of the optimizer in float64."""
        assert name in self._numbers, f"{name} is an input of the function"
        return name

    def scalar(self, name: str, write: Callable[[], str]) -> str:
        """What `write` emits in float64, cast to the type of the tensor."""
        key = name, self.type
        if key not in self._scalars:
            double = self._scalars.get((name, ir.DataType.DOUBLE)) or write()
            self._scalars[name, ir.DataType.DOUBLE] = double
            self._scalars[key] = double if self.type == ir.DataType.DOUBLE else self._cast(double, self.type)
        return self._scalars[key]

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

    def decayed(self, x: str, g: str) -> str:
        """G + λ·x."""
        return self.Add(g, self.Mul(self.number("weight_decay"), x)) if "weight_decay" in self._numbers else g

    def shrunk(self, x: str) -> str:
        """X·(1 - η·λ)."""
        if "weight_decay" not in self._numbers:
            return x
        b = self.exact
        return self.Mul(x, self.scalar("1-ηλ", lambda: b.Sub(self.exact_one, b.Mul(self.exact_rate, "weight_decay"))))

    def _cast(self, value: str, to: ir.DataType) -> str:
        return self.exact.Cast(value, to=to.value)

    def widened(self, value: str, own: ir.DataType) -> str:
        """A tensor of type `own` in the type to work in."""
        return value if own == self.type else self._cast(value, self.type)

    def narrowed(self, value: str, own: ir.DataType) -> str:
        """Back from the type to work in."""
        return value if own == self.type else self._cast(value, own)


def update_function(
    name: str, numbers: Sequence[str], types: Sequence[ir.DataType], slots: Sequence[str], write: Write, opset: int
) -> FunctionProto:
    """The function that updates tensors of the given element types, each with one tensor of state for each slot."""
    body = Body(name)
    update = Update(body, numbers)
    kinds = ("X", "G", *slots)
    made: dict[str, str] = {}
    for n, own in enumerate(types):
        update.type = work_type(own)
        x, g, *state = (f"{kind}_{n}" for kind in kinds)
        new = write(update, update.widened(x, own), g, *state)
        results: list[Any] = [update.narrowed(new[0], own), *new[1:]]
        for kind, result in zip(("X", *slots), results, strict=True):
            made[f"{kind}_{n}_new"] = result
    for output, value in made.items():
        body.nodes.append(helper.make_node("Identity", [value], [output]))
    return helper.make_function(
        UPDATE_DOMAIN,
        name,
        ["learning_rate", "step", *numbers, *(f"{kind}_{n}" for n in range(len(types)) for kind in kinds)],
        list(made),
        body.nodes,
        [helper.make_opsetid("", opset)],
    )


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
