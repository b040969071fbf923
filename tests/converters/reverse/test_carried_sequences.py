"""Sequences that a Loop carries, reads and changes, first and second derivatives; onnx's own cases, by value."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, parser
from onnx.backend.test.loader import load_model_tests

import onnx_backprop as ob
from tests.support.loop_checks import float64_model, loop_errors

SEED = 4
HEAD = """yes = Constant <value = bool {1}> () zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
last = Constant <value_int = -1> () axis = Constant <value_ints = [0]> ()"""
JOINED = "z = ConcatFromSequence <axis = 0> (all)"


def list_loop(body: str, first: str = "s", end: str = "", on: str = "on = Identity(go)") -> str:
    """A Loop of m steps that carries a list q, beginning with `first`, and a state a of two floats."""
    return f"""g (float[2] s, float[2] w, int64 m) => ({"float[K] z" if end else "float[2] y"}) {{ {HEAD}
    begun = SequenceConstruct({first})
    all, y = Loop (m, yes, begun, s) <body: graph = b (int64 i, bool go, seq(float[2]) q, float[2] a) =>
    (bool on, seq(float[2]) q_new, float[2] a_new) {{ {on} {body} }}> {end} }}"""


MODELS = {
    "appends": list_loop("p = Mul(a, w) a_new = Sin(p) q_new = SequenceInsert(q, a_new)", end=JOINED),
    "reads one and appends": list_loop(
        "v = SequenceAt(q, i) p = Mul(v, w) q_new = SequenceInsert(q, p) a_new = Mul(a, p)"),
    "reads the last and appends": list_loop(
        "v = SequenceAt(q, last) h = Mul(v, w) p = Sin(h) q_new = SequenceInsert(q, p) a_new = Identity(a)", end=JOINED),
    "joins all of them": list_loop(
        "h = ConcatFromSequence <axis = 0, new_axis = 1> (q) e = Exp(h) r = ReduceMean <keepdims = 0> (e, axis) "
        "p = Mul(a, w) t = Add(p, r) a_new = Tanh(t) q_new = SequenceInsert(q, a_new)"),
    "takes the first away": list_loop(
        "v = SequenceAt(q, zero) p = Mul(a, v) a_new = Sin(p) t = Mul(p, w) r = SequenceErase(q, zero) "
        "q_new = SequenceInsert(r, t)", first="s, w"),
    "writes one over": list_loop(
        "two = Constant <value_int = 2> () k = Mod(i, two) v = SequenceAt(q, k) p = Mul(v, v) t = Sin(p) "
        "r = SequenceErase(q, k) q_new = SequenceInsert(r, t, k) a_new = Identity(a)", first="s, w", end=JOINED),
    "reads in a branch": list_loop(
        "n = SequenceLength(q) c = Greater(n, one) v = If (c) <then_branch: graph = t () => (float[2] t1) "
        "{ x = SequenceAt(q, last) t1 = Sin(x) }, else_branch: graph = e () => (float[2] e1) { e1 = Mul(a, a) }> "
        "p = Mul(v, w) q_new = SequenceInsert(q, p) a_new = Mul(a, p)"),
    "reads all in a Loop": list_loop(
        "n = SequenceLength(q) v = Loop (n, yes, a) <body: graph = bb (int64 j, bool go2, float[2] c) => "
        "(bool on2, float[2] c_new) { on2 = Identity(go2) x = SequenceAt(q, j) d = Mul(c, x) c_new = Sin(d) }> "
        "p = Mul(v, w) q_new = SequenceInsert(q, p) a_new = Add(a, p)"),
    "elements grow": list_loop(
        "v = SequenceAt(q, last) u = Sin(v) p = Concat <axis = 0> (u, w) q_new = SequenceInsert(q, p) "
        "a_new = Identity(a)", end=JOINED).replace("seq(float[2])", "seq(float[L])"),
    "until a condition": list_loop(
        "v = SequenceAt(q, last) p = Mul(v, w) q_new = SequenceInsert(q, p) a_new = Mul(a, p) "
        "n = ReduceSumSquare <keepdims = 0> (p) most = Constant <value = float {6}> () on = Less(n, most)", end=JOINED,
        on=""),
}  # fmt: skip
MODELS["until a condition"] = MODELS["until a condition"].replace("m, yes", "many, yes").replace(
    HEAD, f"{HEAD} many = Constant <value_int = 50> ()"
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:(of|wrt). the derivative:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [3, 0])
def test_derivatives(name: str, steps: int) -> None:
    rng = np.random.default_rng(SEED)
    feeds = {"s": rng.uniform(0.8, 1.4, 2), "w": rng.uniform(1.0, 1.4, 2), "m": np.array(steps)}
    assert loop_errors(float64_model(MODELS[name]), feeds, ["s", "w"], seed=SEED, order=2) == []


def test_random_steps_are_refused() -> None:
    """They would be run again, and draw other numbers."""
    text = list_loop("r = RandomNormalLike(a) v = SequenceAt(q, i) p = Mul(v, r) q_new = SequenceInsert(q, p) "
                     "a_new = Mul(a, p)")  # fmt: skip
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    with pytest.raises(ob.UnsupportedError, match="RandomNormalLike"):
        ob.backward(model, wrt=["s"])


def test_no_parameter_comes_with_a_list() -> None:
    """The sequence that a Loop is given is given anew, as one of unknown lengths, which takes a constant."""
    text = MODELS["elements grow"].replace("float[2] w, ", "").replace("z) {", "z) <float[2] w = {1, 2}> {")
    graph = ob.training_graph(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}'), loss="mse")
    assert list(graph.parameters) == ["w"]


def run(model: ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))


SLICES = [np.arange(1, n + 1, dtype=np.float32) for n in range(1, 6)]  # what a step appends: x[:i + 1]
OF_SLICES = np.arange(1, 6, dtype=np.float32) * np.array([15, 14, 12, 9, 5], np.float32)
STEPS = {"trip_count": np.array(5), "cond": np.array(True)}
BEGUN = [np.array(7, np.float32)]
# case: what to differentiate by, what it is fed, what seeds it, the gradients
BACKEND: list[tuple[str, list[str] | None, dict[str, Any], list[Any], dict[str, Any]]] = [
    ("loop13_seq", None, {"seq_empty": []}, [s * (k + 1) for k, s in enumerate(SLICES)], {"x_grad": OF_SLICES}),
    ("loop13_seq", ["seq_empty"], {"seq_empty": [SLICES[3]]}, [SLICES[2], *SLICES], {"seq_empty_grad": [SLICES[2]]}),
    ("loop16_seq_none", None, {"opt_seq": None}, [BEGUN[0], *(s * (k + 1) for k, s in enumerate(SLICES))],
     {"x_grad": OF_SLICES, "constant_in_grad": BEGUN[0]}),
    ("loop16_seq_none", None, {"opt_seq": BEGUN}, [BEGUN[0], *(s * (k + 1) for k, s in enumerate(SLICES))],
     {"x_grad": OF_SLICES, "constant_in_grad": np.array(0, np.float32)}),
    ("loop16_seq_none", ["opt_seq"], {"opt_seq": BEGUN}, [BEGUN[0], *SLICES], {"opt_seq_grad": BEGUN}),
    ("loop16_seq_none", ["opt_seq"], {"opt_seq": None}, [BEGUN[0], *SLICES], {"opt_seq_grad": []}),
    ("if_seq", None, {}, [SLICES[4]], {"x_grad": SLICES[4], "y_grad": SLICES[4] * 0}),
    ("if_opt", None, {"cond": np.array(False)}, [SLICES[4]], {"x_grad": SLICES[4]}),
]  # fmt: skip


@cache
def backend_models() -> dict[str, ModelProto]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of onnx's own cases
        return {case.name: case.model for case in load_model_tests(kind="node") if case.model is not None}


@pytest.mark.parametrize("number", range(len(BACKEND)))
def test_backend_cases(number: int) -> None:
    name, wrt, feeds, seeds, want = BACKEND[number]
    model = backend_models()[f"test_{name}"]
    graph = ob.backward(model, wrt=wrt)
    known = {value.name for value in model.graph.input}
    given = {x: value for x, value in {**STEPS, **feeds}.items() if x in known}
    (y,) = model.graph.output
    answers = run(graph, given | {f"{y.name}_grad": seeds})
    assert repr(answers[y.name]) == repr(run(model, given)[y.name])
    assert set(answers) == {y.name, *want}
    for key, value in want.items():
        got = answers[key] if isinstance(value, list) else [answers[key]]
        for a, b in zip(got, value if isinstance(value, list) else [value], strict=True):
            np.testing.assert_array_equal(a, b)
