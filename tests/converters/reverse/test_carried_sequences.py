"""Sequences that a Loop carries, reads and changes, first and second derivatives, tangents."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.loop_checks import float64_model, loop_errors, run

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


@pytest.mark.parametrize("name", MODELS)
def test_tangents(name: str) -> None:
    model, rng, h = float64_model(MODELS[name]), np.random.default_rng(SEED), 1e-6
    feeds = {"s": rng.uniform(0.8, 1.4, 2), "w": rng.uniform(1.0, 1.4, 2), "m": np.array(3)}
    along = {name: rng.uniform(-1, 1, 2) for name in "sw"}
    (y,) = (value.name for value in model.graph.output)
    tangents = {f"{name}_tangent": v for name, v in along.items()}
    got = run(ob.jvp(model, ["s", "w"], [y]), {**feeds, **tangents})[f"{y}_tangent"]
    above, below = (run(model, {**feeds, **{n: feeds[n] + e * v for n, v in along.items()}})[y] for e in (h, -h))
    np.testing.assert_allclose(got, (above - below) / (2 * h), rtol=1e-7, atol=1e-8, err_msg=f"seed {SEED}")


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
