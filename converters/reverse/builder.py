"""Emitting nodes: `op.Mul(a, b)` appends a Mul node and returns its output.

Besides the operators of ONNX, called by their names, there are the few things every gradient rule needs: numbers as
operands, shapes, and the one place where broadcasting is undone. `onnx_ir.tape` keeps a list of nodes too, but names
nothing, makes no constants and does not note types.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse import sequences
from onnx_backprop.converters.reverse.known import constant_value, dims, element_type, known_lengths
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.signature import signature
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.shapes import Dim, Dims
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.opset.graphs.walk import is_standard

Operand = ir.Value | np.ndarray | float | Sequence[float] | None


class Builder:
    """Collects the nodes of a backward graph, named after the forward node they belong to.

    `op.SomeOp(x, y, axis=1)` emits a node of the default domain; `op.domain.SomeOp(…)` one of onnx_backprop. A keyword
    that is None is left out; an input that is None is an absent optional one. `op.emit` makes several outputs.

    An input may be a number, a list of numbers or an array: `op.Sub(1.0, x)`, `op.ReduceSum(x, [0, 2])`. A number has
    the type of the inputs that the operator wants it to share its type with, else int64 or float32. The outputs have
    the types that the operator's schema gives them.
    """

    def __init__(self, used_names: set[str]) -> None:
        self.nodes: list[ir.Node] = []
        self.prefix = "grad"
        self.straight_through = False  # whether rounding counts as the identity, see rules.quantize
        self.checkpoint = 0  # how many steps of a loop lie between two states that are stored, 0: all are; see segments
        self.imputed: ir.Value | None = None  # the gradient of a node, where 0 · NaN is to be 0
        self.domain = _Domain(self)
        self._names = used_names
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.emit(op_type, inputs, attributes)[0]

    def emit(
        self, op_type: str, inputs: Sequence[Operand], attributes: dict[str, Any], *, outputs: int = 1, domain: str = ""
    ) -> Sequence[ir.Value]:
        """Append a node with any number of outputs."""
        types = signature(op_type, domain)
        inputs = [self.constant(value) if isinstance(value, np.ndarray) else value for value in inputs]
        bound = types.bind(inputs)
        values: list[ir.Value | None] = []
        for n, value in enumerate(inputs):
            if value is not None and not isinstance(value, ir.Value):
                array = np.asarray(value)
                dtype = types.of_number(n, bound, whole=array.dtype.kind != "f")
                if dtype is None:
                    dtype = element_type(next(v for v in inputs if isinstance(v, ir.Value) and v.dtype is None))
                value = self.constant(array.astype(dtype.numpy()))
            values.append(value)
        if any(value is not given for value, given in zip(values, inputs, strict=True)):
            bound = types.bind(values)
        while values and values[-1] is None:
            values.pop()
        given = {k: v.value if isinstance(v, ir.DataType) else v for k, v in attributes.items() if v is not None}
        given = {k: _attribute(k, v) for k, v in given.items() if not types.is_default(k, v)}
        if op_type == "Reshape" and (lengths := constant_value(values[1])) is not None and lengths.all():
            given.pop("allowzero", None)
        name = self.unique(f"{self.prefix}/{op_type}")
        node = ir.node(op_type, values, given, domain=domain, num_outputs=outputs, name=name)
        for n, output in enumerate(node.outputs):
            output.name = name if n == 0 else self.unique(f"{name}_{n}")
            dtype = types.of_output(n, bound)
            if op_type == "Cast":
                dtype = ir.DataType(attributes["to"])
            elif op_type == "ConstantOfShape":
                dtype = attributes["value"].dtype
            if dtype is not None:
                output.dtype = dtype
        self.nodes.append(node)
        return node.outputs

    def inside(self) -> "Builder":
        """A builder for a sub-graph: it shares the names, but no values, since a sub-graph's values end with it."""
        inner = Builder(self._names)
        inner.straight_through, inner.checkpoint = self.straight_through, self.checkpoint
        return inner

    def unique(self, name: str) -> str:
        """`name`, with a number behind it when it is taken."""
        return unique(name, self._names)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant tensor; equal ones share a node."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            if array.dtype == np.int64 and array.ndim == 1 and array.size:  # half the bytes of a tensor, and legible
                value = self.Constant(value_ints=array.tolist())
            else:
                value = self.Constant(value=ir.Tensor(array))
            value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
            self._constants[key] = value
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A 1-D int64 constant."""
        return self.constant(np.array(values, np.int64))

    def joined(self, *parts: ir.Value) -> ir.Value:
        """1-D values one after the other: a constant where all of them are, else a Concat."""
        known = [array for part in parts if (array := constant_value(part)) is not None]
        return self.constant(np.concatenate(known)) if len(known) == len(parts) else self.Concat(*parts, axis=0)

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """A 0-D constant of the type of `like`."""
        return self.number(value, element_type(like))

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A 0-D constant; as an operand beside others of its type a plain number will do."""
        return self.constant(np.array(value).astype(dtype.numpy()))

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of a value, 1-D int64: a constant where it is known, else a Shape node (one per value)."""
        if value not in self._shapes and known_lengths(value) is None:
            self._shapes[value] = self.Shape(value)
        return self._shapes[value] if value in self._shapes else self.lengths(value, 0)

    def lengths(self, value: ir.Value, start: int, end: int | None = None) -> ir.Value:
        """The lengths of the axes start … end - 1, 1-D int64: a constant where they are known."""
        known = known_lengths(value, start, end)
        return self.Shape(value, start=start or None, end=end) if known is None else self.ints(known)

    def length(self, value: ir.Value, axis: int) -> ir.Value:
        """The length of one axis (negative counts from the end), a 1-D int64 tensor of one entry."""
        return self.lengths(value, axis, None if axis == -1 else axis + 1)

    def count(self, vector: ir.Value) -> ir.Value:
        """The number of entries of a 1-D tensor, 0-D int64.

        Size would do, but of a shape onnxruntime (1.32) infers the product of the lengths, and from it that of a Range.
        """
        return self.Squeeze(self.Shape(vector))

    def rank(self, value: ir.Value) -> ir.Value:
        """The number of axes, 0-D int64."""
        return self.count(self.Shape(value))

    def shape_s32(self, value: ir.Value) -> ir.Value:
        """The shape of a value as the int32 tensor that the domain's operators take."""
        return self.Cast(self.shape(value), to=ir.DataType.INT32)

    def zeros(self, shape: ir.Value, like: ir.Value) -> ir.Value:
        """Zeros of a given shape and of the type of `like`."""
        return self.filled(shape, 0, element_type(like))

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the type and shape of a value: a gradient of nothing. A sequence of them for a sequence."""
        if sequences.is_optional(value):
            value = sequences.held(self, value)
        return (
            sequences.zeros_like(self, value) if sequences.is_sequence(value) else self.zeros(self.shape(value), value)
        )

    def filled(self, shape: ir.Value, value: float, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A tensor of one value, of a given shape."""
        return self.ConstantOfShape(shape, value=ir.tensor(np.array([value]).astype(dtype.numpy())))

    def typed(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """The value, noted to have the type and shape of `like`."""
        value.type, value.shape = like.type, like.shape
        return value

    def like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """The value, noted to have the type and shape of `like`, of what it holds where that is an optional value."""
        value.type, value.shape = sequences.held_type(like), like.shape
        return value

    def choose(
        self, condition: ir.Value, likes: Sequence[ir.Value], *branches: "tuple[Builder, Sequence[ir.Value]]"
    ) -> list[ir.Value]:
        """If: values like the given ones, those of the first branch where the condition holds, else of the second.

        A branch is a builder that `inside` has made, and the values that it puts out, of its own or from outside.
        """
        graphs: dict[str, ir.Graph] = {}
        for name, (inner, values) in zip(("then", "else"), branches, strict=True):
            inner.prefix = f"{self.prefix}/{name}"
            outputs = [inner.like(inner.Identity(value), like) for value, like in zip(values, likes, strict=True)]
            graphs[f"{name}_branch"] = ir.Graph([], outputs, nodes=inner.nodes, name=inner.unique(inner.prefix))
        results = self.emit("If", [condition], graphs, outputs=len(likes))
        return [self.like(result, like) for result, like in zip(results, likes, strict=True)]

    def accumulate(self, values: Sequence[ir.Value]) -> ir.Value:
        """The sum of one or more gradients of the same value; what lookups scatter into zeros goes into the others.

        A tied embedding of n bytes then has one gradient of n bytes, and not four tensors of as many.
        """
        values = sorted(values, key=lambda value: _scattered(value) is not None)  # stable
        total = values[0]
        for value in values[1:]:
            if sequences.is_sequence(total):
                total = sequences.add(self, total, value)
            elif (into := _scattered(value)) is not None and value.dtype == total.dtype:
                attributes = {name: attribute.value for name, attribute in into.attributes.items()}
                (total,) = self.emit(into.op_type, [total, *into.inputs[1:]], attributes)
            else:
                total = self.Add(total, value)
        return total

    def unbroadcast(self, g: ir.Value, like: ir.Value, out: ir.Value) -> ir.Value:
        """Sum g over the axes along which `like` was broadcast to `out`; g has the shape of `out`.

        Decided here where the shapes are known (equal symbols are equal lengths), else at run time.
        """
        g, small, large = self.where_it_flows(g), dims(like), dims(out)
        if small is not None and large is not None and len(small) > len(large):
            raise ShapeError(
                f"{like.name!r} of rank {len(small)} does not broadcast to {out.name!r} of rank {len(large)}"
            )
        if small is None or large is None or (axes := broadcast_axes(small, large)) is None:
            return self._unbroadcast_at_run_time(g, like, out)
        leading = len(large) - len(small)
        if not axes:
            return g
        if not leading or len(axes) == leading:
            return sum_over(self, g, axes, large, keepdims=0 if leading else 1)
        return self.Reshape(sum_over(self, g, axes, large, keepdims=0), self.shape(like), allowzero=1)

    def where_it_flows(self, g: ir.Value) -> ir.Value:
        """`g`, of the shape of the gradient `imputed` where there is one, and 0 where that is 0; see `imputed`."""
        return g if self.imputed is None else self.Where(self.Equal(self.imputed, 0), 0, g)

    def _unbroadcast_at_run_time(self, g: ir.Value, like: ir.Value, out: ir.Value) -> ir.Value:
        small, large = self.shape(like), self.shape(out)
        missing = self.Sub(self.Shape(large), self.Shape(small))
        aligned = self.Concat(self.filled(missing, 1), small, axis=0)
        if g.dtype == ir.DataType.FLOAT and known_lengths(like) is not None:  # of a parameter: it may be a long sum
            wide = self.sum_stretched(self.Cast(g, to=ir.DataType.DOUBLE), aligned, large)
            return self.Reshape(self.Cast(wide, to=ir.DataType.FLOAT), small, allowzero=1)
        return self.Reshape(self.sum_stretched(g, aligned, large), small, allowzero=1)

    def sum_stretched(self, g: ir.Value, small: ir.Value, large: ir.Value) -> ir.Value:
        """Sum g over the axes of length 1 in the shape `small` and of another in `large`; they keep length 1."""
        stretched = self.And(self.Equal(small, 1), self.Not(self.Equal(large, 1)))
        axes = self.Squeeze(self.NonZero(stretched), [0])
        return self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)


def _attribute(name: str, value: Any) -> Any:
    """An attribute of the kinds that onnx_ir takes long to tell, by its protocols; others as they are."""
    if make := _ATTRIBUTES.get(type(value)):
        return make(name, value)
    if isinstance(value, list | tuple) and value and all(type(n) is int for n in value):
        return ir.AttrInt64s(name, value)
    return value


_ATTRIBUTES: dict[type, Callable[[str, Any], ir.Attr]] = {
    int: ir.AttrInt64,
    float: ir.AttrFloat32,
    str: ir.AttrString,
    ir.Tensor: ir.AttrTensor,
}


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


def _scattered(value: ir.Value) -> ir.Node | None:
    """The node that adds elements to zeros, where a value is made by one."""
    node = value.producer()
    if node is None or not is_standard(node, "ScatterElements") or node.inputs[0] is None:
        return None
    reduction, zeros = node.attributes.get("reduction"), node.inputs[0].producer()
    if reduction is None or reduction.as_string() != "add" or zeros is None or zeros.op_type != "ConstantOfShape":
        return None
    filled = zeros.attributes.get("value")
    return node if filled is None or not filled.as_tensor().numpy().any() else None


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
