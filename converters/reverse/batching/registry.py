"""The table of batching rules, and what a rule sees: a node of one row, and its inputs with all rows along axis 0.

A rule is `rule(op, node) -> a value with the rows along axis 0 for each output`; for one output the value alone will
do, and `Shared` of one that is the same for all rows. None: the rule does not serve this node.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.known import constant_value, dims, known_lengths


@dataclass(frozen=True)
class Shared:
    """A result that does not differ between rows."""

    value: ir.Value


Answer = ir.Value | Shared | Sequence[ir.Value] | None
BatchingRule = Callable[[Builder, "Rows"], Answer]
RULES: dict[tuple[str, str], BatchingRule] = {}


def batching(*op_types: str, domain: str = "") -> Callable[[BatchingRule], BatchingRule]:
    """Register the decorated function as the batching rule of some operators."""

    def register(function: BatchingRule) -> BatchingRule:
        RULES.update({(domain, op_type): function for op_type in op_types})
        return function

    return register


class Rows(Forward):
    """A node of one row: `input(i)` and `rank(i)` are those of a row, `value(i)` and `rows(i)` have all rows.

    length: how many rows there are, 1-D int64 of one entry. folded: values (n, d, …) that were made as (n · d, …), with
    these and the length d: between convolutions and what follows nothing keeps onnxruntime from fusing them.
    """

    def __init__(
        self,
        op: Builder,
        node: ir.Node,
        batched: Mapping[ir.Value, ir.Value],
        length: ir.Value,
        results: Collection[ir.Value],
        folded: dict[ir.Value, tuple[ir.Value, ir.Value]],
    ) -> None:
        super().__init__(node, set(), 0)
        self._op, self._batched, self.length, self._results = op, batched, length, results
        self.folded = folded

    @property
    def count(self) -> int:
        """How many inputs there are, absent ones among them."""
        return len(self.node.inputs)

    def is_batched(self, index: int) -> bool:
        """Whether an input differs between rows."""
        return self.optional(index) in self._batched

    def only(self, *indices: int) -> bool:
        """Whether no input but these differs between rows."""
        return all(n in indices or not self.is_batched(n) for n in range(self.count))

    def is_read(self, index: int) -> bool:
        """Whether anybody wants an output."""
        value = self.output(index)
        return bool(value.name) and (bool(value.uses()) or self.is_result(index))

    def is_result(self, index: int) -> bool:
        """Whether an output is asked for at the end."""
        return self.output(index) in self._results

    def value(self, index: int) -> ir.Value | None:
        """An input, with the rows along axis 0 where it differs between them."""
        value = self.optional(index)
        return value if value is None else self._batched.get(value, value)

    def values(self) -> list[ir.Value | None]:
        return [self.value(n) for n in range(self.count)]

    def rows(self, index: int) -> ir.Value:
        """An input with the rows along axis 0, equal ones where it is the same for all of them."""
        value = self.input(index)
        return self._batched[value] if value in self._batched else repeated(self._op, value, self.length)

    def static_rank(self, index: int) -> int | None:
        """The rank of one row of an input, None where it is unknown."""
        value = self.optional(index)
        shape = None if value is None else dims(value)
        return None if shape is None else len(shape)

    def lengths(self, index: int, start: int, end: int | None = None) -> ir.Value:
        """The lengths of axes of one row of an input."""
        known = known_lengths(self.input(index), start, end)
        if known is not None:
            return self._op.ints(known)
        if not self.is_batched(index):
            return self._op.lengths(self.input(index), start, end)
        if (start, end) == (0, 1) and self._batched[self.input(index)] in self.folded:
            return self.folded[self._batched[self.input(index)]][1]  # so that nobody reads what is not folded
        return self._op.Shape(self.value(index), start=start + 1, end=None if end is None else end + 1)

    def again(self, inputs: Sequence[Any], **changed: Any) -> list[ir.Value]:
        """The same operator of other inputs, with some attributes changed; None takes one away."""
        attributes = {
            name: attribute.value for name, attribute in self.node.attributes.items() if attribute.value != []
        }
        outputs = len(self.node.outputs)
        results = self._op.emit(self.op_type, inputs, attributes | changed, outputs=outputs, domain=self.node.domain)
        if (node := results[0].producer()) is not None:  # which says of torch's operation how ties are differentiated
            node.metadata_props.update(self.node.metadata_props)
        for value, row in zip(results, self.node.outputs, strict=True):
            if row.dtype is not None:
                value.dtype = row.dtype
            if not row.name:
                value.name = ""
        return list(results)


def in_shape(op: Builder, value: ir.Value, length: ir.Value, *lengths: ir.Value) -> ir.Value:
    """Rows of a shape that is given in parts: the length 0 in front keeps their number where no other one is 0."""
    shape = op.joined(*lengths) if lengths else op.ints([])
    known = constant_value(shape)
    if known is not None and known.all():
        return op.Reshape(value, op.ints([0, *known.tolist()]))
    return op.Reshape(value, op.joined(length, shape), allowzero=1)


def product(op: Builder, lengths: ir.Value) -> ir.Value:
    """Of lengths, 1-D of one entry."""
    known = constant_value(lengths)
    return op.ReduceProd(lengths, keepdims=1) if known is None else op.ints([int(known.prod())])


def repeated(op: Builder, value: ir.Value, length: ir.Value) -> ir.Value:
    """The same value for every row, along a new axis 0."""
    return op.Expand(value, length if known_lengths(value) == [] else op.joined(length, op.shape(value)))


def shifted(op: Builder, axes: ir.Value) -> ir.Value:
    """Axes of a row as those of all rows; negative ones count from the end of both."""
    known = constant_value(axes)
    if known is not None:
        return op.constant(np.where(known < 0, known, known + 1).astype(known.dtype))
    return op.Where(op.Less(axes, 0), axes, op.Add(axes, 1))


def shift(axis: int) -> int:
    """`shifted` of a number."""
    return axis if axis < 0 else axis + 1
