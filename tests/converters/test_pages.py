"""HTML for notebooks and pages: axes, constants, names of strangers."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import onnx_backprop as ob
from onnx_backprop.converters.check.explain import NodeExplanation, VariableExplanation
from onnx_backprop.converters.pages import Bar, Verdict, chart, fragment, table, write_page
from tests.support.broken_rules import SMALL, model_of
from tests.support.training_models import classifier

KNOWN = {"class", "style", "data-name", "role", "aria-label", "viewbox", "preserveaspectratio", "points", "stroke", "d"}
VOID = ("wbr", "meta", "br", "path", "polyline")


class Checked(HTMLParser):
    """Every element is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def ticks(markup: str, side: str) -> dict[str, float]:
    """Labels of an axis and where they stand, in percent."""
    part = re.search(rf'<div class="{side}">(.*?)</div>', markup)
    assert part
    matches = re.findall(r'<span style="(?:left|bottom):([-\d.]+)%">(.*?)</span>', part[1])
    return {label: float(at) for at, label in matches}


def lines(markup: str) -> list[list[tuple[float, float]]]:
    drawn = re.findall(r'points="(.*?)"', markup)
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in points.split())] for points in drawn]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.13, 0.87, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-3.0, 4.0, ["-4", "-2", "0", "2", "4"]),
        (1000.0, 2000.0, ["1,000", "1,200", "1,400", "1,600", "1,800", "2,000"]),
        (1e-4, 5e-4, ["0.0001", "0.0002", "0.0003", "0.0004", "0.0005"]),
        (3e8, 4e8, ["3e+08", "3.2e+08", "3.4e+08", "3.6e+08", "3.8e+08", "4e+08"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[str]) -> None:
    markup = chart({"y": [(0, low), (10, high)]}, "x", "y")
    positions = ticks(markup, "left")
    assert list(positions) == expected
    assert next(iter(positions.values())) == 0
    assert list(positions.values())[-1] == 100
    assert list(ticks(markup, "below")) == ["0", "2", "4", "6", "8", "10"]
    # the curve is where the ticks say: value to share and back
    values = [float(label.replace(",", "")) for label in positions]
    for (_, y), value in zip(lines(markup)[0], (low, high), strict=True):
        assert values[0] + (100 - y) / 100 * (values[-1] - values[0]) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 100.0, ["0.01", "0.1", "1", "10", "100"]),
        (0.3, 9.0, ["0.5", "1", "2", "5"]),
        (1e-12, 1.0, ["1e-12", "1e-10", "1e-08", "1e-06", "0.0001", "0.01", "1"]),
    ],
)
def test_a_logarithmic_axis(low: float, high: float, expected: list[str]) -> None:
    markup = chart({"y": [(0, low), (10, high)]}, "x", "y")
    assert "(logarithmic)" in markup
    positions = ticks(markup, "left")
    assert list(positions) == expected
    for label, at in positions.items():
        share = math.log(float(label) / low) / math.log(high / low)
        assert at == pytest.approx(100 * share, abs=0.01)


@pytest.mark.parametrize(("value", "ends"), [(1e-3, ("0.0000", "0.0020")), (-2.0, ("-4", "0")), (0.0, ("0.0", "1.0"))])
def test_a_constant_is_a_line_in_a_sensible_range(value: float, ends: tuple[str, str]) -> None:
    markup = chart({"rate": [(n, value) for n in range(5)]}, "step", "rate")
    labels = list(ticks(markup, "left"))
    assert (labels[0], labels[-1]) == ends
    (drawn,) = lines(markup)
    assert len(drawn) == 5
    assert {y for _, y in drawn} == ({50.0} if value else {100.0})


def test_odd_curves() -> None:
    assert chart({}, "x", "y") == chart({"a": [(0, math.nan), (1, math.inf)]}, "x", "y")
    (drawn,) = lines(chart({"one": [(3, 2.0)], "none": []}, "x", "y"))
    assert len(drawn) == 2  # a line through the only point
    (drawn,) = lines(chart({"long": [(n, n % 2) for n in range(10_000)]}, "x", "y"))
    assert len(drawn) <= 1200


def test_names_of_strangers() -> None:
    hostile = "<script>alert('x')</script>\x1b[2J\"&"
    cells = [(hostile, Bar(hostile, math.nan), Verdict(hostile, good=None), *["x"] * 4)]
    markup = fragment(table([hostile] * 7, cells), chart({hostile: [(0, 1.0)]}, hostile, hostile))
    page = Checked(markup)
    assert "script" not in page.tags
    assert {name for name, _ in page.attributes} <= KNOWN
    assert "\x1b" not in markup


def test_long_tables_open_at_a_click() -> None:
    markup = table(("a",), [(str(n),) for n in range(10)], most=4)
    Checked(markup)
    assert "6 more" in markup
    assert markup.index("<details>") < markup.index("<td>4</td>")
    assert "details" not in table(("a",), [("1",)], most=4)


def test_columns_without_a_cell_are_left_out() -> None:
    markup = table(("a", "b", "c"), [("1", "", "2"), ("3", "", "4")], numbers=(2,))
    assert re.findall("<th[^>]*>(.)</th>", markup) == ["a", "c"]
    assert re.findall("<td([^>]*)>(.)</td>", markup) == [("", "1"), (" class=n", "2"), ("", "3"), (" class=n", "4")]
    assert table((), [(Verdict("x", good=True),)]).count("<td") == 1
    assert "<th>b</th>" in table(("a", "b"), [])


def test_charts_below_each_other_have_one_axis() -> None:
    charts = [chart({"a": points}, "x", "a", ends=(0, 31)) for points in ([(0, 1.0), (31, 2.0)], [(7, 1.0), (15, 3.0)])]
    ticks = [re.findall(r'left:([\d.]+%)">(\d+)<', page) for page in charts]
    assert ticks[0] == ticks[1]
    assert ticks[0][0] == ("0.00%", "0")


def test_a_page(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "A <title>", "<p>x</p>")
    markup = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "A &lt;title&gt;" in markup
    assert 'name="viewport"' in markup
    assert "color-scheme: light dark" in markup
    with pytest.raises(ob.InvalidArgumentError, match="cannot write the page"):
        write_page(tmp_path / "no" / "a.html", "A")


def test_notebooks_show_what_was_found() -> None:
    graph = ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer="adamw")
    report, explanation = ob.check_gradients(model_of(SMALL), nodes=True), ob.explain_gradients(model_of(SMALL))
    for shown, short, words in (
        (
            graph,
            r"<TrainingGraph 'classifier': \(x, labels\) -> loss, 5 parameters \(numbers: 147 trained, 32 statistic \(82\.1% trained\)\), "
            r"AdamW, \d+ nodes>",
            ("w1", "trained"),
        ),
        (report, r"<GradientReport: right, 4 of 4 variables right, 3 nodes checked>", ("gain", "2 of 2", "relu")),
        (explanation, r"<GradientExplanation: converts, 4 of 4 variables reached; nodes: 3 served>", ("conv", "yes")),
    ):
        assert re.fullmatch(short, repr(shown)), repr(shown)
        markup = shown._repr_html_()
        Checked(markup)
        assert all(word in markup for word in words)


def test_a_refusal_on_a_page() -> None:
    variable = VariableExplanation("x", reached=False, why="a <reason>", refused=True)
    node = NodeExplanation("Det-22", "/det", "no rule", why="Det has no gradient rule")
    explanation = ob.GradientExplanation((variable,), (node,))
    assert repr(explanation) == ("<GradientExplanation: does not convert, 0 of 1 variables reached; nodes: 1 no rule>")
    markup = explanation._repr_html_()
    Checked(markup)
    for words in ("<b class=bad>does not convert</b>", "<b class=bad>no rule</b>", "a &lt;reason&gt;"):
        assert words in markup
    Checked(ob.GradientExplanation((), ())._repr_html_())
