"""The body of InterpolateBackward and InterpolateBackprop: what a run must prove, then one matrix per spatial axis."""

from __future__ import annotations

from onnx_backprop.opset.bodies.builder import DOUBLE, INT64, Body, Tensor
from onnx_backprop.opset.bodies.interpolation.forms import Axis
from onnx_backprop.opset.bodies.interpolation.lengths import Length, guarded, join, lengths_of, positive_or_empty, split
from onnx_backprop.opset.bodies.interpolation.taps import SpecRule
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.core.shapes import merge
from onnx_backprop.opset.maths.convolution import MAX_RANK, MIN_RANK

INT64_MAX = 2**63 - 1


def body(
    b: Body, attrs: Attributes, names: tuple[str, str], src: Tensor, diff_dst: Tensor, sizes: Tensor | None
) -> str:
    """Dx of the shape of src; `names` are those of the two tensors."""
    rank = _rank(attrs, src, diff_dst, sizes)
    if rank is None:
        return _of_any_rank(b, attrs, names, src, diff_dst, sizes)
    first = 2 if attrs["data_format"] == "NCX" else 1
    spatial = range(first, first + rank - 2)
    source = lengths_of(b, src, rank, f"expected {names[0]} of rank {rank}")
    out = lengths_of(b, diff_dst, rank, f"expected {names[1]} of rank {rank}")
    stated = None if sizes is None else _sizes(b, attrs, sizes, rank - 2)
    expected = [stated[k - first] if stated and k in spatial else source[k] for k in range(rank)]
    for k in spatial:
        known = None
        for says in (out[k], attrs["sizes"] and attrs["sizes"][k - first], stated and stated[k - first]):
            known = merge(known, says if isinstance(says, int) else None, op=attrs.op, what="sizes")
        if stated is None:
            expected[k] = out[k] if known is None else known
        out[k] = expected[k] if known is None else known
    others = [k for k in range(rank) if k not in spatial]
    for k in others:
        out[k] = source[k] if isinstance(source[k], int) else out[k]
    dy = b.checked(
        diff_dst,
        join(b, expected),
        tuple(length if isinstance(length, int) else None for length in expected),
        f"expected {names[1]} with the batch and channels of {names[0]} and the spatial shape that sizes says",
    )
    zero = _scales_check(b, attrs, [source[k] for k in spatial], [out[k] for k in spatial], names[1])
    sized = positive_or_empty(
        b, [source[k] for k in spatial], [out[k] for k in spatial], f"expected {names[0]} with spatial lengths >= 1"
    )
    for k, length in zip(spatial, sized, strict=True):
        source[k] = length
    return transpose(b, dy, out, _axes(attrs, source, spatial), guarded(b, join(b, source), zero))


def _rank(attrs: Attributes, src: Tensor, diff_dst: Tensor, sizes: Tensor | None) -> int | None:
    for x in (src, diff_dst):
        if x.dims is not None:
            return len(x.dims)
    for given in (attrs["sizes"], attrs["scales"], sizes and sizes.value):
        if given is not None:
            return len(given) + 2
    count = sizes.dims[0] if sizes is not None and sizes.dims else None
    return count + 2 if isinstance(count, int) else None


def _axes(attrs: Attributes, source: list[Length], spatial: range) -> list[Axis]:
    mode = "nearest" if attrs["mode"] == "nearest" else "linear"
    rule = SpecRule(mode, attrs["coordinate_transformation_mode"])
    return [Axis(k, source[k], rule) for k in spatial]


def _sizes(b: Body, attrs: Attributes, sizes: Tensor, count: int) -> list[Length]:
    """The entries of the input: known ones, or proven to be `count` and to agree with the attribute."""
    if sizes.value is not None and all(isinstance(v, int) for v in sizes.value):
        return list(sizes.value)
    message = f"expected input sizes of {count} entries"
    values = b.Cast(b.checked(sizes, b.ints([count]), (count,), message), to=INT64)
    if attrs["sizes"] is not None:
        same = b.Equal(values, b.ints(attrs["sizes"]))
        values = b.Add(values, b.require(same, f"expected input sizes {list(attrs['sizes'])} as the attribute says"))
    return split(b, values, count)


def _scales_check(b: Body, attrs: Attributes, source: list[Length], out: list[Length], name: str) -> str | None:
    """0 where every |I·scale - O| < 1; None where that was found before."""
    scales = attrs["scales"]
    if scales is None or all(isinstance(length, int) for length in [*source, *out]):
        return None
    lengths = b.Cast(join(b, source), to=DOUBLE)
    difference = b.Sub(b.Mul(lengths, b.doubles(scales)), b.Cast(join(b, out), to=DOUBLE))
    near = b.Less(b.Abs(difference), b.doubles([1]))
    return b.require(near, f"expected {name} lengths within one pixel of what the scales {list(scales)} lead to")


def _of_any_rank(
    b: Body, attrs: Attributes, names: tuple[str, str], src: Tensor, diff_dst: Tensor, sizes: Tensor | None
) -> str:
    """A tensor of unknown rank as one of three spatial axes, the first of which may be 1 long."""
    source, out = b.Shape(src), b.Shape(diff_dst)
    low, high = b.int_scalar(MIN_RANK), b.int_scalar(MAX_RANK)
    fits = b.And(b.GreaterOrEqual(b.Size(source), low), b.LessOrEqual(b.Size(source), high))
    zero = b.require(
        b.And(fits, b.Equal(b.Size(source), b.Size(out))),
        f"expected {names[0]} and {names[1]} of one rank, {MIN_RANK} to {MAX_RANK}",
    )
    source, out = b.Add(source, zero), b.Add(out, zero)
    channels, start, end = (1, 2, INT64_MAX) if attrs["data_format"] == "NCX" else (-1, 1, -1)
    whole = b.ints([0, channels])
    message = f"expected {names[1]} with the batch and channels of {names[0]}"
    out = b.Add(out, b.require(b.Equal(b.Gather(source, whole), b.Gather(out, whole)), message))
    extents = [b.Slice(shape, b.ints([start]), b.ints([end])) for shape in (source, out)]
    if sizes is not None:
        count = b.Equal(b.Shape(sizes), b.Shape(extents[1]))
        message = "expected input sizes with one entry per spatial axis"
        values = b.Add(b.Cast(sizes, to=INT64), b.require(count, message))
        same = b.require(b.Equal(values, extents[1]), f"expected {names[1]} with the spatial shape that sizes says")
        extents[1] = b.Add(extents[1], same)
    three = [b.Slice(b.Concat(b.ints([1, 1]), e, axis=0), b.ints([-3]), b.ints([INT64_MAX])) for e in extents]
    sized = positive_or_empty(b, split(b, three[0], 3), split(b, three[1], 3), f"expected {names[0]} lengths >= 1")
    batch, depth = (b.Gather(out, b.ints([k])) for k in (0, channels))
    before, behind = ([batch, depth], []) if channels == 1 else ([batch], [depth])
    first = len(before)
    lengths = [*before, *split(b, three[1], 3), *behind]
    return transpose(b, diff_dst, lengths, _axes(attrs, [*before, *sized, *behind], range(first, first + 3)), source)
