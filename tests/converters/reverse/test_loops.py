"""Gradients of Scan and Loop, first and second ones, with all states stored and with every k-th."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare
from tests.support.gradient_checks import session_run
from tests.support.loop_checks import float64_model, loop_errors

SEED = 3
YES = "yes = Constant <value = bool {1}> ()"


def loop(body: str, states: str = "s", outputs: str = "y", rows: int = 0, given: str = "") -> str:
    """A Loop of m steps over states of two floats, whose body makes <state>_new and rows r0, r1, …"""
    names = states.split()
    before = "".join(f", float[2] {name}_in" for name in names)
    after = "".join(f", float[2] {name}_new" for name in names) + "".join(f", float[2] r{n}" for n in range(rows))
    return (
        f"{YES} {given} {outputs} = Loop (m, yes, {', '.join(names)}) <body: graph = body (int64 i, bool go{before}) "
        f"=> (bool on{after}) {{ on = Identity(go) {body} }}>"
    )


def graph(inputs: str, outputs: str, nodes: str) -> str:
    return f"g ({inputs}) => ({outputs}) {{ {nodes} }}"


IN = "float[2] s, float[2] w, int64 m"
SINE = "p = Mul(s_in, w) s_new = Sin(p)"
SCAN = """y, z = Scan (s, x) <num_scan_inputs = 1{}, body: graph = b (float[2] s_in, float[2] v) =>
(float[2] s_new, float[2] r) {{ p = Mul(s_in, w) s_new = Add(p, v) r = Mul(s_new, s_in) }}>"""
NESTED = """axis = Constant <value_ints = [0]> ()
y, z = Scan (s, x) <num_scan_inputs = 1, body: graph = outer (float[2] a, float[4,2] xi) => (float[2] a_new, float[2] r) {
  h = Mul(a, w)
  b, u = Scan (h, xi) <num_scan_inputs = 1, body: graph = inner (float[2] c, float[2] v) => (float[2] c_new, float[2] q) {
    d = Mul(c, v) e = Add(d, h) c_new = Tanh(e) q = Mul(c_new, w) }>
  yes = Constant <value = bool {1}> ()
  a_new = Loop (m, yes, b) <body: graph = deep (int64 i, bool go, float[2] k) => (bool on, float[2] k_new) {
    on = Identity(go) l = Mul(k, w)
    k_new = If (flag) <then_branch: graph = t () => (float[2] t1) { t1 = Sin(l) },
                       else_branch: graph = e () => (float[2] e1) { e1 = Mul(l, a) }> }>
  r = ReduceSum <keepdims = 0> (u, axis) }>"""
SHAPES = {"s": (2,), "r": (2,), "w": (2,), "x": (4, 2), "z": (2, 4), "rows": (5, 2), "xs": (3, 4, 2)}

# name: the graph, what to differentiate by, other inputs
MODELS: dict[str, tuple[str, str, dict[str, np.ndarray]]] = {
    "scan": (graph("float[2] s, float[4,2] x, float[2] w", "float[2] y, float[4,2] z", SCAN.format("")), "s x w", {}),
    "a map": (
        graph("float[4,2] x, float[2] w", "float[4,2] y", "y = Scan (x) <num_scan_inputs = 1, body: graph = b "
              "(float[2] v) => (float[2] r) { e = Exp(v) r = Mul(e, w) }>"), "x w", {}),
    "axes and directions": (
        graph("float[2] s, float[2] r, float[4,2] x, float[2,4] z, float[2] w",
              "float[2] y, float[2] q, float[2,4] u, float[4,2] v",
              "y, q, u, v = Scan (s, r, x, z) <num_scan_inputs = 2, scan_input_directions = [1, 0], "
              "scan_input_axes = [0, -1], scan_output_axes = [1, 0], scan_output_directions = [1, 0], body: graph = b "
              "(float[2] a, float[2] c, float[2] xi, float[2] zi) => (float[2] a_new, float[2] c_new, float[2] d, float[2] e)"
              "{ p = Mul(a, w) a_new = Add(p, xi) d = Mul(a_new, zi) t = Tanh(c) c_new = Add(t, a) e = Mul(c_new, xi) }>"),
        "s r x z w", {}),
    "a state that nobody reads": (
        graph("float[2] s, float[4,2] x", "float[2] y", SCAN.format("").replace("Mul(s_in, w)", "Add(s_in, s_in)")),
        "s x", {}),
    "loop": (graph(IN, "float[2] y, float[K,2] z", loop(f"{SINE} r0 = Mul(s_new, s_new)", outputs="y, z", rows=1)),
             "s w", {}),
    "one output of three": (
        graph(f"float[2] r, {IN}", "float[2] y",
              loop("s_new = Mul(s_in, w) r_new = Mul(r_in, s_new) r0 = Exp(s_new)", "s r", "unused, y, z", 1)), "s r w", {}),
    "a state no step changes": (
        graph(IN, "float[2] y, float[2] v", loop("s_new = Mul(s_in, w_in) w_new = Identity(w_in)", "s w", "y, v")), "s w", {}),
    "states that change places": (
        graph(f"float[2] r, {IN}", "float[2] y, float[2] v",
              loop("s_new = Identity(r_in) r_new = Mul(s_in, w)", "s r", "y, v")), "s r w", {}),
    "a state that is read outside too": (graph(IN, "float[2] y", loop("p = Mul(s_in, s) s_new = Mul(p, w)")), "s w", {}),
    "a state that is written over": (graph(IN, "float[2] y", loop("s_new = Mul(w, w)")), "s w", {}),
    "rows of an outer value": (
        graph("float[2] s, float[5,2] rows, int64 m", "float[2] y",
              loop("k = Constant <value_ints = [3, -1]> () a = Gather(rows, i) b = Gather(rows, k) "
                   "c = ReduceSum <keepdims = 0> (b, axis) d = Mul(a, c) e = Mul(s_in, d) f = ReduceMean <keepdims = 0> "
                   "(rows, axis) h = Sin(e) s_new = Mul(h, f)", given="axis = Constant <value_ints = [0]> ()")),
        "s rows", {}),
    "integer and boolean states": (
        graph("float[2] s, float[5,2] rows, int64 m, int64 k", "float[2] y, int64 kf, bool bf",
              f"{YES} y, kf, bf = Loop (m, yes, s, k, yes) <body: graph = b (int64 i, bool go, float[2] a, int64 n, bool o) "
              "=> (bool on, float[2] a_new, int64 n_new, bool o_new) { on = Identity(go) one = Constant <value_int = 1> () "
              "n_new = Add(n, one) o_new = Not(o) v = Gather(rows, n) p = Mul(a, v) q = Add(a, v) a_new = Where(o, p, q) }>"),
        "s rows", {"k": np.array(0)}),
    "steps that depend on the data": (
        graph("float[2] s, float[2] w", "float[2] y",
              f"{YES} m = Constant <value_int = 100> () most = Constant <value = float {{20}}> () "
              "y = Loop (m, yes, s) <body: graph = b (int64 i, bool go, float[2] a) => (bool on, float[2] a_new) "
              "{ a_new = Mul(a, w) n = ReduceSumSquare <keepdims = 0> (a_new) on = Less(n, most) }>"), "s w", {}),
    "inside a branch": (
        graph(f"{IN}, bool flag", "float[2] y", f"y = If (flag) <then_branch: graph = t () => (float[2] v) "
              f"{{ {loop(SINE, outputs='v')} }}, else_branch: graph = e () => (float[2] u) {{ u = Mul(s, s) }}>"),
        "s w", {"flag": np.array(True)}),
    "nested": (
        graph("float[2] s, float[3,4,2] x, float[2] w, int64 m, bool flag", "float[2] y, float[3,2] z", NESTED), "s x w",
        {"flag": np.array(False)}),
}  # fmt: skip


def feeds_of(name: str, steps: int = 3) -> tuple[ModelProto, dict[str, np.ndarray], list[str]]:
    text, wrt, others = MODELS[name]
    model = float64_model(text)
    rng = np.random.default_rng(SEED)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name == "m":
            feeds["m"] = np.array(steps)
        elif value.name in others:
            feeds[value.name] = others[value.name]
        else:
            feeds[value.name] = rng.uniform(0.8, 1.4, [d.dim_value for d in value.type.tensor_type.shape.dim])
    return model, feeds, wrt.split()


@pytest.mark.filterwarnings("ignore:wrt. the derivative:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.filterwarnings("ignore:of. the derivative:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [3, 0])
def test_derivatives(name: str, steps: int) -> None:
    """Of first and second order; with segments of two steps, which 3 and 4 steps do and do not fill."""
    model, feeds, wrt = feeds_of(name, steps)
    if steps == 0 and "m" not in feeds:
        return
    assert loop_errors(model, feeds, wrt, seed=SEED, order=2) == []
    assert loop_errors(model, feeds, wrt, seed=SEED, checkpoint=2) == []
