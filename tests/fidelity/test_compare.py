"""The comparisons of `make fidelity` detect what they are there for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.fidelity.compare import Difference, difference, gradient_slack, loss_gap, tolerance, unnamed
from tests.fidelity.report import VERDICTS, write

RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.standard_normal((3, 4)), RNG.standard_normal(3)
EXPECTED = {"fc.weight": WEIGHT, "fc.bias": BIAS}


def changed(value: np.ndarray) -> np.ndarray:
    result = value.copy()
    result.flat[1] += 1e-3
    return result


@pytest.mark.parametrize(
    "got",
    [
        EXPECTED,
        {"val_3": WEIGHT.T, "fc.bias": BIAS},
        {"x": WEIGHT.reshape(1, 4, 3), "y": BIAS[:, None]},
        {"packed": np.concatenate([BIAS, WEIGHT.ravel()])},
        {"first": WEIGHT[:1], "rest": WEIGHT[1:].T, "fc.bias": BIAS},
    ],
    ids=["equal", "transposed and renamed", "reshaped", "joined", "split"],
)
def test_the_same_numbers_are_the_same(got: dict[str, np.ndarray]) -> None:
    assert not difference(got, EXPECTED)


@pytest.mark.parametrize(
    ("got", "extra", "missing"),
    [
        ({"fc.weight": changed(WEIGHT), "fc.bias": BIAS}, ("fc.weight",), ("fc.weight",)),
        ({"fc.weight": WEIGHT}, (), ("fc.bias",)),
        ({**EXPECTED, "blur": np.ones(3)}, ("blur",), ()),
        ({"fc.weight": WEIGHT, "zeros": np.zeros(3)}, ("zeros",), ("fc.bias",)),
        ({"fc.weight": WEIGHT[:2], "fc.bias": BIAS}, ("fc.weight",), ("fc.weight",)),
        ({"fc.weight": WEIGHT * 1.5, "fc.bias": BIAS}, ("fc.weight",), ("fc.weight",)),
        ({"packed": np.concatenate([changed(BIAS), WEIGHT.ravel()])}, ("packed",), ("fc.weight", "fc.bias")),
    ],
    ids=["wrong", "missing", "extra", "another", "a part", "scaled", "joined with a wrong one"],
)
def test_other_numbers_are_detected(
    got: dict[str, np.ndarray], extra: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    assert difference(got, EXPECTED) == Difference(extra, missing)


def test_equal_values_are_counted() -> None:
    biases = {"a.bias": np.zeros(4), "b.bias": np.zeros(4), "c.bias": np.zeros(4)}
    assert difference({"a.bias": np.zeros(4)}, biases) == Difference((), ("b.bias", "c.bias"))
    assert difference({**biases, "mask": np.zeros(4)}, biases) == Difference(("mask",), ())


def test_elements_without_influence_may_be_left_out() -> None:
    """A table of positions of which the exporter has stored the rows that the forward pass reads."""
    table, live = RNG.standard_normal((6, 2)), np.zeros((6, 2), bool)
    live[:3] = True
    assert not difference({"sliced": table[:3]}, {"position": table}, live={"position": live})
    assert difference({"sliced": table[:2]}, {"position": table}, live={"position": live})
    assert difference({"sliced": table[3:]}, {"position": table}, live={"position": live})
    assert difference({"sliced": table[:3]}, {"position": table})
    assert difference({}, {"position": table}, live={"position": live}) == Difference((), ("position",))
    assert not difference({}, {"position": table}, live={"position": live & False})
    rows = np.stack([table[:3], table[:3]])  # a copy for each example, which are trained apart
    assert difference({"rows": rows[:, :1]}, {"position": table}, live={"position": live})
    assert difference({"rows": rows}, {"position": table}, live={"position": live})
    assert difference({"expanded": np.zeros(12)}, {"state": np.zeros(4)}, live={"state": np.ones(4, bool)})


def test_values_may_be_off_by_the_slack_alone() -> None:
    slack = {"fc.weight": 2e-3, "fc.bias": 0.0}
    assert not difference({"val_1": changed(WEIGHT), "fc.bias": BIAS}, EXPECTED, slack)
    assert difference({"val_1": changed(WEIGHT), "fc.bias": changed(BIAS)}, EXPECTED, slack) == Difference(
        ("fc.bias",), ("fc.bias",)
    )


def test_the_closest_tensor_is_the_partner() -> None:
    near = {"b": WEIGHT + 1e-4, "a": WEIGHT}
    assert not difference({"x": WEIGHT, "y": WEIGHT + 1e-4}, near, {"a": 0.0, "b": 1e-3})


GRADIENTS = {**EXPECTED, "first.weight": 1e-8 * WEIGHT, "key.bias": 1e-17 * BIAS, "gate": np.array([0.3])}


def rounded(seed: int) -> dict[str, np.ndarray]:
    """As float32 computes them; key.bias, which does not change a softmax, is rounding errors alone."""
    rng = np.random.default_rng(seed)
    off = {name: g * (1 + 1e-7 * rng.standard_normal(g.shape)) for name, g in GRADIENTS.items()}
    return {**off, "key.bias": 3e-9 * rng.standard_normal(3)}


SLACK = gradient_slack(GRADIENTS, [rounded(seed) for seed in range(5)])


def test_gradients_as_float32_rounds_them_are_right() -> None:
    for seed in range(5, 25):
        assert not difference(rounded(seed), GRADIENTS, SLACK)
    for zero in (0, 3e-8):  # exact, and as another order of the sums gives it
        assert not difference({**rounded(5), "key.bias": zero * BIAS}, GRADIENTS, SLACK)


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", "first.weight", "gate"])
@pytest.mark.parametrize("factor", [1.01, 0.99, -1.0, 2.0, 0.0])
def test_a_gradient_that_is_off_by_a_hundredth_is_detected(name: str, factor: float) -> None:
    """However small it is beside the others."""
    got = rounded(5)
    assert difference({**got, name: factor * got[name]}, GRADIENTS, SLACK) == Difference((name,), (name,))
    assert difference({k: v for k, v in got.items() if k != name}, GRADIENTS, SLACK) == Difference((), (name,))


def test_what_is_not_shown_to_be_rounding_errors_is_no_noise() -> None:
    """A small gradient that float32 agrees on, a zero that it computes exactly, and errors larger than any rounding."""
    got = rounded(5)
    tiny = {**GRADIENTS, "key.bias": 1e-13 * BIAS}
    slack = gradient_slack(tiny, [{**got, "key.bias": 1e-13 * BIAS * (1 + 1e-7)}])
    assert difference({**got, "key.bias": 1.01e-13 * BIAS}, tiny, slack)
    zero = {**GRADIENTS, "key.bias": np.zeros(3)}
    assert difference(got, zero, gradient_slack(zero, [{**got, "key.bias": np.zeros(3)}]))
    assert difference({**got, "key.bias": 1e-4 * BIAS}, GRADIENTS, SLACK)


@pytest.mark.parametrize(
    ("mismatch", "warnings", "silent"),
    [
        (Difference(("blur", "val_12"), ()), ["'blur' and 'val_12' are trained"], []),
        (Difference(("blur", "val_12"), ()), ["'blur' and 'val_123' are trained"], ["val_12"]),
        (Difference(("val_1",), ("fc.weight",)), ["'val_1' is trained"], []),
        (Difference(("val_1",), ("fc.bias",)), ["'val_1' is trained"], ["fc.bias"]),
        (Difference((), ("fc.bias",)), ["fc.bias is left out."], []),
        (Difference((), ("fc.bias",)), ["'onnx::Add_7' is left out"], []),
        (Difference((), ("fc.weight",)), [], ["fc.weight"]),
        (Difference((), ("fc.weight",)), ["'mul' is trained"], []),
        (Difference((), ("fc.bias",)), ["'mul' is trained"], ["fc.bias"]),
        (Difference((), ("fc.weight",)), ["enc.fc.weight is left out"], ["fc.weight"]),
    ],
)
def test_a_warning_names_every_tensor(mismatch: Difference, warnings: list[str], silent: list[str]) -> None:
    """The weight is in no tensor of the file, the bias is in one under another name."""
    assert unnamed(mismatch, warnings, {"onnx::Add_7": BIAS[None]}, EXPECTED, ["mul"]) == silent


def test_losses() -> None:
    losses = [2.0, 1.0, 0.5]
    assert loss_gap(losses, losses) == 0
    assert loss_gap([2.0, 1.0, 0.5 * (1 + 2e-4)], losses) == pytest.approx(2e-4)
    assert loss_gap([2.0, 1.0], losses) == np.inf
    assert loss_gap([2.0, 1.0, np.nan], losses) == np.inf
    assert loss_gap([2.0, 1.0 + 1e-4, 1e-9], [2.0, 1.0, 0.0]) == pytest.approx(1e-4)  # the last is nothing beside 2
    assert (tolerance(1e-6), tolerance(2e-4)) == (1e-4, 1e-3)


def test_the_page_counts_every_verdict(tmp_path) -> None:
    answers = [
        {
            "subject": f"net{i}",
            "kind": "norms",
            "mode": "eval",
            "exporter": "dynamo",
            "verdict": verdict,
            "stage": "set",
            "sentence": f"because {i}",
        }
        for i, verdict in enumerate(VERDICTS)
    ]
    write(tmp_path / "page.md", json.loads(json.dumps(answers)), ["net9"])
    text = (tmp_path / "page.md").read_text()
    assert "| dynamo, eval | 1 | 1 | 1 | 1 | 1 | 1 |" in text
    assert "because 2" in text
    assert "because 0" not in text
    assert "Not judged: net9." in text
