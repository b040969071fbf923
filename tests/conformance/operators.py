"""Every operator of ONNX's default domain with its verdict: right, no derivative, or refused by name.

Right: single-operator cases, those of the gradient rules' own tests and a few more, whose gradients are the central
differences of the forward; once with all dimensions known at conversion and once with all of them unknown. No
derivative: a graph through the operator lets no gradient through, and says why. Refused by name: `backward` raises an
UnsupportedError that names the operator. `python -m tests.conformance.operators` checks everything and prints the table.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, defs, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.registry import NO_GRADIENT
from tests.conformance.operators_refused import REFUSED, STOPS
from tests.support.gradient_checks import (
    LAST_OPSET,
    LINEAR,
    SMOOTH,
    Case,
    Oracle,
    case,
    check_cases,
    declare_output,
    session_run,
)

FORMS = ("static", "symbolic")
FIRST_OPSET = 18  # what older models are converted to
FLOATS = ("float", "double")

# What has tests of another form, or a grid of its own, and here a few cases to stand in the table
IMAGE = (1, 2, 4, 5)
COARSE = Oracle("onnxruntime", 1.0, 1e-2)  # the gradient passes through 8 bits
MORE = [
    *(
        case(f"y = Conv <{attributes}> (x, w{bias})", x=IMAGE, w=w, **given, oracle=LINEAR)
        for attributes, w in [("pads = [1, 0, 2, 1]", (3, 2, 3, 2)), ("group = 2, strides = [2, 1]", (4, 1, 2, 2))]
        for bias, given in [("", {}), (", b", {"b": (w[0],)})]
    ),
    case('y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w)', x=IMAGE, w=(1, 2, 3, 3), oracle=LINEAR),
    case("y = ConvTranspose <strides = [2, 1], pads = [1, 0, 0, 1]> (x, w, b)", x=IMAGE, w=(2, 3, 3, 2), b=(3,),
         oracle=LINEAR),
    case("y = ConvTranspose <group = 2, dilations = [1, 2]> (x, w)", x=IMAGE, w=(2, 1, 2, 2), oracle=LINEAR),
    *(
        case(f'y = Resize <mode = "{mode}"{more}> (x, "", scales)', x=IMAGE, wrt=["x"], oracle=LINEAR,
             constants={"scales": np.array([1, 1, 2.5, 0.6], np.float32)}, skips=["fed"])
        for mode, more in [("nearest", ""), ("linear", ""), ("linear", ", antialias = 1"), ("cubic", "")]
    ),
    case('y = Resize <mode = "cubic", exclude_outside = 1> (x, "", "", sizes)', x=IMAGE, wrt=["x"], oracle=LINEAR,
         constants={"sizes": np.array([1, 2, 7, 3])}, skips=["fed"]),
    *(
        case(f"z = Cast <to = {element}> (x) y = Cast <to = 1> (z)", op="Cast", x=(2, 3), oracle=COARSE)
        for element in (10, 11, 16)
    ),
    *(
        case(f'y = {op} <reduction = "{reduction}"{ignore}> (x, labels{weights})', x=(3, 4, 2), wrt=["x"], oracle=SMOOTH,
             constants={"labels": np.array([[0, 3], [2, 1], [1, 1]]), **given})
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for reduction in ("mean", "sum", "none")
        for ignore in ("", ", ignore_index = 1")
        for weights, given in [("", {}), (", w", {"w": np.array([0.5, 2, 1, 3], np.float32)})]
    ),
    *(
        case(f"y = DequantizeLinear <axis = {axis}> (q, s, z)", s=scale, wrt=["s"], oracle=LINEAR,
             constants={"q": np.array([[-3, 4, 100], [7, 0, -128]], np.int8), "z": zero})
        for axis, scale, zero in [(1, (), np.int8(3)), (1, (3,), np.int8([0, 5, -7])), (0, (2,), np.int8([1, -1]))]
    ),
    *(
        case("n = Not (c) y = If (n) <then_branch: graph = a () => (float[3] t) { t = Mul(x, w) }, "
             "else_branch: graph = b () => (float[3] e) { e = Sub(w, x) }>",
             op="If", x=(3,), w=(3,), constants={"c": np.array(not taken)}, note=str(taken))
        for taken in (True, False)
    ),
]  # fmt: skip


@cache
def cases() -> list[Case]:
    """The cases in the lists of every tests/converters/rules/test_*.py, and the ones above."""
    collected: list[Case] = []
    for path in sorted((Path(__file__).parents[1] / "converters" / "rules").glob("test_*.py")):
        module = importlib.import_module(f"tests.converters.rules.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, list) and value and all(isinstance(one, Case) for one in value):
                collected += value
    return collected + MORE


@cache
def operators() -> dict[str, list[int]]:
    """Every operator of the default domain at the last opset, with the versions that models can hold."""
    newest = {s.name: s for s in defs.get_all_schemas_with_history() if not s.domain and s.since_version <= LAST_OPSET}
    names = sorted(name for name in newest if not defs.get_schema(name, LAST_OPSET, "").deprecated)
    return {
        name: sorted(
            {
                defs.get_schema(name, opset, "").since_version
                for opset in range(FIRST_OPSET, LAST_OPSET + 1)
                if defs.has(name, opset, "")
            }
        )
        for name in names
    }


def takes_floats(op_type: str) -> bool:
    """Whether an input of an operator can be a float tensor, or a sequence or an optional of such."""
    schema = defs.get_schema(op_type, LAST_OPSET, "")
    types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return any(
        any(word in one for word in FLOATS for one in types.get(port.type_str, [port.type_str]))
        for port in schema.inputs
    ) or bool({"then_branch", "body"} & set(schema.attributes))  # sub-graphs read what they like


BATCH = 64  # cases


def verdicts(chosen: Sequence[Case], form: str) -> list[str]:
    """`verdict` of each; those of a batch are checked together, and each by itself where one of them fails."""
    result: list[str] = []
    for begin in range(0, len(chosen), BATCH):
        batch = [one for one in chosen[begin : begin + BATCH] if form not in one.skips]
        try:
            check_cases(batch, form)
            alone = False
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - which one it is, and why, says each alone
            alone = True
        judge = verdict if alone else _expected
        result += [judge(one, form) for one in chosen[begin : begin + BATCH]]
    return result


def _expected(one: Case, form: str) -> str:
    return "not run" if form in one.skips else "refused" if form in one.refuses else "right"


def verdict(one: Case, form: str) -> str:
    """`right`, `refused` (where the case says so), `not run` (by onnxruntime), or what is wrong."""
    if form not in one.skips:
        try:
            check_cases([one], form)
        except (Exception, pytest.fail.Exception) as e:  # noqa: BLE001 - whatever it is, it is the answer
            return f"{one}, {form}: {type(e).__name__}: {e}"
    return _expected(one, form)


FEEDS = {"x": np.linspace(-0.9, 2.3, 12, dtype=np.float32).reshape(3, 4)}


def model_of(text: str, opset: int) -> ModelProto:
    """Nodes in ONNX text from a float tensor x of shape (3, 4) to y, as a model."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[3,4] x) => (float[] y) {{ {text} }}'
    )
    declare_output(model, FEEDS)
    return model


def through(text: str, opset: int) -> str:
    """What a strict `backward` answers for the nodes of `model_of`, which onnxruntime must run."""
    model = model_of(text, opset)
    session_run(model)(FEEDS)
    try:
        ob.backward(model, wrt=["x"], strict=True)
    except (ob.UnsupportedError, ob.InvalidArgumentError) as e:
        return f"{type(e).__name__}: {e}"
    return "differentiated"


@dataclass
class Row:
    """One operator: its verdict, the counts of its cases per form, and what is wrong."""

    verdict: str
    note: str = ""
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)


def report(chosen: Iterable[Case] | None = None) -> dict[str, Row]:
    """A row for every operator. chosen: the cases to run, default all."""
    run = cases() if chosen is None else list(chosen)
    answers: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for form in FORMS:
        for one, answer in zip(run, verdicts(run, form), strict=True):
            answers[one.op].append((form, answer))
    return {name: _row(name, answers[name]) for name in operators()}


def _row(name: str, answers: list[tuple[str, str]]) -> Row:
    """answers: by form, of `verdict`."""
    if answers:
        row = Row("right")
        for form, answer in answers:
            right = answer in ("right", "refused", "not run")
            row.counts[form][answer if right else "wrong"] += 1
            row.wrong += [] if right else [answer]
        row.verdict = "wrong" if row.wrong else "right"
        return row
    if name in REFUSED:
        return _refused(name)
    stop = NO_GRADIENT.get(("", name))
    if not takes_floats(name):
        return Row("no derivative", "it takes no float tensor" if stop is None else stop.reason)
    return _refused(name) if stop is None else _without_derivative(name, stop.reason)


def _without_derivative(name: str, why: str) -> Row:
    row = Row("no derivative", why)
    if name not in STOPS:
        row.wrong.append(f"{name}: no case shows that no gradient flows")
    for text, opset in STOPS.get(name, []):
        answer = through(text, opset)
        if not (answer.startswith("InvalidArgumentError") and f"{name} '" in answer and row.note in answer):
            row.wrong.append(f"{name}: {answer}")
    return row


def _refused(name: str) -> Row:
    row = Row("refused")
    if name not in REFUSED:
        row.wrong.append(f"{name}: there is no case of it")
    for text, opset in REFUSED.get(name, []):
        answer = through(text, opset)
        if not (answer.startswith("Unsupported") and name in answer):
            row.wrong.append(f"{name}: {answer}")
    return row


def section(rows: dict[str, Row]) -> str:
    """The page's part: counts by verdict, then one line per operator."""
    total = Counter(row.verdict for row in rows.values())
    run = {form: sum((row.counts[form] for row in rows.values()), Counter[str]()) for form in FORMS}
    lines = [
        "## Operators",
        "",
        f"Every operator of ONNX's default domain at opset {LAST_OPSET}: {total['right']} right, "
        f"{total['no derivative']} without derivative, {total['refused']} refused by name, {total['wrong']} wrong. "
        f"The {run['static'].total()} cases are single nodes, some with a Reshape or a Concat behind them. Their gradients are "
        "compared with central differences of the forward, of onnx's reference evaluator in float64 if it agrees with "
        "onnxruntime, else of onnxruntime itself; once with every dimension known at conversion and once with none. "
        "Older operators (Scatter, Upsample) and older opsets are converted first.",
        "",
        "| operator | versions | verdict | known shapes | unknown shapes | |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [", ".join(f"{n} {what}" for what, n in sorted(row.counts[form].items())) for form in FORMS]
        versions = ", ".join(map(str, operators()[name]))
        lines.append(f"| {name} | {versions} | {row.verdict} | {' | '.join(cells)} | {row.note} |")
    lines.append(f"| **all** | | | {' | '.join(_summary(run[form]) for form in FORMS)} | |")
    return "\n".join(lines) + "\n"


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"**{n}** {what}" for what, n in sorted(counts.items()))


if __name__ == "__main__":
    reports = report()
    print(section(reports))
    print("\n".join(f"WRONG: {what}" for row in reports.values() for what in row.wrong))
