"""Axes that differ: kernels, strides and pads of an axis of their own, one to three of them, few channels, both layouts.

A single channel has sums of its own: the taps along a row of the kernel take the place of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.declarations.calls import Call
from tests.support.batch import calls_together, check_each
from tests.support.checks import evaluate

LONGEST = {1: 70, 2: 22, 3: 8}


def problem(
    rng: np.random.Generator, axes: int, *, single: bool = False
) -> list[tuple[str, dict[str, Any], list[list[int]]]]:
    """Operators, their attributes and the shapes of their inputs, of one convolution.

    single: of one channel on one side, longer kernels and dilations.
    """
    groups, s, d = (int(rng.choice(some)) for some in ((1, 1, 2, 3), (1, 2, 3, 7, 17, 40), (1, 2, 3, 6, 13, 33)))
    batch, plain = int(rng.integers(1, 6)), rng.random() < 0.3
    kernel = [1] * axes if plain else [int(n) for n in rng.choice([1, 1, 2, 3], axes)]
    strides, begin = [int(n) for n in rng.choice([1, 2, 2, 3], axes)], [int(rng.integers(k)) for k in kernel]
    dilations = [1] * axes
    if single:
        s, d = (1, d) if rng.random() < 0.5 else (s, 1)
        kernel = [int(n) for n in rng.integers(1, 10 if axes < 3 else 4, axes)]
        dilations = [int(n) for n in rng.choice([1, 1, 1, 2, 3], axes)]
    reach = [(k - 1) * n + 1 for k, n in zip(kernel, dilations, strict=True)]
    lengths = [int(rng.integers(k, k + LONGEST[axes])) for k in reach]
    out = [(n + 2 * p - k) // step + 1 for n, p, k, step in zip(lengths, begin, reach, strides, strict=True)]
    last, xio = rng.random() < 0.4, rng.random() < 0.4

    def shape(channels: int, cells: list[int]) -> list[int]:
        return [batch, *cells, channels] if last else [batch, channels, *cells]

    x, dy = shape(s * groups, lengths), shape(d * groups, out)
    weights = [*kernel, s, d * groups] if xio else [d * groups, s, *kernel]
    attributes = {
        "strides": strides, "pads_begin": begin, "pads_end": begin, "dilations": dilations, "groups": groups,
        "data_format": "NXC" if last else "NCX", "weights_format": "XIO" if xio else "OIX",
    }  # fmt: skip
    return [
        ("Convolution", attributes, [x, weights]),
        ("ConvolutionBackwardData", attributes | {"dst_shape": x}, [dy, weights]),
        ("ConvolutionBackwardWeights", attributes | {"weights_shape": weights}, [x, dy]),
    ]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_random_problems(axes: int, single: bool) -> None:
    """Strides of an axis beside axes that a kernel of one cell reads whole had been wrong without an error."""
    rng = np.random.default_rng(axes)
    calls = [
        Call(op, attributes, [rng.standard_normal(shape).astype(np.float32) for shape in shapes], seed=number)
        for number in range(40)
        for op, attributes, shapes in problem(rng, axes, single=single)
    ]

    def run(some: Sequence[Call]) -> list[list[np.ndarray]]:
        return calls_together([(call.op, call.attributes, call.inputs) for call in some], "native")()

    def check(call: Call, answers: list[np.ndarray]) -> None:
        exact = evaluate(call.op, call.attributes, call.inputs)
        atol = 3e-6 * max(np.abs(exact).max(), 1e-6)
        np.testing.assert_allclose(answers[0], exact, atol=atol, rtol=0)

    check_each(calls, run, check)
