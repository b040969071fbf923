"""Bands of a gather in registers of whole matrices whose taps all read the cell itself: NCX data, in place. Compiled.

The product has cells as columns, and nothing is turned or copied: what a tile of cells reads is split into parts
(`vector.matrix_tiles`) from where it lies, while the tile before is multiplied. Pairs are two channels or, where the
step along x is 2, two cells; a group of DEPTH steps is so many channels of a tap, or half as many of two.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import add_to_rows, bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, out_at, tap_of
from onnx_backprop.ort_ops.vector.boxes import dot
from onnx_backprop.ort_ops.vector.matrix_tiles import (
    DEPTH,
    GROUP,
    MOST_SHARES,
    SIDE,
    add_sums,
    leave_tiles,
    multiply_columns,
    split_pairs,
    split_rows,
    take_tiles,
)

_TILE, _LINE, _ROWS = 1024, 64, 16
_AHEAD = 512  # bytes of a row that are fetched before they are split
_values = stack(SIDE)


@inner
def _place(p, first, cell, size, n):
    """(element of the source, of the output) of a tile of a band: the last one of a row may begin earlier."""
    tiles = (size[2] + SIDE - 1) // SIDE
    row = n // tiles
    at = row // size[1], row % size[1], max(min(n % tiles * SIDE, size[2] - SIDE), 0)
    return first[0] + dot((cell + at) * p.step, p.c.source.cells), first[1] + dot(at, first[2])


@inner
def _tap_at(p, tap):
    """How many bytes behind its cell's first one a tap reads."""
    entry = tap_of(p, view(par.PhaseRecord, p + p.phase_table), tap)
    return 4 * dot(view(par.Residue, p + p.residue_table, entry.residue).of, p.c.source.cells)


@inner
def _split(p, data, cells, target, taps):
    """A tile of all taps and channels."""
    wide, channel = p.step[2], 4 * p.c.source.c
    for tap in range(0, taps, wide):
        source = data + _tap_at(p, tap)
        for c in range(0, p.c.s, DEPTH // wide):
            channels = min(DEPTH // wide, p.c.s - c)
            for half in range(SIDE // _ROWS):
                to, at, left = target + _TILE * half, source + channel * c + _LINE * wide * half, cells - _ROWS * half
                if wide > 1:
                    split_rows(to, _LINE, 2 * _TILE, at, channel, channels, 2 * left, _AHEAD)
                else:
                    split_pairs(to, _LINE, 2 * _TILE, at, channel, channels, left, _AHEAD)
            target += GROUP


@inner
def gather_columns(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of output channels of one band; the packed weights of tile m are panel `panels` + m."""
    phase, data, wide, channel = view(par.PhaseRecord, p + p.phase_table), call.inputs[0], p.step[2], 4 * p.c.source.c
    taps, depth, sums = phase.taps, DEPTH // wide, scratch + p.offsets.tile
    groups = (p.c.s + depth - 1) // depth
    block, together, c_row = taps // wide * groups * GROUP, p.together, 4 * p.c.destination.c
    here, following = scratch + p.offsets.copy, scratch + p.offsets.copy + together * block
    at, step = out_at(p, phase, n, group, cell)
    first = image_of(p.c.source, n, group * p.c.s), at, step
    tiles, cells = size[0] * size[1] * ((size[2] + SIDE - 1) // SIDE), min(size[2], SIDE)
    most, fused = block_sizes.MATRIX_STEPS // DEPTH, cells == SIDE and p.c.s % depth == 0
    # bytes from row to row of units, and to a unit's second vector
    row, second = (channel, _LINE) if wide > 1 else (2 * channel, channel)
    bias, values = bias_address(call, p), _values()
    take_tiles(scratch + p.offsets.configuration)
    for start in range(begin, end, p.at_once):
        stop = min(start + p.at_once, end)
        shares = min(stop - start, MOST_SHARES)
        for i in range(min(together, tiles)):
            source, _ = _place(p, first, cell, size, i)
            _split(p, data + 4 * source, cells, here + i * block, taps)
        for tile in range(0, tiles, together):
            for m in range(start, stop):
                share, rows, left = m - start, min(SIDE, p.c.d - m * SIDE), packed + (panels + m) * block
                if bias:
                    bias_of(F32, bias, group * p.c.d + m * SIDE, rows, values)
                for i in range(min(together, tiles - tile)):
                    _, target = _place(p, first, cell, size, tile + i)
                    out, count, add, kind = call.output + 4 * target + m * SIDE * c_row, 0, 0, 0
                    source, _ = _place(p, first, cell, size, min(tile + i + together, tiles - 1))
                    later, _ = _place(p, first, cell, size, min(tile + i + together + 1, tiles - 1))
                    if fused and share < shares and tile + i + together < tiles:
                        kind = 2 * shares + 2 - wide
                    skipped, split = row * (_ROWS // shares) * share, _LINE * (_ROWS // shares) * share
                    for tap in range(0, taps, wide):
                        behind = _tap_at(p, tap) + skipped
                        for some in range(0, groups, most):
                            number, place = min(most, groups - some), (tap // wide * groups + some) * GROUP
                            last = place + number * GROUP == block
                            ended = last or count + number + min(most, groups) > most
                            to, to_row = sums if ended else 0, 4 * SIDE
                            if last and add == 0 and rows == SIDE and cells == SIDE:
                                to, to_row = out, c_row
                            from_channel = data + behind + some * depth * channel
                            multiply_columns(
                                kind, to, to_row, left + place, here + i * block + place, number,
                                following + i * block + place + split, 4 * source + from_channel,
                                row, second, depth * channel, 4 * later + from_channel, count,
                            )  # fmt: skip
                            count += number
                            if to == sums:
                                add_sums(out, c_row, sums, rows, cells, add)
                                count, add = 0, 1
                    if bias:
                        add_to_rows(out, c_row, values, rows, cells)
            for i in range(min(together, tiles - tile - together) * (1 - fused)):
                source, _ = _place(p, first, cell, size, tile + together + i)
                _split(p, data + 4 * source, cells, following + i * block, taps)
            here, following = following, here
    leave_tiles()
