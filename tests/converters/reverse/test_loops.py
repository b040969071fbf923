"""Gradients of Scan and Loop, first and second ones, with all states stored and with every k-th."""

from __future__ import annotations

from typing import Any

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


def test_states_that_change_their_shape_are_refused() -> None:
    text = graph(IN, "float[K] y", loop("s_new = Concat <axis = 0> (s_in, w)")).replace(
        "float[2] s_new", "float[L] s_new"
    )
    with pytest.raises(
        ob.UnsupportedError, match=r"Loop.*'s_in' has the shape \[2\] before a step and \[4\] behind it"
    ):
        ob.backward(float64_model(text), wrt=["s"])


def test_a_state_that_grows_by_broadcasting_is_refused() -> None:
    """It would be wrong without an error: the first step alone stretches it."""
    text = graph("float[1] s, float[2] w, int64 m", "float[K] y", loop("s_new = Mul(s_in, w)"))
    text = text.replace("float[2] s_new", "float[L] s_new").replace("float[2] s_in", "float[L] s_in")
    with pytest.raises(ob.UnsupportedError, match=r"has the shape \[1\] before a step and \[2\] behind it"):
        ob.backward(float64_model(text), wrt=["s"])
    hidden = float64_model(text.replace("float[1] s", "float[A] s").replace("float[2] w", "float[B] w"))
    run = session_run(ob.backward(hidden, wrt=["s"]))
    feeds = {"s": np.ones(1), "w": np.ones(2), "m": np.array(3), "y_grad": np.ones(2)}
    with pytest.raises(Exception, match="Inconsistent shape in loop output"):
        run(feeds)


def test_a_state_that_keeps_its_shape_has_it() -> None:
    """What inference leaves open, in the body and behind it."""
    model = prepare(parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]>' + graph("float[N,3] s, float[3] w, int64 m", "float[A,B] y",
        loop("a = Mul(s_in, w) s_new = Tanh(a)").replace("float[2]", "float[P,Q]")))
    )  # fmt: skip
    (y,) = model.graph.output
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["N", 3]


def test_missing_rules_inside_are_named() -> None:
    text = graph("float[2] s, float[2] w, int64 m", "float[2] y", loop("s_new = Foo(s_in)"))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18, "local" : 1]> {text.replace("Foo", "local.Foo")}'
    )
    with pytest.raises((ob.UnsupportedOpError, ob.InvalidArgumentError), match="local::Foo|s_new"):
        ob.backward(model, wrt=["s"])


@pytest.mark.parametrize("steps", [-1, 2.5, True])
def test_no_number_of_steps(steps: Any) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="checkpoint: expected a number of steps"):
        ob.backward(feeds_of("scan")[0], wrt=["s"], checkpoint=steps)


@pytest.mark.parametrize("kernels", ["onnx", "numpy", "native"])
@pytest.mark.parametrize("checkpoint", [0, 2])
def test_our_operators_inside_a_body(kernels: str, checkpoint: int) -> None:
    """Their kernels run in sub-graphs of every route."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    g (float[1,2,4,4] s, float[2,2,3,3] w, float[3,1,2,4,4] x) => (float[1,2,4,4] y) {
    y = Scan (s, x) <num_scan_inputs = 1, body: graph = b (float[1,2,4,4] a, float[1,2,4,4] v) => (float[1,2,4,4] a_new) {
      p = Conv <pads = [1, 1, 1, 1]> (a, w) q = Add(p, v) r = Softmax(q) a_new = Sub(q, r) }> }""")
    rng = np.random.default_rng(SEED)
    shapes = {"s": (1, 2, 4, 4), "w": (2, 2, 3, 3), "x": (3, 1, 2, 4, 4), "y_grad": (1, 2, 4, 4)}
    feeds = {name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    training = ob.backward(model, wrt=["w"], kernels=kernels, checkpoint=checkpoint)
    gradient = ob.session(training).run(["w_grad"], feeds)[0]
    forward = session_run(model)
    v, h = rng.uniform(-1, 1, shapes["w"]).astype(np.float32), np.float32(2**-7)
    above, below = (forward({**feeds, "w": feeds["w"] + sign * h * v})[0] for sign in (1, -1))
    want = float((feeds["y_grad"] * (above.astype(float) - below)).sum()) / (2 * h)
    assert abs(float((gradient * v).sum()) - want) < 2e-3 * max(1, abs(want)), f"seed {SEED}"


def test_a_recurrent_node_and_its_cell_as_a_scan() -> None:
    """The same gradients, to the last digits, of LSTM and of a Scan of its cell."""
    t, b, n, h = 5, 2, 3, 4
    inputs = f"float[{t},{b},{n}] x, float[1,{4 * h},{n}] w, float[1,{4 * h},{h}] r, float[1,{8 * h}] bias"
    node = f"all, last, cell = LSTM <hidden_size = {h}> (x, w, r, bias) y = Squeeze(all, one)"
    cell = f"""w0 = Squeeze(w, zero) r0 = Squeeze(r, zero) b0 = Squeeze(bias, zero) b1, b2 = Split <num_outputs = 2> (b0)
    added = Add(b1, b2) wt = Transpose(w0) rt = Transpose(r0)
    lengths = Constant <value_ints = [{b}, {h}]> () h0 = ConstantOfShape(lengths)
    hl, cl, y = Scan (h0, h0, x) <num_scan_inputs = 1, body: graph = body (float[{b},{h}] hi, float[{b},{h}] ci,
    float[{b},{n}] xi) => (float[{b},{h}] hn, float[{b},{h}] cn, float[{b},{h}] yi) {{ p = MatMul(xi, wt) q = MatMul(hi, rt)
    pq = Add(p, q) a = Add(pq, added) ai, ao, af, ak = Split <axis = -1, num_outputs = 4> (a) i = Sigmoid(ai) o = Sigmoid(ao)
    f = Sigmoid(af) k = Tanh(ak) kept = Mul(f, ci) new = Mul(i, k) cn = Add(kept, new) tc = Tanh(cn) hn = Mul(o, tc)
    yi = Identity(hn) }}>"""
    head = "zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()"
    rng = np.random.default_rng(SEED)
    results: list[dict[str, np.ndarray]] = []
    feeds: dict[str, np.ndarray] = {"y_grad": rng.uniform(-1, 1, (t, b, h)).astype(np.float32)}
    for nodes in (node, cell):
        text = graph(inputs, f"float[{t},{b},{h}] y", f"{head} {nodes}")
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
        for value in model.graph.input:
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            feeds.setdefault(value.name, rng.uniform(-0.5, 0.5, shape).astype(np.float32))
        training = ob.backward(model, wrt=["x", "w", "r", "bias"])
        results.append(dict(zip([o.name for o in training.graph.output], session_run(training)(feeds), strict=True)))
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], rtol=1e-5, atol=1e-6, err_msg=name)


RATE = """g (float[T,B,3] x) => (float[B,1] y) <float[3,4] w = {0.3, -0.2, 0.5, 0.1, 0.7, -0.4, 0.2, 0.6, -0.1, 0.4, 0.3, -0.5},
float[4,1] o = {0.3, -0.2, 0.5, 0.8}> { rows = Shape <start = 1, end = 2> (x) four = Constant <value_ints = [4]> ()
lengths = Concat <axis = 0> (rows, four) h0 = ConstantOfShape(lengths)
h = Scan (h0, x) <num_scan_inputs = 1, body: graph = b (float[B,4] a, float[B,3] v) => (float[B,4] a_new)
<float[4] bias = {0.1, 0.3, -0.2, 0.4}> { p = MatMul(v, w) q = Add(p, a) r = Add(q, bias)
f = Constant <value = float[4] {0.9, -1.1, 0.7, 1.2}> () s = Mul(r, f) a_new = Tanh(s) }> y = MatMul(h, o) }"""


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_weights_in_a_body_are_trained(checkpoint: int) -> None:
    """Initializers of the outer graph, of the body, and Constants; the exported model is as it came."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {RATE}')
    result = ob.training_graph(model, loss="mse", optimizer="adam", checkpoint=checkpoint)
    assert set(result.parameters) == {"w", "o", "bias", "f"}
    rng = np.random.default_rng(SEED)
    x = rng.uniform(-1, 1, (7, 16, 3)).astype(np.float32)
    target = np.sin(x.sum(axis=(0, 2)))[:, None].astype(np.float32)
    trainer = ob.Trainer(result, learning_rate=0.02)
    losses = [float(trainer.step(x=x, target=target)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0], f"{losses[0]} -> {losses[-1]}, seed {SEED}"
    exported = result.inference_model(trainer.parameters())
    onnx.checker.check_model(exported, full_check=True)
    assert [len(node.output) for node in exported.graph.node if node.op_type == "Scan"] == [1]
    y = session_run(exported)({"x": x})[0]
    assert float(((y - target) ** 2).mean()) < 1.1 * losses[-1]


def stacked(model: ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """The most rows that a Loop or a Scan of the main graph stacks in a run."""
    shown = ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    names = [name for n in model.graph.node if n.op_type in ("Loop", "Scan") for name in n.output if name]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return max(value.size for value in session_run(shown)(feeds))


def test_checkpoint_stores_every_kth_state() -> None:
    """100 steps of 50 numbers: 100 states without, 10 and less beside the states of one segment with checkpoint=10."""
    text = graph("float[50] s, float[50] w, int64 m", "float[50] y", loop(SINE).replace("float[2]", "float[50]"))
    feeds = {"s": np.ones(50), "w": np.ones(50), "m": np.array(100), "y_grad": np.ones(50)}
    sizes = [stacked(ob.backward(float64_model(text), wrt=["s", "w"], checkpoint=k), feeds) for k in (0, 10)]
    assert sizes == [100 * 50, 10 * 50]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_segments_of_a_scan_backwards_along_its_first_axis(steps: int) -> None:
    """Found by `make search`: onnxruntime made an empty Slice of the Gather by a Range down to 0."""
    model = float64_model(
        f"g (float[3] s0, float[K,3] xs) => (float[3] s, float[{steps},3] y) {{ s, y = Scan <num_scan_inputs = 1,"
        " scan_input_directions = [1], scan_output_directions = [1], body = b (float[3] si, float[3] xi)"
        " => (float[3] so, float[3] yo) { so = Mul(si, xi) yo = Sin(so) }> (s0, xs) }"
    )
    rng = np.random.default_rng(steps)
    feeds = {"s0": rng.uniform(0.5, 1.5, 3), "xs": rng.uniform(0.5, 1.5, (steps, 3))}
    assert loop_errors(model, feeds, ["s0", "xs"], seed=SEED, checkpoint=2) == []
