"""A sample of the conformance grid of Conv and ConvTranspose; all of it runs under `make conformance`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from onnx_backprop.opset import KERNELS
from tests.conformance import conv

SAMPLE = 150  # per operator
SEED = 3


def test_the_grid_is_what_it_says() -> None:
    every = list(conv.cases())
    assert len({str(case) for case in every}) > 0.98 * len(every), "cases differ"
    for op_type in conv.OPERATORS:
        chosen = [case for case in every if case.op_type == op_type]
        assert len(chosen) >= 5300
        assert Counter(len(case.x) - 2 for case in chosen).keys() == {1, 2, 3}
        assert {case.opset for case in chosen} == {1, 10, 11, 18, 22}
        assert {case.known for case in chosen} == set(conv.KNOWN)
        assert {length for case in chosen for length in case.x[2:]} == set(range(1, 10))
        paddings = Counter(case.attributes.get("auto_pad", "pads") for case in chosen)
        assert min(paddings[p] for p in ("pads", "VALID", "SAME_UPPER", "SAME_LOWER")) >= 400
        assert sum(min(case.attributes.get("pads", [0])) < 0 for case in chosen) >= 100
        if op_type == "ConvTranspose":
            same = [c for c in chosen if c.attributes.get("auto_pad", "").startswith("SAME")]
            assert sum(any(case.attributes.get("output_padding", [])) for case in same) >= 300
            assert sum("output_shape" in case.attributes for case in chosen) >= 1000


@pytest.mark.parametrize("kernels", KERNELS)
def test_sample(kernels: str, tell: Callable[[str], None]) -> None:
    every = list(conv.cases())
    rng = random.Random(SEED)
    sample = [
        case
        for op_type in conv.OPERATORS
        for case in rng.sample([case for case in every if case.op_type == op_type], SAMPLE)
    ]
    reports = conv.report(kernels, sample)
    tell(f"Convolutions, a sample on route {kernels}, seed {SEED}:\n{conv.show(reports)}")
    for report in reports.values():
        assert not report.wrong
        assert not report.refused
        assert report.right >= 0.95 * SAMPLE
        assert report.right + report.not_run.total() == SAMPLE


@pytest.mark.parametrize("name", ["y", "x", "w", "b", "shape", "nan"])
def test_a_wrong_gradient_is_seen(name: str) -> None:
    """The judge itself: each answer moved by a little is no longer right."""
    judged = 0
    for case in itertools.islice((case for case in conv.cases() if case.x[0]), 200, 1400, 100):
        (result,) = conv.gradients([case], "numpy")
        assert conv.verdict(case, *result) is None
        y, dy, grads = result
        if name in ("x", "w", "b") and name in grads:
            grads[name] = grads[name] + np.float32(0.01) * np.sign(case.arrays()[name])
        elif name == "shape":
            grads["x"] = grads["x"][..., None]
        elif name == "nan":
            grads["w"] = grads["w"] * np.float32(np.nan)
        elif name == "y":
            y = y + np.float32(1)
        else:
            continue
        judged += 1
        assert conv.verdict(case, y, dy, grads) is not None, f"{case}: {name}"
    assert judged >= 4
