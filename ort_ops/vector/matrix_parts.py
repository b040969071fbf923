"""Numbers as the parts that registers of whole matrices take (`vector.matrix_tiles`): weights, and cells of planes."""

from functools import partial

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import choice, routine
from onnx_backprop.ort_ops.vector.emit import I64, LANES, VEC, VECTOR, blocks, carry
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP, SIDE, split_pairs
from onnx_backprop.ort_ops.vector.registers import copy_rows, transpose_tile
from onnx_backprop.ort_ops.vector.rows import clear

_TILE, _PARTS, _LINE, _ROWS = 1024, 3, 64, 16
CELL = _PARTS * _LINE  # bytes of a cell's group of channels
AHEAD = 512  # bytes of a row that are fetched before they are split


@inner
def split_panel(target, further, panel, taps, channels, wide, turned, row):
    """Packed weights, SIDE output channels of every tap and channel, into parts: a group for DEPTH channels.

    further: bytes to the next tap's. wide: taps that are pairs, of which a group has half the channels; row: scratch
    for them. turned: whether output channels are rows.
    """
    for tap in range(0, taps, wide):
        for c in range(0, channels, DEPTH // wide):
            count, source = min(DEPTH // wide, channels - c), panel + 4 * SIDE * (tap * channels + c)
            if wide > 1:
                for i in range(wide):
                    from_tap = source + 4 * SIDE * channels * i
                    copy_rows(row + 4 * SIDE * i, 4 * SIDE * wide, from_tap, 4 * SIDE, count, SIDE)
                source = row
            for half in range(SIDE // _ROWS):
                to = target + tap // wide * further + c * wide // DEPTH * GROUP + _TILE * half
                split_pairs(to, _LINE, 2 * _TILE, source + 4 * _ROWS * half, 4 * SIDE, wide * count, _ROWS, 0)
                for part in range(_PARTS * turned):
                    transpose_tile(to + 2 * _TILE * part, _LINE, to + 2 * _TILE * part, _LINE)


@inner
def split_turned(target, apart, source, step, channels, count, tile):
    """Cells of planes, `step` bytes from channel to channel, `apart` in the copy."""
    for i in range(0, count, _ROWS):
        split_pairs(tile, _LINE, 2 * _TILE, source + 4 * i, step, channels, count - i, AHEAD)
        for part in range(_PARTS):
            transpose_tile(target + apart * i + _LINE * part, apart, tile + 2 * _TILE * part, _LINE)


@inner
def clear_cells(target, apart, count):
    for i in range(count):
        clear(target + apart * i, 0, CELL // 4)


def _shift(function: ir.Function, *, back: bool) -> None:
    target, source, lines = function.args
    entry, line, leave = blocks(function, "entry line leave")
    funnel = entry.library(f"llvm.fshl.v{VECTOR}i32", LANES, LANES, LANES, LANES)
    none, half = (ir.Constant(LANES, [bits] * VECTOR) for bits in (0, 16))
    entry.branch(line.block)
    done, before = line.phi(I64), line.phi(LANES)
    at = line.mul(done if back else line.sub(line.sub(lines, I64(1)), done), I64(_LINE))
    here = line.bitcast(line.vector(line.add(source, at)), LANES)
    pair = (here, before) if back else (before, here)
    line.put(line.bitcast(line.call(funnel, [*pair, half]), VEC), line.add(target, at))
    following = line.add(done, I64(1))
    carry([(done, I64(0), following), (before, none, here)], entry, line)
    line.cbranch(line.icmp_signed("<", following, lines), line.block, leave.block)
    leave.ret_void()


@routine(choice("shift_pairs", {back: partial(_shift, back=bool(back)) for back in range(2)}))
def shift_pairs(back, target, source, lines):
    """Tiles' rows of pairs of steps, 1 or more, as pairs that begin one step later or, if back, one earlier.

    Behind the last step, or before the first one, is 0.
    """
