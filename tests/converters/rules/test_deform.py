"""Gradients of DeformConv, against onnxruntime's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import Case, Oracle, build, case, check_cases

PIECEWISE = Oracle("onnxruntime", 2.0**-7, 1e-3)
SEED = 17
KERNEL = (2, 3)
IMAGE = (5, 6)


def deform(
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, ...] = (0, 0, 0, 0),
    dilations: tuple[int, int] = (1, 1),
    group: int = 1,
    offset_group: int = 1,
    *,
    bias: bool = True,
    mask: bool = True,
    written: bool = True,
    **given: Any,
) -> Case:
    """Offsets of some pixels, none that reads within 1/8 of a whole one."""
    out = [(IMAGE[n] + pads[n] + pads[n + 2] - dilations[n] * (KERNEL[n] - 1) - 1) // strides[n] + 1 for n in range(2)]
    rng = np.random.default_rng(SEED)
    count = KERNEL[0] * KERNEL[1] * offset_group
    steps = rng.integers(-3, 4, (2, 2 * count, *out)) + rng.choice([0.25, 0.5, 0.75], (2, 2 * count, *out))
    arrays = {
        "x": rng.uniform(-1, 1, (2, 4, *IMAGE)),
        "w": rng.uniform(-1, 1, (4, 4 // group, *KERNEL)),
        "o": steps + rng.uniform(-0.05, 0.05, steps.shape),
        "b": rng.uniform(-1, 1, 4),
        "m": rng.uniform(0.2, 1, (2, count, *out)),
    }
    used = ["x", "w", "o"] + (["b"] if bias else []) + (["m"] if mask else [])
    inputs = ", ".join(used if bias or not mask else ["x", "w", "o", '""', "m"])
    kernel = f"kernel_shape = {list(KERNEL)}, " if written else ""
    nodes = (
        f"y = DeformConv <{kernel}strides = {list(strides)}, pads = {list(pads)}, dilations = {list(dilations)}, "
        f"group = {group}, offset_group = {offset_group}> ({inputs})"
    )
    feeds = {name: arrays[name].astype(np.float32) for name in used}
    return case(nodes, since=19, oracle=PIECEWISE, **feeds, **given)


CASES = [
    deform(bias=False, mask=False),
    deform((2, 1), (1, 0, 1, 2), (1, 2), 2),
    deform((1, 1), (1, 1, 1, 1), offset_group=2),
    deform((1, 2), (1, 1, 0, 0), (2, 1), 2, 2),
    deform((2, 2), group=4, offset_group=2, bias=False),
    deform((2, 2), mask=False, written=False),
]


@pytest.mark.parametrize("variant", ["static", "symbolic", "unranked", "half"])
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_three_dimensions_are_refused() -> None:
    """onnxruntime does not run them."""
    model, _, wrt = build(deform(), opset=19)
    next(a for a in model.graph.node[0].attribute if a.name == "kernel_shape").ints.append(2)
    with pytest.raises((ob.UnsupportedAttributeError, ob.InvalidModelError), match="DeformConv"):
        ob.backward(model, wrt=wrt)


def test_an_output_without_cells_gives_zeros() -> None:
    """An image of one column under a kernel of two, of known shapes: no derivative divides nothing into axes."""
    model = build(
        case("y = DeformConv(x, w, o)", x=(3, 3, 3, 1), w=(2, 3, 2, 2), o=(3, 8, 2, 0), since=19),
        opset=19,
        variant="static",
    )[0]
    converted = ob.backward(model, wrt=["x", "w", "o"])
    feeds = {
        name: np.ones(shape, np.float32)
        for name, shape in (("x", (3, 3, 3, 1)), ("w", (2, 3, 2, 2)), ("o", (3, 8, 2, 0)))
    }
    feeds[ob.derivatives(converted)[-1].seeds["y"]] = np.ones((3, 2, 2, 0), np.float32)
    names = list(ob.derivatives(converted)[-1].results.values())
    for name, gradient in zip(names, ob.session(converted).run(names, feeds), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(np.asarray(gradient)), err_msg=name)
