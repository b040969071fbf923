"""Numbers as the parts that registers of whole matrices take (`vector.matrix_tiles`): weights, and cells of planes."""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP, SIDE, split_pairs
from onnx_backprop.ort_ops.vector.registers import copy_rows, transpose_tile
from onnx_backprop.ort_ops.vector.rows import clear

_TILE, _PARTS, _LINE, _ROWS = 1024, 3, 64, 16
CELL = _PARTS * _LINE  # bytes of a cell's group of channels
AHEAD = 512  # bytes of a row that are fetched before they are split


@inner
def split_panel(target, panel, taps, channels, wide, turned, row):
    """Packed weights, SIDE output channels of every tap and channel, into parts: a group for DEPTH channels.

    wide: taps that are pairs, of which a group has half the channels; row: scratch for them. turned: whether output
    channels are rows.
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
                to = target + _TILE * half
                split_pairs(to, _LINE, 2 * _TILE, source + 4 * _ROWS * half, 4 * SIDE, wide * count, _ROWS, 0)
                for part in range(_PARTS * turned):
                    transpose_tile(to + 2 * _TILE * part, _LINE, to + 2 * _TILE * part, _LINE)
            target += GROUP


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
