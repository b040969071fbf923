"""What the page makes of scores of classes, and of a schedule, beside NumPy and Python's schedules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnx_backprop import schedules
from onnx_backprop.command.main import main
from tests.onnx_backprop.web.javascript import WEB, run


def test_classes_and_schedules(rng: np.random.Generator, tmp_path: Path) -> None:
    outputs, expected = [], []
    for shape, axis in (((3, 4, 2, 5), 1), ((3, 2, 5, 4), -1), ((6, 4), 1)):
        scores = rng.integers(0, 3, shape).astype(float)  # with ties
        labels = rng.integers(0, 4, [d for n, d in enumerate(shape) if n != axis % len(shape)])
        labels[rng.random(labels.shape) < 0.3] = 255
        best, kept = scores.argmax(axis=axis), labels != 255
        data = {"data": scores.ravel().tolist(), "dims": shape, "axis": axis}
        outputs.append(data | {"labels": labels.ravel().tolist(), "ignored": 255})
        hits = {"hits": int((best == labels)[kept].sum()), "count": int(kept.sum())}
        expected.append({"chosen": best.ravel().tolist(), "right": hits})
    steps = [0, 1, 4, 5, 17, 40, 90]
    kinds = {"linear": schedules.Linear, "cosine": schedules.Cosine}
    abouts = [{"name": name, "steps": 40, "warmup": warmup} for name in (*kinds, "constant") for warmup in (0, 5)]
    cases = {"outputs": outputs, "schedules": [{"about": about, "steps": steps} for about in [*abouts, None]]}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    answers = json.loads(run("classes.mjs", WEB / "classes.js", tmp_path / "cases.json"))
    assert answers["outputs"] == expected
    for about, factors in zip(abouts, answers["factors"], strict=False):
        plain = kinds[about["name"]](1.0, steps=40) if about["name"] in kinds else schedules.Constant(1.0)
        schedule = schedules.Warmup(plain, steps=5) if about["warmup"] else plain
        np.testing.assert_allclose(factors, [schedule(t) for t in steps], atol=1e-15)
    assert answers["factors"][-1] == [1] * len(steps)
    assert len({tuple(c) for c in answers["colours"]}) == 24
    assert answers["nothing"] == [None, None]


@pytest.mark.parametrize(("loss", "axis"), [("softmax_cross_entropy", 1), ("mse", None)])
def test_a_site_states_the_class_axis_and_the_schedule(tmp_path: Path, loss: str, axis: int | None) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        segments (float[batch, 3, 4, 6] x) => (float[batch, 5, 4, 6] y) { y = Conv (x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((5, 3, 1, 1), np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    x, labels = np.ones((40, 3, 4, 6), np.float32), np.arange(40 * 24).reshape(40, 4, 6) % 5
    target = {"labels": labels} if axis else {"target": np.ones((40, 5, 4, 6), np.float32)}
    np.savez(tmp_path / "data.npz", x=x, **target)
    command = ["web", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "data.npz"), "--loss", loss, "--quiet"]
    more = ["--class-weights", "1,2,3,4,5", "--ignore-index", "255"] if axis else []
    schedule = ["--schedule", "cosine", "--epochs", "4", "--warmup", "3", "--batch-size", "9"]
    assert main([*command, "-o", str(tmp_path / "site"), *more, *schedule]) == 0
    about = json.loads((tmp_path / "site" / "site.json").read_text())
    assert about["classes"] == (axis and {"axis": axis})
    assert about["schedule"] == {"name": "cosine", "steps": 4 * 4, "warmup": 3}  # 36 rows are trained on
    graph = json.loads((tmp_path / "site" / "model" / "training.json").read_text())
    assert graph["labels"] == (axis and {"name": "labels", "classes": 5, "ignored": 255, "axis": 1})
