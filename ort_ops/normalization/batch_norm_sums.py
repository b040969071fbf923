"""Lines of channels, compiled: their sums, how sums of different lines are joined, and their gradient.

Sums are about means of their own. Where one mean is given for all, joining is adding; otherwise it is Chan's formula,
in float64. No order of sums depends on the length of a vector.
"""

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, load_f64, store_f32, store_f64
from onnx_backprop.ort_ops.normalization.batch_norm_factors import MEAN

GROUP = 4  # lines that are added up together
# arrays of one length, `span`: float32 sums of a chunk of lines, float64 totals, float32 factors
C_MEAN, C_DEVIATION, C_SQUARE, C_DY, C_DY_DEVIATION, SUMS = range(6)
T_COUNT, T_MEAN, T_SQUARE, T_DY, T_DY_DEVIATION, TOTALS = range(6)
F_MEAN, F_SLOPE, F_ALONG, F_LEVEL, FACTORS = range(5)


@inner
def _add(load, _store, sums, x, first, count):
    for i in range(count):
        store_f32(sums, i, load_f32(sums, i) + load(x, first + i))


@inner
def _add_group(load, _store, sums, x, first, pitch, count):
    second, third, fourth = first + pitch, first + 2 * pitch, first + 3 * pitch
    for i in range(count):
        front, back = load(x, first + i) + load(x, second + i), load(x, third + i) + load(x, fourth + i)
        store_f32(sums, i, load_f32(sums, i) + (front + back))


@fast("contract")
def _moments(load, _store, deviations, squares, dy_sums, dy_deviations, means, x, dy, first, count):
    for i in range(count):
        d, g = load(x, first + i) - load_f32(means, i), load(dy, first + i)
        store_f32(deviations, i, load_f32(deviations, i) + d)
        store_f32(squares, i, load_f32(squares, i) + d * d)
        store_f32(dy_sums, i, load_f32(dy_sums, i) + g)
        store_f32(dy_deviations, i, load_f32(dy_deviations, i) + g * d)


@fast("contract")
def _moments_group(load, _store, deviations, squares, dy_sums, dy_deviations, means, x, dy, first, pitch, count):
    """Of four rows, per channel: Σ d, Σ d², Σ dy and Σ dy·d, d = x - mean."""
    second, third, fourth = first + pitch, first + 2 * pitch, first + 3 * pitch
    for i in range(count):
        mean = load_f32(means, i)
        d0, d1 = load(x, first + i) - mean, load(x, second + i) - mean
        d2, d3 = load(x, third + i) - mean, load(x, fourth + i) - mean
        g0, g1, g2, g3 = load(dy, first + i), load(dy, second + i), load(dy, third + i), load(dy, fourth + i)
        store_f32(deviations, i, load_f32(deviations, i) + ((d0 + d1) + (d2 + d3)))
        store_f32(squares, i, load_f32(squares, i) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)))
        store_f32(dy_sums, i, load_f32(dy_sums, i) + ((g0 + g1) + (g2 + g3)))
        store_f32(dy_deviations, i, load_f32(dy_deviations, i) + ((g0 * d0 + g1 * d1) + (g2 * d2 + g3 * d3)))


@fast("contract")
def _gradient(load, store, dx, x, dy, first, count, means, slopes, alongs, levels):
    for i in range(count):
        rest = (load(x, first + i) - load_f32(means, i)) * load_f32(alongs, i) + load_f32(levels, i)
        store(dx, first + i, load(dy, first + i) * load_f32(slopes, i) + rest)


@inner
def add_lines(kind, sums, x, first, pitch, lines, count):
    """Lines, at most GROUP, added to the sums of their elements."""
    if lines == GROUP:
        by_type(kind, _add_group, sums, x, first, pitch, count)
        return
    for line in range(lines):
        by_type(kind, _add, sums, x, first + line * pitch, count)


@inner
def add_moments(kind, sums, span, x, dy, first, pitch, lines, count):
    """Lines, at most GROUP, added to the sums about the means."""
    means, deviations, squares = sums, sums + 4 * C_DEVIATION * span, sums + 4 * C_SQUARE * span
    dy_sums, dy_deviations = sums + 4 * C_DY * span, sums + 4 * C_DY_DEVIATION * span
    if lines == GROUP:
        by_type(kind, _moments_group, deviations, squares, dy_sums, dy_deviations, means, x, dy, first, pitch, count)
        return
    for line in range(lines):
        by_type(kind, _moments, deviations, squares, dy_sums, dy_deviations, means, x, dy, first + line * pitch, count)


@inner
def divide(sums, count, lines):
    share = np.float32(1.0 / lines)
    for i in range(count):
        store_f32(sums, i, load_f32(sums, i) * share)


@fast("contract")
def flush(totals, sums, span, count, before, lines):
    """The totals of `before` lines about their means, joined with the sums of some lines about other means.

    Those need not be the lines' own: what is left over from them is known.
    """
    inverse = 1.0 / lines
    share = lines / (before + lines)
    kept = before * share
    for i in range(count):
        rest = np.float64(load_f32(sums, C_DEVIATION * span + i)) * inverse
        whole = np.float64(load_f32(sums, C_DY * span + i))
        square = np.float64(load_f32(sums, C_SQUARE * span + i)) - rest * rest * lines
        square = 0.0 if square < 0.0 else square
        along = np.float64(load_f32(sums, C_DY_DEVIATION * span + i)) - rest * whole
        mean, old = load_f64(totals, T_MEAN * span + i), load_f64(totals, T_DY * span + i)
        step = np.float64(load_f32(sums, i)) + rest - mean
        ahead = step * share
        store_f64(totals, T_MEAN * span + i, mean + ahead)
        store_f64(totals, T_SQUARE * span + i, load_f64(totals, T_SQUARE * span + i) + (square + step * step * kept))
        store_f64(totals, T_DY * span + i, old + whole)
        along += (step - ahead) * whole - ahead * old
        store_f64(totals, T_DY_DEVIATION * span + i, load_f64(totals, T_DY_DEVIATION * span + i) + along)


@inner
def flush_given(totals, sums, span, count):
    """The same where all are about a mean that is given."""
    for i in range(count):
        for n in range(T_SQUARE, TOTALS):
            total = load_f64(totals, n * span + i)
            store_f64(totals, n * span + i, total + np.float64(load_f32(sums, (n - T_SQUARE + C_SQUARE) * span + i)))


@fast("contract")
def _join(to, to_span, by, by_span, count):
    """Totals joined with others, by Chan's formula; either may be of no lines."""
    for i in range(count):
        before, lines = load_f64(to, i), load_f64(by, i)
        share = lines / max(1.0, before + lines)
        mean, old = load_f64(to, T_MEAN * to_span + i), load_f64(to, T_DY * to_span + i)
        whole = load_f64(by, T_DY * by_span + i)
        step = load_f64(by, T_MEAN * by_span + i) - mean
        ahead = step * share
        square = load_f64(by, T_SQUARE * by_span + i) + step * step * (before * share)
        along = load_f64(by, T_DY_DEVIATION * by_span + i) + ((step - ahead) * whole - ahead * old)
        store_f64(to, i, before + lines)
        store_f64(to, T_MEAN * to_span + i, mean + ahead)
        store_f64(to, T_SQUARE * to_span + i, load_f64(to, T_SQUARE * to_span + i) + square)
        store_f64(to, T_DY * to_span + i, old + whole)
        store_f64(to, T_DY_DEVIATION * to_span + i, load_f64(to, T_DY_DEVIATION * to_span + i) + along)


@inner
def _join_given(to, to_span, by, by_span, count):
    for i in range(count):
        for n in range(T_SQUARE, TOTALS):
            store_f64(to, n * to_span + i, load_f64(to, n * to_span + i) + load_f64(by, n * by_span + i))


@inner
def join_totals(call, to, to_span, by, by_span, count):
    if call.inputs[MEAN]:
        _join_given(to, to_span, by, by_span, count)
    else:
        _join(to, to_span, by, by_span, count)


@inner
def differentiate_line(kind, dx, x, dy, first, count, factors, span):
    means, slopes, alongs = factors, factors + 4 * F_SLOPE * span, factors + 4 * F_ALONG * span
    by_type(kind, _gradient, dx, x, dy, first, count, means, slopes, alongs, factors + 4 * F_LEVEL * span)
