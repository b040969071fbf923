"""`Gradient` of ai.onnx.preview.training: onnx's own cases, and its documentation's promises, in stock onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import checker, parser
from onnx.backend.test.loader import load_model_tests

import onnx_backprop as ob
from onnx_backprop.command import main as command
from tests.converters.training.gradient_nodes import gradient, model_of, run

CASES = {case.name: case for case in load_model_tests(kind="simple") if case.name.startswith("test_gradient_of_")}


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_the_cases_of_onnx(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.model is None
    assert case.model_dir is not None
    folder = Path(case.model_dir)
    assert command.main(["convert", str(folder / "model.onnx"), "-o", str(tmp_path / "out.onnx"), "--quiet"]) == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    tensors = {
        kind: [
            onnx.numpy_helper.to_array(onnx.load_tensor(str(path)))
            for path in sorted((folder / "test_data_set_0").glob(f"{kind}_*.pb"))
        ]
        for kind in ("input", "output")
    }
    feeds = dict(zip([i.name for i in session.get_inputs()], tensors["input"], strict=True))
    results = session.run(None, feeds)
    assert len(results) == len(tensors["output"]) == 3
    for got, want in zip(results, tensors["output"], strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


def test_the_first_example_of_the_documentation() -> None:
    """W, Z in xs and X in zs; H lies between; the outputs come in the order of xs."""
    model = model_of(
        "g (float[2, 3] X, float[3, 3] W, float[3, 2] Z) => (float[2, 2] Y, float[3, 3] dW, float[3, 2] dZ)"
        "{ H = MatMul(X, W)  Y = Gemm(H, Z) " + gradient("dW, dZ", "W, Z, X", xs="W Z", zs="X", y="Y") + "}"
    )
    rng = np.random.default_rng(0)
    x, w, z = rng.standard_normal((2, 3)), rng.standard_normal((3, 3)), rng.standard_normal((3, 2))
    got = run(model, X=x, W=w, Z=z)
    ones = np.ones((2, 2))
    np.testing.assert_allclose(got["dW"], x.T @ ones @ z.T, rtol=1e-5)
    np.testing.assert_allclose(got["dZ"], (x @ w).T @ ones, rtol=1e-5)


def test_outputs_may_be_skipped() -> None:
    model = model_of(
        "g (float[2] a, float[2] b) => (float[2] db) { c = Mul(a, b) "
        + gradient('"", db', "a, b", xs="a b", y="c")
        + "}"
    )
    np.testing.assert_array_equal(run(model, a=[2, 3], b=[5, 7])["db"], [2, 3])
    model.graph.node[1].output[:] = ["db"]
    np.testing.assert_array_equal(run(model, a=[2, 3], b=[5, 7])["db"], [5, 7])


@pytest.mark.parametrize("names", ["zs", "nobody"])
def test_what_is_not_in_xs_is_held_constant(names: str) -> None:
    """h depends on a, but is held: d(a·h)/da is h alone."""
    node = gradient("da", "a, h", xs="a", zs="h", y="y") if names == "zs" else gradient("da", "a", xs="a", y="y")
    model = model_of("g (float[2] a) => (float[2] da) { h = Exp(a)  y = Mul(a, h) " + node + "}")
    a = np.array([0.5, -1])
    expected = np.exp(a) if names == "zs" else np.exp(a) * (1 + a)
    np.testing.assert_allclose(run(model, a=a)["da"], expected, rtol=1e-6)


def test_the_gradient_of_an_intermediate_tensor() -> None:
    model = model_of(
        "g (float[2] a, float[2] z) => (float[2] dh, float[2] dz) { h = Exp(a)  s = Mul(h, h)  y = Mul(s, z) "
        + gradient("dh, dz", "h, z", xs="h z", y="y")
        + "}"
    )
    a, z = np.array([0.5, -1]), np.array([2.0, 3])
    got = run(model, a=a, z=z)
    np.testing.assert_allclose(got["dh"], 2 * np.exp(a) * z, rtol=1e-6)
    np.testing.assert_allclose(got["dz"], np.exp(2 * a), rtol=1e-6)


def test_other_values_than_the_named_tensors() -> None:
    """Dy/dh where h is h_1 and z is z_1, with y itself as it was."""
    model = model_of(
        "g (float[2] a, float[2] z, float[2] h_1, float[2] z_1) => (float[2] y, float[2] dh, float[2] dz)"
        "{ h = Exp(a)  s = Mul(h, h)  y = Mul(s, z) " + gradient("dh, dz", "h_1, z_1", xs="h z", y="y") + "}"
    )
    a, z, h_1, z_1 = np.array([[0.5, -1], [2, 3], [4, 5], [6, 7]])
    got = run(model, a=a, z=z, h_1=h_1, z_1=z_1)
    np.testing.assert_allclose(got["y"], np.exp(2 * a) * z, rtol=1e-6)
    np.testing.assert_allclose(got["dh"], 2 * h_1 * z_1, rtol=1e-6)
    np.testing.assert_allclose(got["dz"], h_1**2, rtol=1e-6)


def test_one_value_for_two_names_and_names_exchanged() -> None:
    text = "g (float[2] a, float[2] b) => (float[2] da, float[2] db) { s = Mul(a, a)  y = Mul(s, b) "
    a, b = np.array([2.0, 3]), np.array([5.0, 7])
    both = run(model_of(text + gradient("da, db", "b, b", xs="a b", y="y") + "}"), a=a, b=b)
    np.testing.assert_allclose(both["da"], 2 * b * b, rtol=1e-6)
    np.testing.assert_allclose(both["db"], b * b, rtol=1e-6)
    exchanged = run(model_of(text + gradient("da, db", "b, a", xs="a b", y="y") + "}"), a=a, b=b)
    np.testing.assert_allclose(exchanged["da"], 2 * b * a, rtol=1e-6)
    np.testing.assert_allclose(exchanged["db"], b * b, rtol=1e-6)


def test_other_values_reach_into_sub_graphs() -> None:
    model = model_of(
        "g (float[2] a, float[2] a_1, bool c) => (float[2] da) { h = Exp(a) y = If(c) <"
        "then_branch = t () => (float[2] p) { p = Mul(h, h) }, else_branch = e () => (float[2] q) { q = Neg(h) }>"
        + gradient("da", "a_1", xs="a", y="y")
        + "}"
    )
    expanded = ob.expand_gradients(model)
    session = onnxruntime.InferenceSession(expanded.SerializeToString(), providers=["CPUExecutionProvider"])
    a, a_1 = np.array([1, 2], np.float32), np.array([0.5, -1], np.float32)
    for c, expected in ((True, 2 * np.exp(2 * a_1)), (False, -np.exp(a_1))):
        (got,) = session.run(None, {"a": a, "a_1": a_1, "c": np.array(c)})
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6)


def test_a_gradient_listed_before_what_it_differentiates() -> None:
    """The node's inputs are all that the order of the graph has to respect."""
    model = model_of(
        "g (float[2] a) => (float[2] y, float[2] n) {"
        + gradient("da", "a", xs="a", y="y")
        + "n = Neg(da)  y = Mul(a, a) }"
    )
    got = run(model, a=[2, 3])
    np.testing.assert_array_equal(got["n"], [-4, -6])
    np.testing.assert_array_equal(got["y"], [4, 9])


@pytest.mark.parametrize(
    "text",
    [
        "y = Mul(b, b)",
        "c = Shape(a)  f = Cast<to = 1>(c)  y = Mul(b, f)",
        "c = Floor(a)  y = Mul(b, c)",
        "c = Greater(a, b)  f = Cast<to = 1>(c)  y = Mul(b, f)",
    ],
)
def test_a_derivative_that_is_zero(text: str) -> None:
    model = model_of(
        f"g (float[1] a, float[1] b) => (float[1] da) {{ {text} " + gradient("da", "a, b", xs="a b", y="y") + "}"
    )
    np.testing.assert_array_equal(run(model, a=[2], b=[3])["da"], np.zeros(1, np.float32), strict=True)


def test_y_itself() -> None:
    model = model_of(
        "g (float[2] a, float[2] b) => (float[2] da, float[2] db) {" + gradient("da, db", "a, b", xs="a b", y="a") + "}"
    )
    got = run(model, a=[2, 3], b=[4, 5])
    np.testing.assert_array_equal(got["da"], [1, 1])
    np.testing.assert_array_equal(got["db"], [0, 0])


def test_operators_of_our_domain_get_their_kernels(tmp_path: Path) -> None:
    model = model_of(
        "g (float[N, 2, 6, 6] x, float[3, 2, 3, 3] w) => (float[3, 2, 3, 3] dw, float[N, 2, 6, 6] dx)"
        "{ y = Conv<pads = [1, 1, 1, 1]>(x, w) " + gradient("dw, dx", "w, x", xs="w x", y="y") + "}"
    )
    expanded = ob.expand_gradients(model)
    assert {node.op_type for node in expanded.graph.node if node.domain == ob.DOMAIN} == {
        "ConvolutionBackwardData",
        "ConvolutionBackwardWeights",
    }
    expected = ob.backward(model_of("g (float[N, 2, 6, 6] x, float[3, 2, 3, 3] w) => (float[N, 3, 6, 6] y)"
                                    "{ y = Conv<pads = [1, 1, 1, 1]>(x, w) }"), wrt=["w", "x"])  # fmt: skip
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 2, 6, 6)), "w": rng.standard_normal((3, 2, 3, 3))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    ours = ob.session(expanded).run(["dw", "dx"], feeds)
    theirs = ob.session(expected).run(["w_grad", "x_grad"], feeds | {"y_grad": np.ones((2, 3, 6, 6), np.float32)})
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_a_training_step_in_one_graph() -> None:
    """Gradient feeds Momentum; the loss falls when the outputs are fed back."""
    model = model_of(
        "step (float[8, 3] X, float[8, 1] L, float[3, 1] W, float[3, 1] V, float R, int64 T)"
        " => (float O, float[3, 1] W_new, float[3, 1] V_new)"
        "{ Y = MatMul(X, W)  e = Sub(Y, L)  s = Mul(e, e)  O = ReduceMean<keepdims = 0>(s) "
        + gradient("dW", "W, X, L", xs="W", zs="X L", y="O")
        + "W_new, V_new = ai.onnx.preview.training.Momentum<alpha = 0.9, beta = 1.0, norm_coefficient = 0.0,"
        ' mode = "nesterov">(R, T, W, dW, V) }'
    )
    expanded = ob.expand_gradients(model)
    checker.check_model(expanded, full_check=True)
    session = onnxruntime.InferenceSession(expanded.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3)).astype(np.float32)
    label = x @ np.array([[1], [-2], [0.5]], np.float32)
    w = v = np.zeros((3, 1), np.float32)
    losses = []
    for t in range(60):
        feeds = {"X": x, "L": label, "W": w, "V": v, "R": np.array(0.05, np.float32), "T": np.array(t)}
        loss, w, v = map(np.asarray, session.run(None, feeds))
        losses.append(float(loss))
    assert losses[-1] < 1e-3 * losses[0]


def test_a_model_without_such_nodes() -> None:
    model = model_of("g (float[2] a) => (float[2] y) { y = Exp(a) }")
    np.testing.assert_allclose(run(model, a=[0, 1])["y"], np.exp([0, 1]), rtol=1e-6)


REFUSED = {
    "unknown x": ("y = Exp(a)", gradient("d", "a", xs="aa", y="y"), r"xs: .*got 'aa'\. Did you mean 'a'"),
    "unknown y": ("y = Exp(a)", gradient("d", "a", xs="a", y="z"), r"y: .*got 'z'"),
    "no xs": ("y = Exp(a)", 'd = ai.onnx.preview.training.Gradient<xs = [""], y = "y">(a)', r"xs: .*got ''"),
    "twice": ("y = Exp(a)", gradient("d", "a, a", xs="a a", y="y"), r"different names, got a, a"),
    "inputs": ("y = Exp(a)", gradient("d", "a, b", xs="a", y="y"), r"expected 1 inputs.*\['a', 'b'\]"),
    "outputs": ("y = Exp(a)", gradient("d, e", "a", xs="a", y="y"), r"at most 1 outputs"),
    "integer": ("y = Gather(a, n)", gradient("d", "n", xs="n", y="y"), r"'n' has type INT64"),
    "itself": ("y = Exp(d)", gradient("d", "a", xs="a", y="y"), r"depends on its own output"),
    "random": ("y = Bernoulli(a)", gradient("d", "a", xs="a", y="y"), r"Bernoulli 'y' stops it .*drawn at random"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    nodes, node, message = REFUSED[case]
    text = f"g (float[2] a, float[2] b, int64[2] n) => (float[2] d) {{ {node} {nodes} }}"
    if case != "itself":
        text = f"g (float[2] a, float[2] b, int64[2] n) => (float[2] d) {{ {nodes} {node} }}"
    with pytest.raises(ob.InvalidModelError, match=rf"Gradient '\w+': .*{message}"):
        ob.expand_gradients(model_of(text))


def test_inside_a_sub_graph_or_a_function() -> None:
    inner = gradient("d", "p", xs="p", y="q")
    branch = f"() => (float[2] d) {{ p = Exp(a)  q = Exp(p) {inner} }}"
    model = model_of(
        f"g (float[2] a, bool c) => (float[2] y) {{ y = If(c) <then_branch = t {branch}, else_branch = e {branch}> }}"
    )
    with pytest.raises(ob.UnsupportedError, match="Gradient 'gradient': .*inside a sub-graph"):
        ob.expand_gradients(model)
    function = parser.parse_function(
        '<domain: "local", opset_import: ["": 18, "ai.onnx.preview.training": 1]>'
        f" f (p) => (d) {{ q = Exp(p) {inner} }}"
    )
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "local": 1]> g (float[2] a) => (float[2] y) { y = local.f(a) }'
    )
    model.functions.append(function)
    with pytest.raises(ob.UnsupportedError, match="Gradient 'gradient': .*a function"):
        ob.expand_gradients(model)


def test_operators_without_a_rule_are_listed() -> None:
    model = model_of(
        "g (float[1, 1, 4, 4] x, float[1, 5] roi) => (float[1, 1, 4, 4] dx) "
        "{ y = MaxRoiPool<pooled_shape = [2, 2]>(x, roi) " + gradient("dx", "x", xs="x", y="y") + "}"
    )
    with pytest.raises(ob.UnsupportedOpError, match="MaxRoiPool: 'y'"):
        ob.expand_gradients(model)


def test_the_command_expands_and_differentiates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --wrt or --loss the Gradient nodes are expanded first, so that what they compute is differentiated too."""
    source, target = str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")
    model = model_of(
        "g (float x) => (float y, float dx) { s = Mul(x, x)  y = Mul(s, x) " + gradient("dx", "x", xs="x", y="y") + "}"
    )
    onnx.save(model, source)
    assert command.main(["convert", source, "-o", target]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["inputs: x", "outputs: y, dx"]
    assert command.main(["convert", source, "-o", target, "--force", "--wrt", "x", "--of", "dx", "--quiet"]) == 0
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    results = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"x": np.array(5, np.float32)}), strict=True)
    )
    assert results == {"y": 125, "dx": 75, "x_grad": 30}
