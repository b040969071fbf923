"""A few models of `make search`, and that it sees what it is there to see."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, parser

from tests.search.__main__ import dressed
from tests.search.draw import drawn
from tests.search.generate import Feeds
from tests.search.oracles import ORACLES, examine
from tests.search.shrink import shrunk
from tests.support.broken_rules import break_rule, scaled

MODELS = range(4)


@pytest.mark.parametrize("number", MODELS)
def test_models(number: int) -> None:
    model, feeds = dressed(0, number)
    verdicts = {name: examine(model, feeds, name) for name in ORACLES}
    assert {name: text for name, (verdict, text) in verdicts.items() if verdict == "wrong"} == {}
    assert any(verdict == "right" for name, (verdict, _) in verdicts.items() if name != "explained")


def test_models_are_the_same_every_time() -> None:
    first, again, other = (drawn(3, n)[0].SerializeToString(deterministic=True) for n in (5, 5, 6))
    assert first == again != other


def _model() -> tuple[ModelProto, Feeds]:
    text = """<ir_version: 10, opset_import: ["": 18]> g (double[N, 2] x) => (double[N, 2] y, double[N, 2] z)
        <double[2, 2] w = {1, 2, 3, 4}> { a = MatMul(x, w) b = Tanh(a) c = Exp(b) y = Mul(c, x) z = Sin(x) }"""
    return parser.parse_model(text), {"x": np.array([[0.5, -0.25], [1, 2]])}


def test_a_wrong_rule_is_reported_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of one operator among five: by differences, and no other operator stays."""
    break_rule(monkeypatch, "Tanh", scaled(1.5))
    model, feeds = _model()

    def shows(model: ModelProto, feeds: Feeds) -> bool:
        return examine(model, feeds, "differences")[0] == "wrong"

    assert shows(model, feeds)
    small, fed = shrunk(model, feeds, shows)
    assert [node.op_type for node in small.graph.node] == ["Tanh"]
    assert shows(small, fed)


def test_a_foreign_exception_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[None]:
        raise KeyError("x")

    break_rule(monkeypatch, "Tanh", fails)
    verdicts = {name: examine(*_model(), name) for name in ORACLES if name not in ("explained", "pytorch")}
    assert {verdict for verdict, _ in verdicts.values()} == {"wrong"}
    assert {text[:8] for _, text in verdicts.values()} == {"KeyError"}


FALSE_ALARMS = {
    "boxes that are outputs": """<ir_version: 10, opset_import: ["": 16]>
        g (double[1,1,4,1] x, int64[1] batch) => (double[1,4] boxes, double[1,1,2,2] y)
        <double[1,4] boxes = {0.1, 0.2, 1.3, 1.7}>
        { y = RoiAlign <mode = "avg", output_height = 2, output_width = 2> (x, boxes, batch) }""",
    "equal numbers of Unique that part": """<ir_version: 10, opset_import: ["": 16]>
        g (double[3] x) => (double[N] y) { y = Unique (x) }""",
}


@pytest.mark.parametrize("oracle", ["differences", "second"])
@pytest.mark.parametrize("case", FALSE_ALARMS)
def test_points_without_a_derivative_are_not_reported(case: str, oracle: str) -> None:
    model = parser.parse_model(FALSE_ALARMS[case])
    boxes = case.startswith("boxes")
    x = np.arange(4.0).reshape(1, 1, 4, 1) ** 2 if boxes else np.array([1.0, 1, 3])
    feeds = {"x": x} | ({"batch": np.array([0])} if boxes else {})
    verdict, text = examine(model, feeds, oracle)
    assert verdict in ("right", "skipped"), text


def test_per_sample_seeds_of_unknown_rank() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 22]>
        g (float[N] rows) => (float[] y, float[] rows) <float[1,1,2,2] w = {0.5, -0.3, 0.4, -0.5}>
        { y = MeanVarianceNormalization (w) }"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert examine(model, {"rows": np.array([0.1, 0.2], np.float32)}, "samples") == ("right", "")
