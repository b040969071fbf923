"""The comparisons of `make fidelity` detect what they are there for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.fidelity.compare import Difference, difference, loss_gap, tolerance, unnamed
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
    assert difference({"expanded": np.zeros(12)}, {"state": np.zeros(4)}, live={"state": np.ones(4, bool)})


def test_values_may_be_off_by_the_slack_alone() -> None:
    slack = {"fc.weight": 2e-3, "fc.bias": 0.0}
    assert not difference({"val_1": changed(WEIGHT), "fc.bias": BIAS}, EXPECTED, slack)
    assert difference({"val_1": changed(WEIGHT), "fc.bias": changed(BIAS)}, EXPECTED, slack) == Difference(
        ("fc.bias",), ("fc.bias",)
    )


@pytest.mark.parametrize(
    ("found", "warnings", "silent"),
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
def test_a_warning_names_every_tensor(found: Difference, warnings: list[str], silent: list[str]) -> None:
    """The weight is in no tensor of the file, the bias is in one under another name."""
    assert unnamed(found, warnings, {"onnx::Add_7": BIAS[None]}, EXPECTED, ["mul"]) == silent


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
