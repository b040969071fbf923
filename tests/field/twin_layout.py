"""Operators that move, pick and make elements, in PyTorch: for `twin`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.field.twin_operators import Call, operator

torch: Any = import_module("torch")
F: Any = torch.nn.functional


@operator("Shape")
def _shape(c: Call, x: Any) -> Any:
    return torch.tensor(list(x.shape)[c.get("start", 0) : c.get("end")], dtype=torch.int64)


@operator("Reshape")
def _reshape(c: Call, x: Any, shape: Any = None) -> Any:
    wanted = c.get("shape") if shape is None else shape.tolist()
    copied = not c.get("allowzero", 0)
    return x.reshape([x.shape[n] if d == 0 and copied else d for n, d in enumerate(wanted)])


@operator("Flatten")
def _flatten(c: Call, x: Any) -> Any:
    axis = c.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    before = 1
    for n in x.shape[:axis]:
        before *= n
    return x.reshape(before, -1 if before else 0)


@operator("Squeeze")
def _squeeze(c: Call, x: Any, axes: Any = None) -> Any:
    dims = c.get("axes") if axes is None else axes.reshape(-1).tolist()
    return x.squeeze() if dims is None else x.squeeze(tuple(dims))


@operator("Unsqueeze")
def _unsqueeze(c: Call, x: Any, axes: Any = None) -> Any:
    dims = c.get("axes") if axes is None else axes.reshape(-1).tolist()
    rank = x.ndim + len(dims)
    for axis in sorted(a % rank for a in dims):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def _transpose(c: Call, x: Any) -> Any:
    return x.permute(c.get("perm") or list(range(x.ndim))[::-1])


@operator("Concat")
def _concat(c: Call, *xs: Any) -> Any:
    return torch.cat(xs, c.get("axis"))


@operator("Split")
def _split(c: Call, x: Any, lengths: Any = None) -> Any:
    axis = c.get("axis", 0)
    sizes = c.get("split") if lengths is None else lengths.tolist()
    return torch.split(x, sizes or -(-x.shape[axis] // c.get("num_outputs", c.outputs)), axis)


@operator("Slice")
def _slice(c: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    starts, ends, axes, steps = (
        c.get(name) if v is None else v.reshape(-1).tolist()
        for name, v in (("starts", starts), ("ends", ends), ("axes", axes), ("steps", steps))
    )
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index = range(*slice(start, end if end > -(2**31) else None, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(index), dtype=torch.int64))
    return x


def _from_end(index: Any, length: int) -> Any:
    return torch.where(index < 0, index + length, index).long()


@operator("Gather")
def _gather(c: Call, x: Any, index: Any) -> Any:
    axis = c.get("axis", 0) % x.ndim
    picked = x.index_select(axis, _from_end(index, x.shape[axis]).reshape(-1))
    return picked.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def _gather_elements(c: Call, x: Any, index: Any) -> Any:
    axis = c.get("axis", 0)
    return torch.gather(x, axis, _from_end(index, x.shape[axis]))


@operator("GatherND")
def _gather_nd(c: Call, x: Any, index: Any) -> Any:
    batch = c.get("batch_dims", 0)
    if not batch:
        return x[tuple(index.unbind(-1))]
    lead = x.shape[:batch]
    x, index = x.flatten(0, batch - 1), index.flatten(0, batch - 1)
    picked = torch.stack([row[tuple(where.unbind(-1))] for row, where in zip(x, index, strict=True)])
    return picked.reshape([*lead, *picked.shape[1:]])


@operator("ScatterND")
def _scatter_nd(c: Call, x: Any, index: Any, updates: Any) -> Any:
    kind = c.get("reduction", "none")
    if kind not in ("none", "add"):
        raise NotImplementedError(f"ScatterND {kind}")
    return x.index_put(tuple(index.unbind(-1)), updates, accumulate=kind == "add")


@operator("ScatterElements", "Scatter")
def _scatter_elements(c: Call, x: Any, index: Any, updates: Any) -> Any:
    kind, axis = c.get("reduction", "none"), c.get("axis", 0)
    index = _from_end(index, x.shape[axis])
    if kind == "none":
        return torch.scatter(x, axis, index, updates)
    if kind != "add":
        raise NotImplementedError(f"ScatterElements {kind}")
    return torch.scatter_add(x, axis, index, updates)


@operator("Expand")
def _expand(_: Call, x: Any, shape: Any) -> Any:
    return x.broadcast_to(torch.broadcast_shapes(tuple(x.shape), tuple(shape.tolist())))


@operator("Tile")
def _tile(_: Call, x: Any, counts: Any) -> Any:
    return x.repeat(counts.tolist())


@operator("Pad")
def _pad(c: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    given = c.get("pads") if pads is None else pads.tolist()
    names = range(x.ndim) if axes is None else [a % x.ndim for a in axes.tolist()]
    number = c.get("value", 0.0) if value is None or not value.numel() else value.reshape(())
    mode = c.get("mode", "constant")
    for n, axis in enumerate(names):
        before, after = given[n], given[n + len(names)]
        length = x.shape[axis]
        if mode == "constant":
            flat = [0, 0] * (x.ndim - 1 - axis) + [before, after]
            x = F.pad(x - number, flat) + number if torch.is_tensor(number) else F.pad(x, flat, value=number)
        elif before or after:
            at = torch.arange(-before, length + after)
            if mode == "reflect":
                at = (length - 1) - ((at % (2 * length - 2 or 1)) - (length - 1)).abs()
            elif mode == "wrap":
                at = at % length
            x = x.index_select(axis, at.clamp(0, length - 1))
    return x


@operator("ConstantOfShape")
def _constant_of_shape(c: Call, shape: Any) -> Any:
    from onnx import numpy_helper

    value = c.get("value")
    array = None if value is None else numpy_helper.to_array(value)
    dtype = c.dtype if value is None else c.type_of(value.data_type)
    return torch.full(shape.tolist(), 0 if array is None else array.item(), dtype=dtype)


@operator("Range")
def _range(_: Call, start: Any, limit: Any, delta: Any) -> Any:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("NonZero")
def _non_zero(_: Call, x: Any) -> Any:
    return torch.nonzero(x).T


@operator("CumSum")
def _cumsum(c: Call, x: Any, axis: Any) -> Any:
    dim, back = int(axis), bool(c.get("reverse", 0))
    y = (x.flip(dim) if back else x).cumsum(dim)
    y = y.flip(dim) if back else y
    return y - x if c.get("exclusive", 0) else y


@operator("TopK")
def _top_k(c: Call, x: Any, k: Any = None) -> Any:
    count = c.get("k") if k is None else int(k)
    top = torch.topk(x, count, c.get("axis", -1), bool(c.get("largest", 1)), True)
    return top.values, top.indices


@operator("OneHot")
def _one_hot(c: Call, index: Any, depth: Any, values: Any) -> Any:
    hot = F.one_hot(_from_end(index.long(), int(depth)), int(depth)).bool()
    return torch.where(hot.movedim(-1, c.get("axis", -1)), values[1], values[0])


@operator("Trilu")
def _trilu(c: Call, x: Any, k: Any = None) -> Any:
    return (torch.triu if c.get("upper", 1) else torch.tril)(x, 0 if k is None else int(k))


@operator("EyeLike")
def _eye_like(c: Call, x: Any) -> Any:
    return torch.eye(*x.shape, dtype=c.type_of(c.get("dtype", 1)))


@operator("DepthToSpace")
def _depth_to_space(c: Call, x: Any) -> Any:
    n, d, h, w = x.shape
    b = c.get("blocksize")
    if c.get("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, d // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, d // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, d // b**2, h * b, w * b)


@operator("SpaceToDepth")
def _space_to_depth(c: Call, x: Any) -> Any:
    n, d, h, w = x.shape
    b = c.get("blocksize")
    return x.reshape(n, d, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, d * b * b, h // b, w // b)


@operator("GridSample")
def _grid_sample(c: Call, x: Any, grid: Any) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(c.get("mode", "linear"), c.get("mode", "bilinear"))
    return F.grid_sample(x, grid, mode, c.get("padding_mode", "zeros"), bool(c.get("align_corners", 0)))


@operator("DequantizeLinear")
def _dequantize(c: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    """Per tensor, or along an axis."""
    if c.get("block_size", 0):
        raise NotImplementedError("DequantizeLinear in blocks")
    if scale.numel() > 1:
        shape = [1] * x.ndim
        shape[c.get("axis", 1)] = -1
        scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
    value = x.to(scale.dtype)
    return (value if zero is None else value - zero.to(scale.dtype)) * scale.reshape(
        () if scale.numel() == 1 else scale.shape
    )


@operator("Compress")
def _compress(c: Call, x: Any, condition: Any) -> Any:
    axis = c.get("axis")
    flat = x.flatten() if axis is None else x.movedim(axis, 0)
    kept = flat[: len(condition)][condition[: len(flat)]]
    return kept if axis is None else kept.movedim(0, axis)


@operator("SequenceConstruct")
def _sequence(_: Call, *xs: Any) -> Any:
    return list(xs)


@operator("SequenceAt")
def _sequence_at(_: Call, sequence: Any, position: Any) -> Any:
    return sequence[int(position)]


@operator("SplitToSequence")
def _split_to_sequence(c: Call, x: Any, split: Any = None) -> Any:
    axis, length = c.get("axis", 0), x.shape[c.get("axis", 0)]
    sizes = [1] * length if split is None else split.tolist() if split.ndim else int(split)
    parts = list(x.split(sizes, axis))
    return [part.squeeze(axis) for part in parts] if split is None and not c.get("keepdims", 1) else parts


@operator("ConcatFromSequence")
def _concat_from_sequence(c: Call, sequence: Any) -> Any:
    axis = c.get("axis")
    if not c.get("new_axis", 0):
        return torch.cat(sequence, axis)
    return torch.stack(sequence, axis if axis >= 0 else axis + sequence[0].ndim + 1)


@operator("SequenceInsert")
def _sequence_insert(_: Call, sequence: Any, x: Any, position: Any = None) -> Any:
    at = len(sequence) if position is None else int(position)
    return [*sequence[:at], x, *sequence[at:]]


@operator("SequenceErase")
def _sequence_erase(_: Call, sequence: Any, position: Any = None) -> Any:
    at = (-1 if position is None else int(position)) % len(sequence)
    return [*sequence[:at], *sequence[at + 1 :]]


@operator("Optional", "OptionalGetElement")
def _optional(_: Call, x: Any) -> Any:
    return x


@operator("ReverseSequence")
def _reverse_sequence(c: Call, x: Any, lengths: Any) -> Any:
    time, batch = c.get("time_axis", 0), c.get("batch_axis", 1)
    rows = x.movedim((batch, time), (0, 1))
    turned = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(rows, lengths.tolist(), strict=True)]
    return torch.stack(turned).movedim((0, 1), (batch, time))


@operator("CenterCropPad")
def _center_crop_pad(c: Call, x: Any, shape: Any) -> Any:
    for axis, want in zip(c.get("axes", range(x.ndim)), shape.tolist(), strict=True):
        more = want - x.shape[axis]
        if more < 0:
            x = x.narrow(axis, -more // 2, want)
        elif more:
            x = F.pad(x.movedim(axis, -1), (more // 2, more - more // 2)).movedim(-1, axis)
    return x
