"""MaxPoolBackward, compiled: the winners of a row of windows, found tap by tap, then dy added to them.

An item of work is a band of rows of one plane (NCX) or of some channels of one image (NXC); where a plane is one row,
a band is a part of it. A worker looks at every window that touches its band and adds only what falls into it, so no two
of them write the same cell, and each cell is summed in the order of the windows, however many bands there are. float32
throughout; where no windows overlap, each cell of a half type has at most one summand, which is written as it is.
"""

import math

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.maths import convolution_attributes, pooling
from onnx_backprop.opset.operators.max_pool_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, load_i32, store_i32
from onnx_backprop.ort_ops.compiler.records import Triple
from onnx_backprop.ort_ops.layers import max_pool_windows as windows
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector.pool_windows import winners
from onnx_backprop.ort_ops.vector.registers import fetch
from onnx_backprop.ort_ops.vector.rows import read_run, write_run

BLOCK = 128  # channels of an item, NXC
BAND_CELLS = 1 << 15  # of a plane, roughly
MIN_ITEMS = 16
MAX_CELLS = 2**31 - 1  # their numbers are int32
NARROW = 16  # channels of an item, NXC, whose sums are too many otherwise
MAX_LISTED = 1 << 16  # taps of a table: 1 MiB
MAX_HELD = 5 << 17  # float32 sums of an item: 2.5 MiB
WINDOWS = 1 << 12  # of a row at a time


@inner
def _planes(p, call, item, scratch):
    """NCX: a band of one plane."""
    kind, bands, direct = p.kind, p.bands, p.kind == F32 or p.apart
    rows, depth, width = p.length[0], p.length[1], p.length[2]
    plane, band = item // bands, item % bands
    a0, a1, low, high = 0, rows, band * width // bands, (band + 1) * width // bands
    if p.cut == 0:
        a0, a1 = band * rows // bands, (band + 1) * rows // bands
        low, high = a0 * depth * width, a1 * depth * width
    cells, size = rows * depth * width, 4 if kind == F32 else 2
    x, table = call.inputs[0] + size * plane * cells, scratch + p.offsets.table
    owner, grads = scratch + p.offsets.owners, scratch + p.offsets.grads
    sums = call.output + size * plane * cells if direct else scratch + p.offsets.sums - 4 * low
    windows.clear_sums(kind if direct else F32, sums, low, high - low)
    w_first, w_last = 0, p.out[2]
    if p.cut:
        w_first, w_last = windows.windows_of_band(p, 2, low, high)
    first, last = windows.windows_of_band(p, 0, a0, a1)
    listed = (-1, -1, -1, -1, 0)
    for oa in range(first, last):
        a_start = oa * p.stride[0] - p.pad[0]
        a_taps = windows.taps_inside(p, 0, a_start)
        for ob in range(p.out[1]):
            b_start = ob * p.stride[1] - p.pad[1]
            b_taps = windows.taps_inside(p, 1, b_start)
            if a_taps[0] >= a_taps[1] or b_taps[0] >= b_taps[1]:
                continue
            row = (a_start * depth + b_start) * width - p.pad[2]  # where the row's first window begins
            if depth == 1:  # while winners of this row of windows are added, fetch what the next one looks at anew
                fetch(x + size * (row + p.stride[0] * width), size * p.stride[0] * width)
            for ow in range(w_first, w_last, WINDOWS):
                count = min(WINDOWS, w_last - ow)
                listed = _winners_of_row(p, call, plane * cells + row, a_taps, b_taps, ow, count, table, owner, listed)
                at = ((plane * p.out[0] + oa) * p.out[1] + ob) * p.out[2] + ow
                start = row + ow * p.stride[2]
                _add(p, call, sums, owner, at, count, start, low, high, grads)
    if not direct:
        write_run(kind, call.output, plane * cells + low, 1, sums, low, high - low)


@inner
def _winners_of_row(p, call, row, a_taps, b_taps, first, count, table, owner, listed):
    """The winners of `count` windows of a row from `first` on; which taps are listed then, and how many.

    Those that lie inside along the row go together, the others singly.
    """
    kind, stride, pad = p.kind, p.stride[2], p.pad[2]
    width, kernel, x = p.length[2], p.taps[2], call.inputs[0]
    begin = min(first + count, max(first, windows.first_from(pad, stride)))
    inside = width - 1 + pad - (kernel - 1) * p.dilation[2]
    end = max(begin, windows.end_until(inside, stride, first + count))
    if p.listed == 0:
        end = begin
    if begin < end:
        if listed[:4] != (a_taps[0], a_taps[1], b_taps[0], b_taps[1]):
            taps = windows.list_taps(p, table, a_taps[0], a_taps[1], b_taps[0], b_taps[1], 0, kernel, 1)
            listed = (a_taps[0], a_taps[1], b_taps[0], b_taps[1], taps)
        place = x + (4 if kind == F32 else 2) * (row + begin * stride)
        winners(kind, owner + 4 * (begin - first), place, table, listed[4], stride, 0, end - begin)
    before = begin - first
    for edge in range(count - (end - begin)):
        ow = first + edge if edge < before else end + edge - before
        w_first, w_last = windows.taps_inside(p, 2, ow * stride - pad)
        base = row + ow * stride
        winner = windows.winner_of(p, kind, x, base, 1, a_taps[0], a_taps[1], b_taps[0], b_taps[1], w_first, w_last)
        store_i32(owner, ow - first, winner)
    return listed


@inner
def _add(p, call, sums, owner, at, count, start, low, high, grads):
    """dy from its element `at` on to the winners, where those lie in the band; start: where the first window begins."""
    kind, stride, dy = p.kind, p.stride[2], call.inputs[1]
    if kind != F32:
        read_run(kind, grads, 0, dy, at, 1, count)
        dy, at = grads, 0
    for i in range(count):
        cell = np.int64(load_i32(owner, i))
        place = start + i * stride + cell
        if cell >= 0 and low <= place < high:
            windows.add_one(kind if p.apart else F32, sums, place, load_f32(dy, at + i))


@inner
def _blocks(p, call, item, scratch):
    """NXC: a band of some channels of one image."""
    kind, bands, blocks, channels = p.kind, p.bands, p.blocks, p.channels
    rows, depth, width = p.length[0], p.length[1], p.length[2]
    out_rows, out_depth, out_width = p.out[0], p.out[1], p.out[2]
    image, band, block = item // (bands * blocks), item // blocks % bands, item % blocks
    c0 = block * channels // blocks
    count = (block + 1) * channels // blocks - c0
    a0, a1 = band * rows // bands, (band + 1) * rows // bands
    low, high = a0 * depth * width, a1 * depth * width
    x, dy, out = call.inputs[0], call.inputs[1], call.output
    table, size = scratch + p.offsets.table, 4 if kind == F32 else 2
    owner, grads = scratch + p.offsets.owners, scratch + p.offsets.grads
    sums, pitch, held = scratch + p.offsets.sums - 4 * low * count, count, F32
    origin = image * rows * depth * width
    direct = kind == F32 or p.apart
    if direct:
        sums, pitch, held = out + size * (origin * channels + c0), channels, kind
    for cell in range(low, high):
        windows.clear_sums(held, sums, cell * pitch, count)
    taps, listed = 0, (-1, -1, -1, -1, -1, -1)
    first, last = windows.windows_of_band(p, 0, a0, a1)
    for oa in range(first, last):
        a_start = oa * p.stride[0] - p.pad[0]
        a_first, a_last = windows.taps_inside(p, 0, a_start)
        for ob in range(out_depth):
            b_start = ob * p.stride[1] - p.pad[1]
            b_first, b_last = windows.taps_inside(p, 1, b_start)
            for ow in range(out_width):
                w_start = ow * p.stride[2] - p.pad[2]
                w_first, w_last = windows.taps_inside(p, 2, w_start)
                if a_first >= a_last or b_first >= b_last or w_first >= w_last:
                    continue
                start = (a_start * depth + b_start) * width + w_start
                base = (origin + start) * channels + c0
                key = (a_first, a_last, b_first, b_last, w_first, w_last)
                if p.listed == 0:
                    for c in range(count):
                        winner = windows.winner_of(
                            p, kind, x, base + c, channels, a_first, a_last, b_first, b_last, w_first, w_last
                        )
                        store_i32(owner, c, winner)
                elif key != listed:
                    taps = windows.list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, channels)
                    listed = key
                if p.listed:
                    winners(kind, owner, x + size * base, table, taps, 1, 0, count)
                at = ((image * out_rows + oa) * out_depth + ob) * out_width + ow
                read_run(kind, grads, 0, dy, at * channels + c0, 1, count)
                for c in range(count):
                    cell = start + load_i32(owner, c)
                    if low <= cell < high:
                        windows.add_one(held, sums, cell * pitch + c, load_f32(grads, c))
    if not direct:
        for cell in range(low, high):
            write_run(kind, out, (origin + cell) * channels + c0, 1, sums, cell * pitch, count)


@inner
def _item(call, p, item, scratch):
    if p.blocks:
        _blocks(p, call, item, scratch)
    else:
        _planes(p, call, item, scratch)


_WORK = stage("max_pool", windows.Pool, _item)


def _plan(request: Request) -> Plan:
    x, dy = (convolution_attributes.ncx(request.attributes, shape) for shape in request.inputs)
    assert x is not None
    assert dy is not None
    batch, channels, *lengths = (int(n) for n in x if isinstance(n, int))
    outs = [int(n) for n in dy[2:] if isinstance(n, int)]
    axes = pooling.axes_of(request.attributes, lengths, outs)
    # a row of windows lies along the last axis, a band of rows along the first; channels are a row by themselves
    blank, last = pooling.Windows(1, 1, 1, 1, 1, 0), request.attributes["data_format"] == "NXC"
    if len(axes) == 1:
        a, b, w = (axes[0], blank, blank) if last else (blank, blank, axes[0])
    else:
        a, b, w = axes[0], axes[1] if len(axes) > 2 else blank, axes[-1]
    cells = math.prod(lengths)
    if cells > MAX_CELLS:
        raise ShapeError(f"src: expected at most {MAX_CELLS} cells per channel, got {cells}", op_type=OP.name)
    cut, along = (2, w) if a.length == b.length == 1 and not last else (0, a)
    apart = request.element_type != F32 and all(axis.out == 1 or axis.stride >= axis.extent for axis in axes)
    summed = request.element_type != F32 and not apart
    blocks = -(-channels // BLOCK) if last else 0
    if summed and last and cells * min(channels, BLOCK) > MAX_HELD:
        blocks = -(-channels // NARROW)
    width = -(-channels // blocks) if last else 1  # elements of a cell
    pieces = batch * (blocks or channels)
    wanted = max(-(-cells * width // BAND_CELLS), -(-MIN_ITEMS // pieces))
    bands = max(1, min(wanted, along.length // along.extent))
    held = cells // along.length * width  # of a row of the axis that is cut
    if summed:  # windows that touch several bands are looked at for each
        bands = max(bands, min(along.length, -(-along.length * held // MAX_HELD)))
    # of a window's taps no more lie inside than there are cells
    taps = math.prod(min(axis.kernel, axis.length) for axis in axes)
    listed = taps if taps <= MAX_LISTED else 0

    def triple(name: str) -> Triple:
        return getattr(a, name), getattr(b, name), getattr(w, name)

    row = width if last else WINDOWS
    sums = -(-along.length // bands) * held if summed else 0
    offsets, per_thread = workspace(
        windows.PoolOffsets, table=2 * WORD * listed, owners=FLOAT * row, grads=FLOAT * row, sums=FLOAT * sums
    )
    parameters = windows.Pool(
        kind=request.element_type, bands=bands, blocks=blocks, channels=channels, listed=listed, cut=cut, apart=apart,
        length=triple("length"), out=triple("out"), taps=triple("kernel"), stride=triple("stride"),
        dilation=triple("dilation"), pad=triple("begin"), offsets=offsets,
    )  # fmt: skip
    return Plan(parameters, ((_WORK, pieces * bands),), per_thread=per_thread)


KERNEL = NativeKernel(OP, _plan)
