"""Emitting nodes: `op.Mul(a, b)` appends a Mul node and returns its output.

Besides the operators of ONNX, called by their names, there are the few things every gradient rule needs:
constants of a value's type, shapes, and the one place where broadcasting is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.core.shapes import Dim, Dims


def dims(value: ir.Value) -> Dims | None:
    """Dimensions of a value as ints, symbol names or None; None when the rank is unknown."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def is_float(value: ir.Value) -> bool:
    """Whether a value has a type that gradients exist for."""
    return value.dtype is not None and value.dtype.is_floating_point()


class Builder:
    """Collects the nodes of a backward graph, named after the forward node they belong to.

    `op.SomeOp(x, y, axis=1)` emits a node of the default domain; `op.domain.SomeOp(…)` one of ours. A keyword
    that is None is left out; an input that is None is an absent optional one. `op.emit` makes several outputs.
    """

    def __init__(self, used_names: set[str]) -> None:
        self.nodes: list[ir.Node] = []
        self.prefix = "grad"
        self.straight_through = False  # whether rounding counts as the identity, see rules.quantize
        self.domain = _Domain(self)
        self._names = used_names
        self._numbers: dict[str, int] = {}  # the last number put behind a name: counting on from it, not from 1
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.emit(op_type, inputs, attributes)[0]

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any],
        *,
        outputs: int = 1,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Append a node with any number of outputs."""
        given = {k: v for k, v in attributes.items() if v is not None}
        name = self.unique(f"{self.prefix}/{op_type}")
        node = ir.node(op_type, list(inputs), given, domain=domain, num_outputs=outputs, name=name)
        for n, value in enumerate(node.outputs):
            value.name = name if n == 0 else self.unique(f"{name}_{n}")
        self.nodes.append(node)
        return node.outputs

    def inside(self) -> Builder:
        """A builder for a sub-graph: it shares the names, but no values, since a sub-graph's values end with it."""
        inner = Builder(self._names)
        inner.straight_through = self.straight_through
        inner._numbers = self._numbers
        return inner

    def unique(self, name: str) -> str:
        """`name`, with a number behind it when it is taken."""
        candidate = name
        while candidate in self._names:
            self._numbers[name] = self._numbers.get(name, 1) + 1
            candidate = f"{name}_{self._numbers[name]}"
        self._names.add(candidate)
        return candidate

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant tensor; equal ones share a node."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            value = self.Constant(value=ir.tensor(array))
            value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
            self._constants[key] = value
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A 1-D int64 constant."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """A 0-D constant of the type of `like`."""
        return self.constant(np.array(value).astype(element_type(like).numpy()))

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of a value, 1-D int64: a constant where it is known, else a Shape node (one per value)."""
        known = dims(value)
        if known is not None and all(isinstance(d, int) for d in known):
            return self.ints([d for d in known if isinstance(d, int)])
        if value not in self._shapes:
            self._shapes[value] = self.Shape(value)
        return self._shapes[value]

    def shape_s32(self, value: ir.Value) -> ir.Value:
        """The shape of a value as the int32 tensor that the domain's operators take."""
        return self.Cast(self.shape(value), to=ir.DataType.INT32.value)

    def zeros(self, shape: ir.Value, like: ir.Value) -> ir.Value:
        """Zeros of a given shape and of the type of `like`."""
        return self.fill(shape, 0.0, like)

    def fill(self, shape: ir.Value, value: float, like: ir.Value) -> ir.Value:
        """A tensor of one value, of a given shape and of the type of `like`."""
        element = np.array([value]).astype(element_type(like).numpy())
        return self.ConstantOfShape(shape, value=ir.tensor(element))

    def accumulate(self, values: Sequence[ir.Value]) -> ir.Value:
        """The sum of one or more gradients of the same value."""
        total = values[0]
        for value in values[1:]:
            total = self.Add(total, value)
        return total

    def unbroadcast(self, g: ir.Value, like: ir.Value, out: ir.Value) -> ir.Value:
        """Sum g over the axes along which `like` was broadcast to `out`; g has the shape of `out`.

        Decided here where the shapes are known (equal symbols are equal lengths), else at run time.
        """
        small, large = dims(like), dims(out)
        axes = None if small is None or large is None else broadcast_axes(small, large)
        if axes is None or small is None or large is None:
            return self._unbroadcast_at_run_time(g, like, out)
        leading = len(large) - len(small)
        kept = [axis for axis in axes if axis >= leading]
        if kept:
            g = self.ReduceSum(g, self.ints(kept), keepdims=1)
        if leading:
            g = self.ReduceSum(g, self.ints(range(leading)), keepdims=0)
        return g

    def _unbroadcast_at_run_time(self, g: ir.Value, like: ir.Value, out: ir.Value) -> ir.Value:
        small, large, one = self.shape(like), self.shape(out), self.ints([1])
        missing = self.Sub(self.Shape(large), self.Shape(small))
        ones = self.ConstantOfShape(missing, value=ir.tensor(np.array([1], np.int64)))
        aligned = self.Concat(ones, small, axis=0)
        stretched = self.And(self.Equal(aligned, one), self.Not(self.Equal(large, one)))
        axes = self.Squeeze(self.NonZero(stretched), self.ints([0]))
        summed = self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
        return self.Reshape(summed, small, allowzero=1)


class _Domain:
    """`op.domain.SomeOp(…)`: the same builder, emitting into our domain; `op.domain.emit` makes several outputs."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def emit(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], *, outputs: int
    ) -> Sequence[ir.Value]:
        """Append a node with any number of outputs."""
        return self._builder.emit(op_type, inputs, attributes, outputs=outputs, domain=DOMAIN)

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        return lambda *inputs, **attributes: self._builder.emit(op_type, inputs, attributes, domain=DOMAIN)[0]


def element_type(value: ir.Value) -> ir.DataType:
    """The element type of a value; the model is at fault when inference could not find it."""
    if value.dtype is None:
        raise InvalidModelError(f"the element type of {value.name!r} is unknown; shape inference must find it")
    return value.dtype


def broadcast_axes(small: Dims, large: Dims) -> list[int] | None:
    """Axes of `large` along which `small` was (or, for a symbol, may have been) stretched from 1.

    None when that cannot be told before run time. Summing an axis that turns out to have length 1 is harmless.
    """
    leading = len(large) - len(small)
    axes = list(range(leading))
    for axis, (a, b) in enumerate(zip(small, large[leading:], strict=True), start=leading):
        if _same_length(a, b):
            continue
        if a != 1:
            return None
        axes.append(axis)
    return axes


def _same_length(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) and a != 1:
        return True  # broadcasting only stretches 1, so `large` has this length too
    return a is not None and a == b
