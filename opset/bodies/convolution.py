"""The convolution operators in standard ONNX operators: geometry at run time, and the three products.

Where a length is known it becomes a constant; where it is not, pads and expected shapes are computed when the model
runs, and a tensor of another shape fails the run. Everything here is NCX and (D, S/g, k…), as in `maths.convolution`.

    forward           Conv
    backward data     Conv with the kernel flipped for strides of 1 and many channels, else ConvTranspose
    backward weights  matrix products over all pixels (`bodies.convolution_weights`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import lt
from typing import Any

from onnx_backprop.opset.bodies.builder import INT64, Body, Tensor, known
from onnx_backprop.opset.bodies.expressions import Vector, join, shape
from onnx_backprop.opset.core.layout import data_to_ncx, inverse
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths import convolution as maths

END = 2**63 - 1
# Of more kernel positions one tensor each is too many
MANY_CELLS = 64
# With no more channels of dx, and twice as many of dy, a ConvTranspose, which multiplies before it adds up, is faster
# than a Conv, which copies all that a pixel meets for a product of so few rows
FEW_CHANNELS = 8
# What leaving them out says in a Conv and a ConvTranspose, along every axis
_UNSTATED = {"strides": 1, "dilations": 1, "group": 1, "pads": 0, "output_padding": 0}


@dataclass(frozen=True)
class CorrelationLengths:
    """Lengths and attributes of one correlation from source (N, S, in…) to destination (N, D, out…).

    `extent` is EK = (K-1)·D + 1; `destination` is -1 where the kernel does not fit, which no tensor has.
    """

    b: Body
    attrs: Attributes
    batch: Vector
    source_channels: Vector
    source: Vector
    destination_channels: Vector
    kernel: Vector
    begin: Vector
    end: Vector
    extent: Vector
    destination: Vector

    @property
    def axes(self) -> int:
        return len(self.attrs["strides"])

    @property
    def groups(self) -> int:
        return self.attrs["groups"]

    @property
    def strides(self) -> Vector:
        return Vector(self.b, self.attrs["strides"])


def correlation(
    b: Body,
    attrs: Attributes,
    source: Vector,
    weights: Vector,
    *,
    transposed: bool = False,
    short: Vector | None = None,
    pads: tuple[Vector, Vector] | None = None,
) -> CorrelationLengths:
    """From the full shapes of source (N, S, in…) and weights (D, S/g, k…).

    `transposed`: the operator is a gradient of a transposed convolution, `short` the lengths of that one's input.
    `pads`: those before and behind, where the attributes do not say them.
    """
    lengths, kernel, strides = source[2:], weights[2:], Vector(b, attrs["strides"])
    extent: Vector = maths.extent(kernel, Vector(b, attrs["dilations"]))
    if pads is None and transposed:
        pads = conv_transpose_pads(b, attrs, lengths, extent, short)
    elif pads is None:
        pads = conv_pads(b, attrs, lengths, extent)
    out = _out(lengths, sum(pads, Vector(b, [0])), extent, strides)
    return CorrelationLengths(b, attrs, source[0], source[1], lengths, weights[0], kernel, *pads, extent, out)


def ranked(b: Body, attrs: Attributes, x: Tensor, name: str) -> Tensor:
    """A tensor of the rank that the strides tell; a run with another one fails."""
    if x.dims is not None:
        return x
    rank = len(attrs["strides"]) + 2
    shape = b.entries(b.Shape(x), rank, f"expected {name} of rank {rank}")
    return Tensor(b.Reshape(x, shape, allowzero=1), (None,) * rank)


def _out(source: Vector, pads: Vector, extents: Vector, strides: Vector) -> Vector:
    out = (source + pads - extents) // strides + 1
    return out.at_least(0).equal(0).where(-1, out)


def conv_pads(b: Body, attrs: Attributes, source: Vector, extents: Vector) -> tuple[Vector, Vector]:
    """The pads of a convolution, as `maths.convolution.conv_same_pads` finds them."""
    return _stated_pads(b, attrs) or _split(attrs, _conv_total(b, attrs, source, extents))


def conv_transpose_pads(
    b: Body, attrs: Attributes, source: Vector, extents: Vector, short: Vector | None
) -> tuple[Vector, Vector]:
    """The pads of a transposed convolution's gradients, as `conv_transpose_backward_same_pads` there finds them.

    `source` are the lengths of its output, `short` those of its input where something states them.
    """
    stated = _stated_pads(b, attrs)
    if stated is not None:
        return stated
    strides = Vector(b, attrs["strides"])
    forward_rule = (extents - strides).at_least(0)
    if attrs["output_padding"] is not None:
        return _split(attrs, forward_rule)
    conv_rule = _conv_total(b, attrs, source, extents)
    if short is None:
        return _split(attrs, conv_rule)
    leads_there = _out(source, forward_rule, extents, strides).equal(short)
    return _split(attrs, leads_there.where(forward_rule, conv_rule))


def _stated_pads(b: Body, attrs: Attributes) -> tuple[Vector, Vector] | None:
    stated = [maths.stated_pads(attrs, axis) for axis in range(len(attrs["strides"]))]
    pairs = [pads for pads in stated if pads is not None]
    return (Vector(b, [p for p, _ in pairs]), Vector(b, [p for _, p in pairs])) if pairs else None


def _conv_total(b: Body, attrs: Attributes, source: Vector, extents: Vector) -> Vector:
    return maths.same_excess(source, extents, Vector(b, attrs["strides"])).at_least(0)


def _split(attrs: Attributes, total: Vector) -> tuple[Vector, Vector]:
    return maths.split_pads(total, upper=attrs["auto_pad"] == "SAME_UPPER")


def ncx(b: Body, attrs: Attributes, x: Tensor) -> Tensor:
    """Data in NCX order."""
    return transpose(b, x, data_to_ncx(attrs["data_format"], len(attrs["strides"]) + 2))


def from_ncx(b: Body, attrs: Attributes, x: str) -> str:
    """Data from NCX into data_format order."""
    return transpose(b, Tensor(x), inverse(data_to_ncx(attrs["data_format"], len(attrs["strides"]) + 2))).name


def transpose(b: Body, x: Tensor, order: Sequence[int]) -> Tensor:
    """Another axis order; no node where it is the same."""
    if tuple(order) == tuple(range(len(order))):
        return Tensor(x.name, x.dims if x.dims is not None else (None,) * len(order))
    dims = (None,) * len(order) if x.dims is None else tuple(x.dims[i] for i in order)
    return Tensor(b.Transpose(x, perm=list(order)), dims)


def stated(b: Body, attrs: Attributes, name: str, given: Tensor | None, order: Sequence[int]) -> Vector:
    """The shape that an input or, without it, an attribute states, its entries put into another order."""
    if given is None:
        return Vector(b, attrs[name])[order]
    count = len(order)
    entries = [v if isinstance(v, int) else None for v in given.value or (None,) * count]
    stated = b.entries(b.Cast(given, to=INT64), count, f"input {name}: expected {count} entries")
    return Vector(b, entries, stated)[order]


def checked_destination(c: CorrelationLengths, y: Tensor, zero: Vector, message: str) -> Tensor:
    """The destination, proven to have the shape that source, weights and attributes lead to."""
    wanted = join(c.b, c.batch + zero, c.destination_channels, c.destination)
    assert y.dims is not None
    known = tuple(b if b is not None else a for a, b in zip(y.dims, wanted.dims, strict=True))
    return Tensor(c.b.checked(y, wanted, message).name, known)


def conditions(c: CorrelationLengths, per_group: Vector, names: tuple[str, str, str]) -> Vector:
    """0, computed by a run in which channels, groups, kernel and output_padding agree; another run fails.

    `names` are the operator's names of source, destination and weights. What is known already has been checked.
    """
    source, destination, weights = names
    zero = c.source_channels.equal(per_group * c.groups).require(
        f"expected as many channels of {source} as groups ({c.groups}) x channels per group of {weights}"
    )
    message = f"expected channels of {destination} to be a multiple of groups ({c.groups})"
    zero += (c.destination_channels % c.groups).equal(0).require(message)
    zero += (c.source > -1).require(f"expected lengths of {source} >= 0")
    zero += (c.kernel > 0).require(f"expected kernel lengths of {weights} >= 1")
    zero += (c.destination > 0).require(f"expected a kernel that fits the padded {source}")
    padding = c.attrs.get("output_padding")
    if padding is not None and (any(padding) or c.attrs.op.startswith("ConvTranspose")):
        natural = (c.destination - 1) * c.strides + c.extent - c.begin - c.end
        fits = c.source.equal(natural + Vector(c.b, padding))
        zero += fits.require(f"output_padding {list(padding)} does not fit the lengths")
    return zero


def guarded(c: CorrelationLengths, x: Tensor, zero: Vector) -> Tensor:
    """The tensor, after the conditions."""
    if zero.known is not None:
        return x
    return Tensor(c.b.Reshape(x, (shape(c.b, x) + zero).name, allowzero=1), x.dims)


def forward(c: CorrelationLengths, x: Tensor, w: Tensor, bias: Tensor | None = None) -> str:
    """Correlation: x (N, S, in…), w (D, S/g, k…), and a bias (D,) -> (N, D, out…)."""

    def convolution() -> str:
        pads, data = _pads(c, x, c.begin, c.end)
        inputs = (data, w) if bias is None else (data, w, bias)
        return c.b.Conv(*inputs, **_written(c, pads=pads, strides=c.attrs["strides"]))

    def constant() -> str:
        value = c.b.float_scalar(0)
        if bias is not None:
            value = c.b.Reshape(bias, c.b.ints([-1, *[1] * c.axes]), allowzero=0)
        return c.b.Expand(value, join(c.b, c.batch, c.destination_channels, c.destination).name)

    return _unless_empty(c, c.source_channels, convolution, constant)


def _written(c: CorrelationLengths, **attributes: Sequence[int] | None) -> dict[str, Any]:
    """These attributes of a convolution, its groups and dilations, but those that say what leaving them out says."""
    given = {"group": (c.groups,), "dilations": c.attrs["dilations"], **attributes}
    kept = {name: numbers for name, numbers in given.items() if numbers and set(numbers) != {_UNSTATED[name]}}
    return kept | {"group": c.groups} if "group" in kept else kept


def backward_data(c: CorrelationLengths, dy: Tensor, w: Tensor) -> str:
    """Adjoint wrt the source: dy (N, D, out…), w (D, S/g, k…) -> (N, S, in…)."""
    # a source all of whose pixels are padding has none; onnxruntime makes no such tensor by convolution
    dense = all(s == 1 for s in c.attrs["strides"])
    write = _flipped_convolution if dense else transposed_convolution
    if dense and c.groups == 1 and c.kernel.known != (1,) * c.axes:
        s, d = c.source_channels.value, c.destination_channels.value
        if s is not None and d is not None and s <= FEW_CHANNELS and 2 * s <= d:
            write = transposed_convolution
        elif c.axes == 3 and c.kernel[0].known:
            write = _convolution_of_planes

    def zeros() -> str:
        return c.b.Expand(c.b.float_scalar(0), join(c.b, c.batch, c.source_channels, c.source).name)

    needed = join(c.b, c.source, c.destination_channels) if dense else c.source
    return _unless_empty(c, needed, lambda: write(c, dy, w), zeros)


def _unless_empty(
    c: CorrelationLengths, lengths: Vector, write: Callable[[], str], otherwise: Callable[[], str]
) -> str:
    """What `write` writes if no length is 0: without channels to sum over, onnxruntime's padded Conv never ends."""
    if lengths.known is not None:
        return otherwise() if 0 in lengths.known else write()
    return c.b.choose((lengths.product() > 0).name, write, otherwise)


def _flipped_convolution(c: CorrelationLengths, dy: Tensor, w: Tensor) -> str:
    """For strides of 1: dx[i] = Σ_k dy[i + P - k·D] · w[k], a convolution of dy with the kernel flipped."""
    pads, dy = _pads(c, dy, c.extent - 1 - c.begin, c.extent - 1 - c.end)
    return c.b.Conv(dy, _flipped(c, w), **_written(c, pads=pads))


def _convolution_of_planes(c: CorrelationLengths, dy: Tensor, w: Tensor) -> str:
    """The same in three dimensions, for which onnxruntime's Conv is slow: of planes, for all cells of the first axis.

    dx[i] = Σ_a (dy[i + P - a·D] ∗ flipped w[a]), the sum being one of shifted results.
    """
    b, out, cells = c.b, destination_lengths(c, dy), c.kernel.entries[0]
    assert isinstance(cells, int)
    planes = b.Reshape(
        b.Transpose(dy, perm=[0, 2, 1, 3, 4]),
        join(b, c.batch * out[0], c.destination_channels, out[1:]).name,
        allowzero=1,
    )
    pads, data = _pads(c, Tensor(planes), (c.extent - 1 - c.begin)[1:], (c.extent - 1 - c.end)[1:])
    kernel = b.Transpose(_reversed(c, w, [3, 4]), perm=[2, 1, 0, 3, 4])
    shape = join(b, c.source_channels * cells, c.destination_channels, c.kernel[1:])
    y = b.Conv(data, b.Reshape(kernel, shape.name, allowzero=1), dilations=c.attrs["dilations"][1:], pads=pads)
    rest = join(b, c.source_channels, c.source[1:]).product()
    y = b.Reshape(y, join(b, 1, c.batch, out[0], cells, rest).name, allowzero=1)
    parts = b.emit("Split", [y], {"axis": 3, "num_outputs": cells}, outputs=cells) if cells > 1 else [y]
    before, after = (join(b, lengths, 1, rest) for lengths in (out[0], c.source[0]))
    shifts = (join(b, c.begin[0] * -1 + cell * c.attrs["dilations"][0], 0, 0) for cell in range(cells))
    moved = [framed(c, Tensor(part), shift, before, after) for part, shift in zip(parts, shifts, strict=True)]
    dx = b.Reshape(b.Sum(*moved), join(b, c.batch, c.source[0], c.source_channels, c.source[1:]).name, allowzero=1)
    return b.Transpose(dx, perm=[0, 2, 1, 3, 4])


def transposed_convolution(c: CorrelationLengths, dy: Tensor, w: Tensor) -> str:
    """The adjoint as a ConvTranspose, for any strides."""
    # every pixel that dy reaches: P are cut off before it, and behind it whatever is too much or missing
    reached = (destination_lengths(c, dy) - 1) * c.strides + c.extent
    behind = c.source + c.begin - reached
    rest, within = behind.known, (c.extent - c.begin).known
    if rest is not None and c.begin.known is not None and all(map(lt, rest, c.attrs["strides"])):
        pads = [*c.begin.known, *(max(-r, 0) for r in rest)]
        missing = [max(r, 0) for r in rest]
        return c.b.ConvTranspose(dy, w, **_written(c, pads=pads, strides=c.attrs["strides"], output_padding=missing))
    full = Tensor(c.b.ConvTranspose(dy, w, **_written(c, strides=c.attrs["strides"])))
    if within is not None and min(within) > 0:
        return padded(c, full, c.begin * -1, behind).name
    return framed(c, full, c.begin * -1, reached, c.source).name


def _flipped(c: CorrelationLengths, w: Tensor) -> str:
    """The kernel flipped: (D, S/g, k…) -> (S, D/g, k…) with every spatial axis reversed."""
    b, axes = c.b, list(range(2, c.axes + 2))
    name = _reversed(c, w, axes)
    if c.groups == 1:
        return b.Transpose(name, perm=[1, 0, *axes])
    d, s = c.destination_channels // c.groups, c.source_channels // c.groups
    split = b.Reshape(name, join(b, Vector(b, [c.groups]), d, s, c.kernel).name, allowzero=1)
    swapped = b.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in axes)])
    return b.Reshape(swapped, join(b, s * c.groups, d, c.kernel).name, allowzero=1)


def _reversed(c: CorrelationLengths, w: Tensor, axes: Sequence[int]) -> str:
    """The kernel with some of its axes, the last ones, reversed."""
    b, kernel = c.b, [c.kernel.entries[axis - 2] for axis in axes]
    cells = known(kernel)
    if cells is None or prod(cells) > MANY_CELLS:
        minus = b.ints([-1] * len(axes))
        return b.Slice(w, minus, b.ints([-END] * len(axes)), b.ints(axes), minus)
    if prod(cells) == 1:
        return w.name
    # a Slice with a step copies numbers one by one, more slowly than Split and Concat do
    merged = b.Reshape(w, b.ints([0] * axes[0] + [prod(cells)]))
    parts = b.emit("Split", [merged], {"axis": -1, "num_outputs": prod(cells)}, outputs=prod(cells))
    return b.Reshape(b.Concat(*reversed(parts), axis=-1), b.ints([0] * axes[0] + list(cells)))


def destination_lengths(c: CorrelationLengths, y: Tensor) -> Vector:
    """The destination's spatial lengths, as far as known from the tensor."""
    assert y.dims is not None
    return c.destination.knowing([d if isinstance(d, int) else None for d in y.dims[2:]])


def _pads(c: CorrelationLengths, x: Tensor, begin: Vector, end: Vector) -> tuple[list[int] | None, Tensor]:
    """Zeros around the spatial axes: as an attribute of the next node where that can be, else as a node."""
    if begin.known is not None and end.known is not None and min(*begin.known, *end.known) >= 0:
        return [*begin.known, *end.known], x
    return None, padded(c, x, begin, end)


def padded(c: CorrelationLengths, x: Tensor, begin: Vector, end: Vector) -> Tensor:
    """Zeros before and behind the spatial axes; negative numbers cut."""
    none = Vector(c.b, [0, 0])
    # pads for all axes: onnxruntime's optimizer forgets the axes input when it moves a Transpose past a Pad
    pads = join(c.b, none, begin, none, end)
    if pads.known is not None and not any(pads.known):
        return x
    return Tensor(c.b.Pad(x, pads.name))


def framed(c: CorrelationLengths, x: Tensor, begin: Vector, source: Vector, lengths: Vector) -> Tensor:
    """These lengths of the spatial axes, of lengths `source`, from `begin` pixels before them on; zeros outside."""
    end = lengths - source - begin
    known = (begin + source).known, (end + source).known
    if all(rest is not None and min(rest) > 0 for rest in known):
        return padded(c, x, begin, end)
    # a Pad that cuts off all there is leaves some of it in onnxruntime before 1.24
    wider = padded(c, x, begin.at_least(0), end.at_least(0))
    return padded(c, wider, begin.at_most(0), end.at_most(0))
