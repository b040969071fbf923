"""The body of InterpolateBackward and InterpolateBackprop: what a run must prove, then one matrix per spatial axis."""

from functools import partial

from onnx_backprop.opset.bodies.builder import DOUBLE, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector, join
from onnx_backprop.opset.bodies.interpolation.forms import InterpolatedAxis, PlacedBy
from onnx_backprop.opset.bodies.interpolation.lengths import positive_or_empty, shape_of_rank
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.convolution import MAX_RANK, MIN_RANK
from onnx_backprop.opset.maths.interpolation import place_onednn

INT64_MAX = 2**63 - 1


def body(
    b: Body, attrs: Attributes, names: tuple[str, str], src: Tensor, diff_dst: Tensor, sizes: Tensor | None
) -> str:
    """Dx of the shape of src; `names` are those of the two tensors."""
    rank = _rank(attrs, src, diff_dst, sizes)
    if rank is None:
        return _of_any_rank(b, attrs, names, src, diff_dst, sizes)
    first = 2 if attrs["data_format"] == "NCX" else 1
    spatial = slice(first, first + rank - 2)
    source = shape_of_rank(b, src, rank, f"expected {names[0]} of rank {rank}")
    out = shape_of_rank(b, diff_dst, rank, f"expected {names[1]} of rank {rank}")[spatial]
    known = out.knowing(attrs["sizes"] or out.entries)
    stated = known if sizes is None else _sizes(b, attrs, sizes, rank - 2)
    expected = join(b, source[:first], stated, source[first + rank - 2 :])
    message = f"expected {names[1]} with the batch and channels of {names[0]} and the spatial shape that sizes says"
    dy = b.checked(diff_dst, expected, message)
    out = join(b, source[:first], stated.knowing(known.entries), source[first + rank - 2 :])
    zero = _scales_check(attrs, source[spatial], out[spatial], names[1])
    message = f"expected {names[0]} with spatial lengths >= 1"
    sized = positive_or_empty(source[spatial], out[spatial], message)
    source = join(b, source[:first], sized, source[first + rank - 2 :])
    return transpose(b, dy, out, _axes(attrs, source, out, range(rank)[spatial]), source + zero)


def _rank(attrs: Attributes, src: Tensor, diff_dst: Tensor, sizes: Tensor | None) -> int | None:
    for x in (src, diff_dst):
        if x.dims is not None:
            return len(x.dims)
    for given in (attrs["sizes"], attrs["scales"], sizes and sizes.value):
        if given is not None:
            return len(given) + 2
    count = sizes.dims[0] if sizes is not None and sizes.dims else None
    return count + 2 if isinstance(count, int) else None


def _axes(attrs: Attributes, source: Vector, out: Vector, spatial: range) -> list[InterpolatedAxis]:
    mode = "nearest" if attrs["mode"] == "nearest" else "linear"
    rule = PlacedBy(partial(place_onednn, mode, attrs["coordinate_transformation_mode"]))
    return [InterpolatedAxis(k, source[k], rule, source[k].equal(out[k])) for k in spatial]


def _sizes(b: Body, attrs: Attributes, sizes: Tensor, count: int) -> Vector:
    """The entries of the input: known ones, or proven to be `count` and to agree with the attribute."""
    if sizes.value is not None and all(isinstance(v, int) for v in sizes.value):
        return Vector(b, sizes.value)
    proven = b.checked(sizes, Vector(b, [count]), f"expected input sizes of {count} entries")
    values = Vector(b, [None] * count, b.Cast(proven, to=INT64))
    if attrs["sizes"] is None:
        return values
    same = values.equal(Vector(b, attrs["sizes"]))
    return values + same.require(f"expected input sizes {list(attrs['sizes'])} as the attribute says")


def _scales_check(attrs: Attributes, source: Vector, out: Vector, name: str) -> Vector | int:
    """0 where every |I·scale - O| < 1; where that is known it was found before."""
    scales = attrs["scales"]
    if scales is None or (source.known and out.known):
        return 0
    near = abs(source.cast(DOUBLE) * Vector(source.body, scales, dtype=DOUBLE) - out.cast(DOUBLE)) < 1
    return near.require(f"expected {name} lengths within one pixel of what the scales {list(scales)} lead to")


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
    inner, outer = (Vector(b, [None] * 3, name) for name in three)
    sized = positive_or_empty(inner, outer, f"expected {names[0]} lengths >= 1")
    batch, depth = (Vector(b, [None], b.Gather(out, b.ints([k]))) for k in (0, channels))
    before, behind = ([batch, depth], []) if channels == 1 else ([batch], [depth])
    first, lengths = len(before), join(b, *before, outer, *behind)
    axes = _axes(attrs, join(b, *before, sized, *behind), lengths, range(first, first + 3))
    return transpose(b, diff_dst, lengths, axes, source)
