"""Writing a function body in standard ONNX operators: `b.Mul(x, y)` appends a node and returns its output.

A body is written for one node: its attributes are known, and of its inputs' shapes what inference found. What is known
becomes constants, the rest is computed when the model runs. The arithmetic is float32 whatever the tensors' type; it
is cast once on the way in and once on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from onnx import GraphProto, NodeProto, helper

from onnx_backprop.opset.core.shapes import Dim, Dims
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.order import ancestors

if TYPE_CHECKING:
    from onnx_backprop.opset.bodies.expressions import Vector

FLOAT, INT64, BOOL, DOUBLE = 1, 7, 9, 11  # of TensorProto
# A length factor that no two lengths can make up for: `checked` asks for a shape of too many elements with it
MISMATCH = 7919


@dataclass(frozen=True)
class Tensor:
    """A tensor inside a body: the name it has there and what is known of it.

    `dims` is None when the rank is unknown. `value` is what an input that carries a shape, or constants, holds.
    """

    name: str
    dims: Dims | None = None
    value: tuple[Any, ...] | None = None

    @property
    def rank(self) -> int:
        assert self.dims is not None, f"the rank of {self.name} is known here"
        return len(self.dims)


Operand = Tensor | str | None


class Body(Emitter):
    """Collects the nodes of one function body. Every method returns the name of a tensor.

    A keyword that is None is left out; an input that is None is an absent optional one; a keyword `name` names the
    node, which is what onnxruntime shows when the node fails.
    """

    def __init__(self, op: str) -> None:
        super().__init__("", set())
        self.op = op
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counts: dict[str, int] = {}
        self._tensor_count = 0

    def operand(self, value: Operand, _operands: Sequence[Operand]) -> str:
        """The name of an operand."""
        return value.name if isinstance(value, Tensor) else value or ""

    def names_of(self, op_type: str, name: str | None, outputs: int) -> tuple[str, list[str]]:  # noqa: ARG002
        """Numbers, but for a node that is named."""
        results = [f"_{self._tensor_count + n}" for n in range(1, outputs + 1)]
        self._tensor_count += outputs
        return (self._unique(name) if name else results[0]), results

    def _unique(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name} {count}"

    def needed(self, *outputs: str) -> list[NodeProto]:
        """The nodes that outputs depend on, in order."""
        return [self.nodes[n] for n in ancestors(self.nodes, outputs)]

    def constant(self, value: ArrayLike, dtype: type[np.generic] | None = None) -> str:
        """A constant tensor; equal ones share a node."""
        array = np.asarray(value, dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            if array.dtype == np.int64 and array.ndim == 1 and array.size:  # half the bytes of a tensor, and legible
                self._constants[key] = self.Constant(value_ints=array.tolist())
            else:
                self._constants[key] = super().constant(array)
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> str:
        """A 1-D int64 constant."""
        return self.constant(np.array(values, np.int64))

    def int_scalar(self, value: int) -> str:
        """A 0-D int64 constant."""
        return self.constant(np.array(value, np.int64))

    def float_scalar(self, value: float) -> str:
        """A 0-D float32 constant."""
        return self.constant(np.array(value, np.float32))

    def lengths(self, x: Tensor, start: int, end: int | None) -> str:
        """The lengths of the axes start … end - 1 of x, 1-D int64: a constant where they are known."""
        if x.dims is not None and (entries := known(x.dims[start:end])) is not None:
            return self.ints(entries)
        return self.Shape(x, start=start, end=end)

    def checked(self, x: Tensor, expected: Vector, message: str) -> Tensor:
        """X, proven to have the shape `expected`.

        Where that is not known beforehand, a run with another shape fails in a Reshape whose name is "<operator>:
        <message>", which onnxruntime reports together with both shapes (expected with a factor 7919 at its end).
        """
        if x.dims is not None and x.dims == expected.known:
            return x
        shape = self.Shape(x) if x.dims is not None else self.entries(self.Shape(x), expected.count, message)
        same = self.ReduceMin(self.Cast(self.Equal(shape, expected.name), to=INT64), keepdims=1)
        factor = self.Sub(self.ints([MISMATCH]), self.Mul(same, self.ints([MISMATCH - 1])))
        # an entry of 0 or below would let an empty tensor through
        wanted = self.Where(self.Cast(same, to=BOOL), expected.name, self.Max(expected.name, self.ints([1])))
        named = self.Reshape(x, self.Concat(wanted, factor, axis=0), allowzero=1, name=f"{self.op}: {message}")
        return Tensor(self.Reshape(named, expected.name, allowzero=1), expected.dims)

    def entries(self, values: str, count: int, message: str) -> str:
        """Values, proven to be 1-D with `count` entries; a run with another number of them fails, as above."""
        return self.Reshape(values, self.ints([count]), name=f"{self.op}: {message}")

    def require(self, condition: str, message: str) -> str:
        """0 (1-D int64, one entry); a run where a condition (bool, any shape) does not hold everywhere fails.

        It fails in a Gather whose name is "<operator>: <message>". Add the 0 to a shape that the result depends on,
        or the check is not run.
        """
        bad = self.ReduceMax(self.Cast(self.Not(condition), to=INT64), keepdims=0)
        return self.Gather(self.ints([0]), self.Reshape(bad, self.ints([1])), name=f"{self.op}: {message}")

    def choose(self, condition: str, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """What `then` writes where the condition (bool, one entry) holds, else what `otherwise` writes: float32.

        Only the one of the two that is needed runs. What one has written cannot be read outside of it.
        """
        return self.If(condition, then_branch=self._branch(then), else_branch=self._branch(otherwise))

    def _branch(self, write: Callable[[], str]) -> GraphProto:
        outside = self.nodes, self._constants
        self.nodes, self._constants = [], dict(self._constants)
        result = write()
        nodes = self.needed(result)
        self.nodes, self._constants = outside
        output = helper.make_tensor_value_info(result, FLOAT, None)
        return helper.make_graph(nodes, "branch", [], [output])


def known(dims: Sequence[Dim]) -> tuple[int, ...] | None:
    """The dimensions as integers when all of them are, else None."""
    result = tuple(d for d in dims if isinstance(d, int))
    return result if len(result) == len(dims) else None
