"""A sample of the conformance grid of Resize; all of it runs under `make conformance`."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from onnx_backprop.opset import KERNELS
from tests.conformance import resize
from tests.conformance.resize_cases import COORDINATES, KINDS, KNOWN

SEED = 5
SETS, PER_SET = 24, 8  # sets of attributes that many nodes have, and nodes of each
FEW, STATIC = 50, 60  # nodes whose attributes few have, nodes of which conversion knows something
# What onnxruntime 1.31 does not run, or not rightly.
NOT_RUN = ("ScalesValidation 'Cubic' mode only supports", "ScalesValidation 'Linear' mode only supports", "0/0")
REFUSED_BY_US = "onnxruntime writes extrapolation_value to other pixels"


def test_the_grid_is_what_it_says() -> None:
    every = list(resize.cases())
    assert len({str(case) for case in every}) >= 25_000
    assert len({case.family for case in every}) == 8
    attributes = Counter(tuple((n, case.attributes.get(n)) for n in KINDS_AND_COORDINATES) for case in every)
    assert len(attributes) == len(KINDS) * len(COORDINATES)
    assert min(attributes.values()) >= 200
    assert {len(case.shape) for case in every} == {1, 2, 3, 4, 5}
    assert {case.known for case in every} == set(KNOWN)
    assert {case.opset for case in every} == {11, 13, 18, 19}
    assert Counter(case.how for case in every)["scales"] >= 10_000
    assert sum("keep_aspect_ratio_policy" in case.attributes for case in every) >= 2000
    assert sum(min(case.attributes.get("axes", [0])) < 0 for case in every) >= 200
    assert sum(case.is_basis for case in every) >= 0.9 * len(every), "most are checked in every entry of W"
    resized = {(case.shape[1], case.values[0]) for case in every if case.how == "sizes" and len(case.shape) == 2}
    assert resized >= set(itertools.product(range(1, 10), repeat=2))


KINDS_AND_COORDINATES = sorted({name for kind in KINDS for name in kind} | {"coordinate_transformation_mode"})


def sample() -> list[resize.Case]:
    """Whole sets of attributes, so that few sessions serve many nodes."""
    sets: dict[object, list[resize.Case]] = defaultdict(list)
    static = []
    for case in resize.cases():
        if case.known == "nothing":
            sets[resize.key(case)].append(case)
        else:
            static.append(case)
    rng = random.Random(SEED)
    groups = sorted(sets.values(), key=lambda cases: resize.key(cases[0]))
    chosen = rng.sample([cases for cases in groups if len(cases) >= 10 * PER_SET], SETS)
    few = [case for cases in groups if len(cases) < 10 * PER_SET for case in cases]
    return [
        *(c for cases in chosen for c in rng.sample(cases, PER_SET)),
        *rng.sample(few, FEW),
        *rng.sample(static, STATIC),
    ]


@pytest.mark.parametrize("kernels", KERNELS)
def test_sample(kernels: str, tell: Callable[[str], None]) -> None:
    chosen = sample()
    reports = resize.report(kernels, chosen)
    tell(f"Resize, a sample on route {kernels}, seed {SEED}:\n{resize.show(reports)}")
    for report in reports.values():
        assert not report.wrong
        assert all(REFUSED_BY_US in reason for reason in report.refused)
        assert all(any(reason in why for reason in NOT_RUN) for why in report.not_run), report.not_run
    assert sum(report.total for report in reports.values()) == len(chosen)
    assert sum(report.right for report in reports.values()) >= 0.85 * len(chosen)


@pytest.mark.parametrize("what", ["y", "dx", "one entry", "shape", "nan"])
def test_a_wrong_gradient_is_seen(what: str) -> None:
    """The judge itself: each answer moved by a little is no longer right."""
    judged = 0
    for case in itertools.islice(resize.cases(), 100, 25_000, 2400):
        if isinstance(resize.forward(case), str):
            continue
        ((y, dy, dx),) = resize.gradients([case], "numpy")
        assert resize.verdict(case, y, dy, dx) is None, case
        if what == "y" and not y.size:
            continue
        if what == "y":
            y = y + np.float32(0.1)
        elif what == "dx":
            dx = dx + np.float32(0.01) * np.sign(case.x() + np.float32(1e-3))
        elif what == "one entry":
            if not case.is_basis:
                continue
            dx = dx.copy()
            dx[(-1,) * dx.ndim] += np.float32(0.01)
        elif what == "shape":
            dx = dx[..., None]
        else:
            dx = dx * np.float32(np.nan)
        judged += 1
        assert resize.verdict(case, y, dy, dx) is not None, case
    assert judged >= 6
