"""The scoreboard without rivals: its cases, its references, its verdicts, its processes and its pages."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, checker

from onnx_gradient_scoreboard import __main__ as command
from onnx_gradient_scoreboard import report, runner
from onnx_gradient_scoreboard.cases import Case, accepted
from onnx_gradient_scoreboard.networks import TEXTS, networks
from onnx_gradient_scoreboard.producers import PRODUCERS, Producer
from onnx_gradient_scoreboard.questions import BIAS, KINDS, ask, cotangents
from onnx_gradient_scoreboard.reference import Reference, reference
from onnx_gradient_scoreboard.runner import Result, Worker, results
from onnx_gradient_scoreboard.verdicts import verdict
from tests.support.onnx_cases import node_cases

MODULES = ("relu", "matmul", "conv", "ceil", "einsum", "reducesumsquare", "max", "lstm")


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    wanted = tuple(
        f"test_{m}"
        for m in ("relu", "matmul", "conv", "basic_conv", "ceil", "einsum", "reduce_sum_square", "max_", "lstm")
    )
    return accepted([test for name, test in node_cases(*MODULES).items() if name.startswith(wanted)])


@pytest.fixture(scope="module")
def known(cases: dict[str, Case]) -> Callable[[str], Reference]:
    def of(name: str) -> Reference:
        answer = reference(cases[name])
        assert not isinstance(answer, str), answer
        return answer

    return of


def test_cases_are_those_of_onnx(cases: dict[str, Case]) -> None:
    assert cases["relu"].opsets == tuple(range(13, 24)), "one meaning at all opsets"
    assert cases["reduce_sum_square_keepdims_example"].opsets == tuple(range(18, 24)), "axes were an attribute before"
    assert (cases["lstm_with_peepholes"].inputs, cases["lstm_with_peepholes"].weights) == (
        ("X", "W", "R", "B", "P"),
        ("W", "R", "B", "P"),
    ), "the schema calls the first states not differentiable"
    assert cases["einsum_batch_matmul"].model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert not cases["ceil"].differentiable
    assert cases["relu"].differentiable
    alike = [name for name in cases if name.startswith("max_") and cases[name].opsets]
    assert "max_float64" not in alike, "of cases that differ in a type alone one is left"


def test_every_network_runs_and_has_weights() -> None:
    nets = networks()
    assert len(nets) == len(TEXTS)
    for name, case in nets.items():
        assert len(case.opsets) >= 5, name
        assert case.weights, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["relu", "matmul_3d", "basic_conv_with_padding"])
def test_questions_are_valid_models(
    cases: dict[str, Case], known: Callable[[str], Reference], name: str, kind: str
) -> None:
    case, seeds = cases[name], known(name).seeds
    question = ask(case, kind, 17, seeds if kind in ("jvp", "second") else cotangents(case, seeds))
    checker.check_model(question.model, full_check=True)
    inputs = {value.name for value in question.model.graph.input}
    assert inputs == set(question.feeds)
    assert set(question.wrt) <= (inputs if kind != "weights" else {t.name for t in question.model.graph.initializer})
    if kind == "weights" and name == "relu":
        assert question.wrt == (BIAS,)
    if kind == "symbolic":
        assert not any(d.dim_value for v in question.model.graph.input for d in v.type.tensor_type.shape.dim)


def answered(case: Case, known: Reference, gradient: np.ndarray) -> str:
    question = ask(case, "inputs", 17, cotangents(case, known.seeds))
    return verdict(case, question, known, {}, {question.wrt[0]: gradient}, "")[0]


def test_a_right_gradient_is_right_and_one_entry_wrong_is_wrong(
    cases: dict[str, Case], known: Callable[[str], Reference]
) -> None:
    case, expected = cases["relu"], known("relu")
    x, u = case.feeds["x"], expected.seeds["y"]
    right = u * (x > 0)
    assert expected.forward == "onnxruntime in float64"
    assert answered(case, expected, right) == "right"
    assert answered(case, expected, right * np.float32(1.0005)) == "right", "within ONNX's own tolerance"
    assert answered(case, expected, right * np.float32(1.02)) == "wrong"
    assert answered(case, expected, right[None]) == "wrong", "of another shape"
    assert answered(case, expected, np.where(right == right.max(), np.nan, right)) == "wrong"
    off = right.copy()
    off.flat[int(np.abs(right).argmax())] *= -1
    assert answered(case, expected, off) == "wrong", "one entry of sixty"


def test_a_kink_is_not_asked(cases: dict[str, Case]) -> None:
    case = cases["relu"]
    at_zero = replace(case, feeds={"x": np.zeros((3, 4, 5), np.float32)})
    answer = reference(at_zero)
    assert isinstance(answer, str)
    assert "kink" in answer


@pytest.mark.parametrize(
    ("error", "kinds", "module", "expected"),
    [
        ("Relu node_0_Relu is not handled", ["Unsupported", "Exception"], "producer.errors", "sentence"),
        ("there is no rule for this node", ["Unsupported", "Exception"], "producer.errors", "sentence"),
        ("no converter for this operator", ["NotImplementedError", "RuntimeError"], "builtins", "sentence"),
        ("expected a static length of axis 0", ["ValueError"], "builtins", "sentence"),
        ("operation Softplus is unknown here", ["ValueError"], "builtins", "sentence"),
        ("shapes do not fit at all", ["RuntimeError"], "builtins", "badly"),
        ("Relu", ["KeyError", "LookupError"], "builtins", "badly"),
        ("Relu object has no attribute data", ["AttributeError"], "builtins", "badly"),
        ("no kernel for node Relu of the graph", ["Fail"], "onnxruntime.capi", "badly"),
    ],
)  # fmt: skip
def test_refusals(
    cases: dict[str, Case], known: Callable[[str], Reference], error: str, kinds: list[str], module: str, expected: str
) -> None:
    header = {"error": error, "kinds": kinds, "from": module}
    question = ask(cases["relu"], "inputs", 17, cotangents(cases["relu"], known("relu").seeds))
    assert verdict(cases["relu"], question, known("relu"), header, {}, "producer")[0] == expected
    if expected == "sentence":
        no = replace(cases["relu"], differentiable=False)
        assert verdict(no, question, known("relu"), header, {}, "producer")[0] == "right", "it says so, as it should"


def asked(
    adapter: str, monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case], name: str, seconds: float = 900
) -> list[Result]:
    monkeypatch.setattr(runner, "cases", lambda: cases)
    monkeypatch.setattr(runner, "SECONDS", seconds)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    runner._known.cache_clear()
    producer = Producer(adapter, adapter, (), KINDS, "")
    worker = Worker(producer, Path(sys.executable))
    try:
        return list(results(worker, [name], KINDS if "." not in adapter else ["inputs"]))
    finally:
        worker.close()


def test_ours_answers_every_question(monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case]) -> None:
    answers = asked("onnx_backprop:onnx", monkeypatch, cases, "matmul_3d")
    assert {r.question: r.verdict for r in answers} == dict.fromkeys(KINDS, "right"), answers


@pytest.mark.parametrize(("how", "expected"), [("zeros", "wrong"), ("ends", "crashed"), ("computes", "slow")])
def test_processes(how: str, expected: str, monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case]) -> None:
    (answer,) = asked(f"tests.scoreboard.answers:{how}", monkeypatch, cases, "relu", 10 if how == "computes" else 900)
    assert answer.verdict == expected


def test_pages_count_what_was_answered(tmp_path: Path) -> None:
    name, other = list(PRODUCERS)[:2]
    for producer, verdicts in ((name, ["right", "wrong"]), (other, ["right", "right"])):
        lines = [{"producer": producer, "versions": {"python": "3.11"}}]
        lines += [Result(f"case_{n}", "Relu", "", "inputs", 17, v, "<b>&</b>").__dict__ for n, v in enumerate(verdicts)]
        (tmp_path / f"{producer}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report.write(tmp_path, tmp_path)
    text = (tmp_path / "scoreboard.md").read_text()
    assert text.index(f"| {other} |") < text.index(f"| {name} |"), "first is who is right more often"
    assert "1 of 2, **1 wrong**" in text
    assert "`case_1` (inputs)" in text
    html = (tmp_path / "scoreboard_cells.html").read_text()
    data = json.loads(html.partition("const D=")[2].partition(";\nconst $=")[0])
    assert data["cases"][1][3] == ["r----", "w----"]
    assert "http" not in html.replace("http-equiv", ""), "it needs nothing else"


@pytest.mark.parametrize(
    ("producer", "counts", "more", "status"),
    [
        ("onnx-backprop, native", Counter(right=5, sentence=2), (), 0),
        ("onnx-backprop, native", Counter(right=5, wrong=1), (), 1),
        ("onnx-backprop, native", Counter(right=5, badly=1), ("--producer", "tinygrad"), 0),
        ("tinygrad", Counter(wrong=3), (), 0),
        ("tinygrad", None, (), 1),
    ],
)
def test_the_status(
    producer: str, counts: Counter[str] | None, more: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 where a producer that is held to is wrong, or any does not start; nothing where it was not to be asked."""
    monkeypatch.setattr(command, "interpreter", lambda *_: Path(sys.executable))
    monkeypatch.setattr(command, "chosen", lambda _: [])
    monkeypatch.setattr(command, "_ask", lambda w, **_: counts if w.producer.name == producer else Counter(right=1))
    monkeypatch.setattr(sys, "argv", ["scoreboard", "--hold", "onnx-backprop, native", *more])
    assert command.main() == status
