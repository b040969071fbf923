"""What the bodies of attention and of its gradient have in common: lengths, their proofs, and the scores."""

from collections.abc import Mapping
from functools import reduce
from operator import add

from onnx_backprop.opset.bodies.builder import FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector, join
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.attention import AXES, BOTTOM_RIGHT, MEANINGS, scale_of, window

NEVER = float("-inf")  # the score of a key that is not seen


class Scores:
    """Scores (B, H, S, T), of inputs whose lengths a run proves to agree: `zero` is there then, and is part of results.

    scale: of products; bent: tanh(s / softcap), "" without softcap; sink: (1, H, 1, 1), "" without.
    """

    def __init__(self, b: Body, attrs: Attributes, given: Mapping[str, Tensor | None]) -> None:
        self.b = b
        self.lengths: dict[str, Vector] = {}
        self._symbols: dict[str, object] = {}
        zeros = [zero for name in AXES if (x := given.get(name)) is not None for zero in self._agree(name, x)]
        heads, shared, keys = (self.lengths[letter] for letter in "HGT")
        zeros.append((heads % shared.at_least(1)).equal(0).require("query: expected a multiple of the heads of key"))
        zeros += [
            (n >= 1).require(f"key: expected one {what} or more") for n, what in ((shared, "head"), (keys, "key"))
        ]
        bias = given.get("bias")
        if bias is not None:
            whole, bias_shape = self.of("BHST"), self._shape("bias", bias, 4)
            fits = bias_shape.equal(whole) | bias_shape.equal(1)
            zeros.append(fits.require("bias: expected each length to be that of the scores or 1"))
        self.zero: Vector = reduce(add, zeros)
        self.group: Vector = heads // shared.at_least(1)
        query, key, sinks = (given.get(name) for name in ("query", "key", "sinks"))
        assert query is not None
        assert key is not None
        size, cap = self.lengths["D"], attrs["softcap"]
        if attrs["scale"] or size.value is not None:
            self.scale = b.float_scalar(scale_of(attrs, size.value or 1))
        else:
            self.scale = b.Reciprocal(b.Sqrt(b.Cast(size.at_least(1).name, to=FLOAT)))
        if size.value is None:  # before the product: an Einsum over nothing ends the process
            columns = (size >= 1).require("query: expected one column or more")
            self.scale = b.Add(self.scale, b.Cast(columns.name, to=FLOAT))
        products = self.product("bgsd,bgtd->bgst", b.Mul(self.grouped(query.name, "D"), self.scale), key.name)
        products, self.bent = self.ungrouped(products, "T"), ""
        if cap > 0:
            self.bent = b.Tanh(b.Div(products, b.float_scalar(cap)))
            products = b.Mul(self.bent, b.float_scalar(cap))
        products = b.Add(products, bias) if bias else products
        hidden = self._hidden(attrs, given.get("lengths"), given.get("offsets"))
        self.scores = b.Where(hidden, b.float_scalar(NEVER), products) if hidden else products
        self.sink = b.Reshape(sinks, b.ints([1, -1, 1, 1])) if sinks else ""

    def _shape(self, name: str, x: Tensor, rank: int) -> Vector:
        entries = [d if isinstance(d, int) else None for d in x.dims or (None,) * rank]
        if None not in entries:
            return Vector(self.b, entries)
        shape = self.b.Shape(x)
        return Vector(
            self.b, entries, shape if x.dims else self.b.entries(shape, rank, f"{name}: expected rank {rank}")
        )

    def _agree(self, name: str, x: Tensor) -> list[Vector]:
        """Proofs that the lengths of an input are those of the inputs before it."""
        shape, proofs = self._shape(name, x, len(AXES[name])), []
        for axis, letter in enumerate(AXES[name]):
            length, symbol = shape[axis], x.dims[axis] if x.dims else None
            before = self.lengths.get(letter)
            if before is None:
                self.lengths[letter], self._symbols[letter] = length, symbol
            elif symbol is None or symbol != self._symbols[letter]:
                proofs.append(before.equal(length).require(f"{MEANINGS[letter]} of {name} and the others must agree"))
                self.lengths[letter] = before if before.known else length
        return proofs

    def _hidden(self, attrs: Attributes, lengths: Tensor | None, offsets: Tensor | None) -> str:
        """Which keys are not seen, of a shape that broadcasts to the scores'; "" where all are."""
        b, (left, right) = self.b, window(attrs)
        queries, keys = self.lengths["S"], self.lengths["T"]
        if lengths is None and left < 0 and right < 0:
            return ""
        key = b.Range(b.int_scalar(0), keys.scalar, b.int_scalar(1))
        count, out = keys.name, []
        if lengths is not None:
            clipped = b.Min(b.Max(b.Cast(lengths, to=INT64), b.ints([0])), keys.name)
            count = b.Reshape(clipped, b.ints([-1, 1, 1, 1]))
            out.append(b.GreaterOrEqual(key, count))
        if left >= 0 or right >= 0:
            query = b.Range(b.int_scalar(0), queries.scalar, b.int_scalar(1))
            query = b.Reshape(query, b.ints([-1, 1]))  # onnx takes what Unsqueeze makes for a shape
            if offsets is not None:
                query = b.Add(query, b.Reshape(b.Cast(offsets, to=INT64), b.ints([-1, 1, 1, 1])))
            elif attrs["diagonal_alignment"] == BOTTOM_RIGHT:
                query = b.Add(query, b.Sub(count, queries.name))
            ahead = b.Sub(key, query)
            out += [b.Greater(ahead, b.ints([right]))] if right >= 0 else []
            out += [b.Less(ahead, b.ints([-left]))] if left >= 0 else []
        return reduce(b.Or, out)

    def of(self, letters: str) -> Vector:
        """A shape."""
        return join(self.b, *(self.lengths[letter] for letter in letters))

    def shaped(self, x: str, letters: str) -> str:
        """A result, which depends on the proofs."""
        return self.b.Reshape(x, (self.of(letters) + self.zero).name, allowzero=1)

    def grouped(self, x: str, last: str) -> str:
        """(B, H, S, n) -> (B, G, H / G · S, n): rows that read the same keys, one behind the other."""
        if self.group.value == 1:
            return x
        rows = self.group * self.lengths["S"]
        shape = join(self.b, self.lengths["B"], self.lengths["G"], rows, self.lengths[last])
        return self.b.Reshape(x, shape.name, allowzero=1)

    def ungrouped(self, x: str, last: str) -> str:
        """The other way round."""
        return x if self.group.value == 1 else self.b.Reshape(x, self.of("BHS" + last).name, allowzero=1)

    def product(self, equation: str, x: str, y: str) -> str:
        """An Einsum: into MatMul onnxruntime fuses others, for some element types alone, with other bits."""
        return self.b.Einsum(x, y, equation=equation)
