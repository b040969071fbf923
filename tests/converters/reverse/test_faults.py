"""What onnxruntime's optimisers break: what we write runs in stock onnxruntime, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.functions.half import NOTE

W = (np.random.default_rng(0).standard_normal((16, 16)) / 4).astype(np.float16)
LOADS = "import sys, onnxruntime; [onnxruntime.InferenceSession(path) for path in sys.argv[1:]]"
# MatmulTransposeFusion tears each of them: on the left and the right, through a Cast
PRODUCTS = {
    "left": ("t = Transpose <perm = [1, 0, 2]> (x) y = MatMul(t, w)", "float16[a, b, 16] x", (3, 2, 16)),
    "both moved": ("t = Transpose <perm = [1, 2, 0]> (x) y = MatMul(t, w)", "float16[16, b, a] x", (16, 2, 3)),
    "right": ("t = Transpose <perm = [1, 0, 2]> (x) y = MatMul(w, t)", "float16[16, b, a] x", (16, 2, 3)),
    "cast": (
        "t = Transpose <perm = [1, 0, 2]> (x) c = Cast <to = 1> (t) v = Cast <to = 1> (w) z = MatMul(c, v) "
        "y = Cast <to = 10> (z)",
        "float16[a, b, 16] x",
        (3, 2, 16),
    ),
    "rank 4": ("t = Transpose <perm = [1, 2, 0, 3]> (x) y = MatMul(t, w)", "float16[a, b, c, 16] x", (3, 2, 2, 16)),
}


def product(name: str, *, single: bool = False) -> tuple[ModelProto, np.ndarray]:
    """A model and its x, in float16 or in float32."""
    nodes, inputs, shape = PRODUCTS[name]
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => (float16[] y) {{ {nodes} }}'
    dtype = np.float32 if single else np.float16
    if single:
        text = text.replace("float16", "float").replace("<to = 10>", "<to = 1>")
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.append(numpy_helper.from_array(W.astype(dtype), "w"))
    return model, (np.random.default_rng(1).standard_normal(shape) / 4).astype(np.float16).astype(dtype)


def test_the_file_says_which_optimisers_to_turn_off() -> None:
    """Those that no form of ours avoids in every version; a file in float32 says nothing."""
    (note,) = [e.value for e in ob.backward(product("left")[0], wrt=["x"]).metadata_props if e.key == NOTE]
    assert note.split() == ["FuseFp16InitializerToFp32NodeTransformer", "MatmulTransposeFusion"]
    single = ob.backward(product("left", single=True)[0], wrt=["x"])
    assert all(entry.key != NOTE for entry in single.metadata_props)


def loads(*paths: Path) -> int:
    """The exit code of a process that opens files in stock onnxruntime."""
    return subprocess.run([sys.executable, "-c", LOADS, *map(str, paths)], check=False, timeout=60).returncode


def test_stock_onnxruntime_survives_what_we_write(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.onnx" for n in range(len(PRODUCTS))]
    for path, name in zip(paths, PRODUCTS, strict=True):
        onnx.save(ob.backward(product(name)[0], wrt=["x"]), path)
    assert loads(*paths) == 0


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_behind_a_transpose(name: str) -> None:
    """The result is that of onnxruntime without the optimiser, and so is what a session of ours gives."""
    model, x = product(name)
    off = {"disabled_optimizers": ["MatmulTransposeFusion"], "providers": ["CPUExecutionProvider"]}
    (want,) = onnxruntime.InferenceSession(model.SerializeToString(), **off).run(None, {"x": x})
    graph = ob.backward(model, wrt=["x"])
    got, dx = ob.session(graph).run(["y", "x_grad"], {"x": x, "y_grad": np.ones_like(want)})
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    single, x = product(name, single=True)
    feeds = {"x": x, "y_grad": np.ones(np.asarray(want).shape, np.float32)}
    (exact,) = ob.session(ob.backward(single, wrt=["x"])).run(["x_grad"], feeds)
    np.testing.assert_allclose(np.asarray(dx, np.float32), np.asarray(exact), rtol=2e-3, atol=2e-3)


def test_sessions_do_without_the_optimiser() -> None:
    """The transpose optimiser moves a Transpose in front of the product: no file shows it."""
    nodes = "t = Transpose <perm = [1, 0, 2]> (x) y = MatMul(t, w)"
    text = f'<ir_version: 9, opset_import: ["": 18]> g (float16[a, b, 16] x) => (float16[b, a, 16] y) {{ {nodes} }}'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    x = np.ones((2, 3, 16), np.float16)
    for kernels in ("onnx", "native", None):
        (y,) = ob.session(model, kernels=kernels).run(None, {"x": x})
        np.testing.assert_allclose(np.asarray(y), x.transpose(1, 0, 2) @ W, rtol=1e-2)
    ob.session(model, kernels="onnx", disabled_optimizers=["ConstantFolding"]).run(None, {"x": x})


RESIZE = 'Resize <mode = "cubic", coordinate_transformation_mode = "half_pixel", cubic_coeff_a = -0.75>'
POSITIONS = f"""
    s = Constant <value_ints = [1, 8, 4, 4]> ()
    flat = Constant <value_ints = [1, 16, 8]> ()
    a = Transpose <perm = [0, 3, 1, 2]> (pos)
    b = {RESIZE} (a, "", "", s)
    c = Transpose <perm = [0, 2, 3, 1]> (b)
    d = Reshape(c, flat)
    y = Add(x, d)
"""


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_cubic_resize_between_transposes(optimizer: str | None) -> None:
    """A table of positions as of DINOv2, a parameter: stock onnxruntime trains it, and says what it says unoptimised."""
    text = f'<ir_version: 9, opset_import: ["": 18]> g (float[1, 16, 8] x) => (float[1, 16, 8] y) {{ {POSITIONS} }}'
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((1, 6, 6, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "pos"))
    graph = ob.training_graph(model, loss="mse", optimizer=optimizer)
    x = rng.standard_normal((1, 16, 8)).astype(np.float32)
    feeds = {"x": x, str(graph.target): np.zeros_like(x)} | graph.initial_state()
    feeds |= {graph.learning_rate: np.float32(0)} if graph.learning_rate else {}
    losses = []
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options)
        names = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
        losses.append(session.run([graph.loss], {n: np.asarray(v) for n, v in feeds.items() if n in names})[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    session = ob.session(ob.backward(model, wrt=["pos"]))
    assert any(node.op_type == "Reshape" and next(iter(node.input)).startswith("b") for node in graph.model.graph.node)
    (gradient,) = session.run(["pos_grad"], {"x": x, "y_grad": np.ones_like(x)})
    assert np.asarray(gradient).sum() == pytest.approx(x.size, rel=1e-5), "each output's weights sum to 1"


@pytest.mark.parametrize("beside", ["Identity (v)", "Cast <to = 11> (v)"])
def test_a_copy_that_is_multiplied_by_a_reciprocal(beside: str) -> None:
    """DivMulFusion tears both outputs' parts: y = v · mean x by its gradient, Σ v² / 5, and v / z by itself."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (double[N] x, double z, double[3] v) => (double[3] y, double[3] u) '
        "<double one = {1}, int64[1] axis = {0}> { m = ReduceMean <keepdims = 1> (x, axis) c = Cast <to = 11> (m) "
        f"y = Mul (c, v) n = {beside} r = Div (one, z) u = Mul (r, n) }}"
    )
    derived = ob.backward(model, wrt=["x"], of=["y"])
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    v = np.array([1.0, 2.0, 3.0])
    u, dx = session.run(["u", "x_grad"], {"x": np.ones(5), "z": np.array(4.0), "v": v, "y_grad": v})
    np.testing.assert_allclose(np.asarray(u), v / 4)
    np.testing.assert_allclose(np.asarray(dx), np.full(5, 14 / 5))


def test_a_copy_that_is_multiplied_by_a_reciprocal_stays() -> None:
    """Of a result that is differentiated again: dx of y = stop(sin x) / z · x is sin x / z, and dv is 1 / z · x."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (double[3] x, double z) => (double[3] y) <double one = {1}> '
        "{ s = Sin (x) v = Identity (s) r = Div (one, z) p = Mul (v, r) y = Mul (p, x) }"
    )
    x, z, seed = np.array([0.5, 1.0, 2.0]), np.array(4.0), np.ones(3)
    once = ob.backward(model, wrt=["x"], of=["y"], stop=["v"])
    for again in (ob.backward(once, wrt=["x"], of=["y"]), ob.backward(once, wrt=["v"], of=["y"])):
        session = onnxruntime.InferenceSession(again.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {value.name: seed for value in session.get_inputs()} | {"x": x, "z": z}
        result = again.graph.output[-1].name
        expected = x / z if result == "v_grad" else np.sin(x) / z
        assert any(node.op_type == "Identity" and node.input[0] == "r" for node in again.graph.node)
        np.testing.assert_allclose(np.asarray(session.run([result], feeds)[0]), expected, err_msg=result)
    model.graph.initializer[0].double_data[0] = 2
    assert "r" in next(node.input for node in ob.backward(model, wrt=["x"]).graph.node if "p" in node.output)


@pytest.mark.parametrize("function", [ob.jacobian, ob.hessian])
def test_a_row_of_one_number_is_divided(function: Any) -> None:
    """DivMulFusion takes 1 / m · 0.5, of a row of one number, for 0.5 / m, and loses the axis of rows."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2] x, float[1] u) => (float z) '
        "<int64[1] axis = {0}> { m = ReduceMean <keepdims = 0> (x, axis) l = Log (m) v = ReduceSum <keepdims = 0> (u) z = Mul (l, v) }"
    )
    x, u = np.array([1, 3], np.float32), np.array([2], np.float32)
    derived = function(model, ["x", "u"], ["z"])
    floats = [t.name for t in derived.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert not floats, "a 1 of ours that a training would take for a parameter"
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {"x": x, "u": u}), strict=True))
    if function is ob.jacobian:
        np.testing.assert_allclose(np.asarray(answers["z_jacobian_x"]), [0.5, 0.5])
        np.testing.assert_allclose(np.asarray(answers["z_jacobian_u"]), [np.log(2)], rtol=1e-6)
    else:
        np.testing.assert_allclose(np.asarray(answers["x_hessian_x"]), np.full((2, 2), -0.125))
        np.testing.assert_allclose(np.asarray(answers["u_hessian_x"]), [[0.25, 0.25]])


def test_a_hessian_by_single_numbers() -> None:
    """Each row is one number, and what is emitted for it has names of its own."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float x, float u) => (float z) { p = Mul (x, x) z = Mul (p, u) }'
    )
    session = ob.session(ob.hessian(model, ["x", "u"], ["z"]))
    answers = dict(
        zip(
            [v.name for v in session.get_outputs()],
            session.run(None, {"x": np.array(3, np.float32), "u": np.array(2, np.float32)}),
            strict=True,
        )
    )
    expected = {"x_hessian_x": 4, "x_hessian_u": 6, "u_hessian_x": 6, "u_hessian_u": 0}
    assert {name: float(np.asarray(answers[name])) for name in expected} == expected


NORM = "h, m1, v1 = BatchNormalization<training_mode = 1, momentum = 0.75>(x, s, b, m, v)"
READ = f"{NORM} r = Reshape(m1, k) t = Reshape(v1, k) u = Mul(r, t) y = Add(h, u)"
INSIDE = (
    f"y = If(c) <then_branch = t () => (float[N,3,2] a) {{ {READ.replace('y =', 'a =')} }}, "
    "else_branch = e () => (float[N,3,2] d) { d = Neg(x) }>"
)


@pytest.mark.parametrize("inputs", ["", ", float[3] m, float[3] v"])
@pytest.mark.parametrize("body", [READ, f"z, m2, v2 = {NORM.partition('= ')[2].replace('(x', '(w')} {READ}", INSIDE])
def test_statistics_that_a_normalization_overwrites(body: str, inputs: str) -> None:
    """Each run gives what a first one gives: those of the batch, beside what is stored, and the caller's stay."""
    stored = {"m": np.float32([0.5, 0, 1]), "v": np.float32([1, 2, 1])}
    if "z, " in body:  # another one before it, whose new statistics nobody reads
        body = f"w = Exp(x) {body.replace('y = Add(h, u)', 'o = Mul(z, nil) a = Add(h, u) y = Add(a, o)')}"
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[N,3,2] x, bool c{inputs}) => (float[N,3,2] y) '
        "<float[3] s = {1, 2, 3}, float[3] b = {0, 0, 0}, int64[2] k = {3, 1}, float nil = {0}> "
        f"{{ {body} }}"
    )
    if not inputs:
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    derived = ob.backward(model, wrt=["x"], of=["y"])
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(3).standard_normal((4, 3, 2)).astype(np.float32)
    mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    m, v = (array.reshape(3, 1) for array in stored.values())
    scaled = (x - mean) / np.sqrt(var + 1e-5) * np.float32([1, 2, 3]).reshape(3, 1)
    expected = scaled + (0.75 * m + 0.25 * mean) * (0.75 * v + 0.25 * var)
    kept = {name: array.copy() for name, array in stored.items()}
    feeds = {"x": x, "c": np.array(True), "y_grad": np.ones_like(x)} | (kept if inputs else {})
    feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
    first, second = (session.run(["y", "x_grad"], feeds) for _ in range(2))
    np.testing.assert_allclose(np.asarray(first[0]), expected, rtol=1e-4, atol=1e-5)
    # of Σ y the normalised part has no gradient
    dx = 8 * (0.25 * (0.75 * v + 0.25 * var) / 8 + (0.75 * m + 0.25 * mean) * 0.25 * 2 * (x - mean) / 8)
    np.testing.assert_allclose(np.asarray(first[1]), dx, rtol=1e-3, atol=1e-4)
    for a, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(again))
    for name, array in stored.items():
        np.testing.assert_array_equal(kept[name], array)


def test_the_default_momentum_is_that_of_float32() -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (double[4,3] x) => (double[3] m1) '
        "<double[3] s = {1, 2, 3}, double[3] m = {1, 2, 3}, double[3] v = {1, 1, 1}> "
        "{ y, m1, v1 = BatchNormalization<training_mode = 1>(x, s, m, m, v) }"
    )
    x = np.random.default_rng(3).standard_normal((4, 3))
    plain, derived = (
        onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        for one in (model, ob.backward(model, wrt=["x"], of=["m1"]))
    )
    m1, dx = map(np.asarray, derived.run(["m1", "x_grad"], {"x": x, "m1_grad": np.ones(3)}))
    np.testing.assert_allclose(m1, np.asarray(plain.run(None, {"x": x})[0]), rtol=1e-12)
    np.testing.assert_allclose(dx, np.full((4, 3), (1 - float(np.float32(0.9))) / 4), rtol=1e-12)


def test_a_rank_that_onnxruntime_alone_infers() -> None:
    """From Size(Shape(t)) it infers the product of the lengths for a Range, and takes memory of another size for it."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22]> g (float[2,4,4] x) => (float[1] y) '
        "<float[4] one = {1, 2, 3, 4}, float[1] f = {2}, float[1] m = {3}> { a, b = Scan<num_scan_inputs = 1, "
        "body = e (float[2,4,4] p, float[4,4] q) => (float[] n, float[] o) { "
        "n = GroupNormalization<num_groups = 4>(p, one, one) k = Constant<value_ints = [0, 2]>() "
        "o = ReduceMin<keepdims = 1>(n, k) }>(x, x) t = AveragePool<kernel_shape = [2, 1]>(b) "
        "h, y, z = BatchNormalization<training_mode = 1>(t, f, f, m, f) }"
    )
    x = np.random.default_rng(3).standard_normal((2, 4, 4)).astype(np.float32)
    derived = [ob.backward(model, wrt=["x"], inline=inline) for inline in (False, True)]
    expected, got = (np.asarray(ob.session(one).run(["x_grad"], {"x": x})[0]) for one in derived)
    assert expected.any()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("shape", "perm"), [((4, 3), [1, 0]), ((2, 4, 3), [0, 2, 1])])
@pytest.mark.parametrize("cast", ["t = Identity(u)", "t = Cast<to = 1>(u)"])
def test_a_transposed_matrix_by_a_vector(shape: tuple[int, ...], perm: list[int], cast: str) -> None:
    """MatmulTransposeFusion leaves the transpose out, where the matrix is no constant: the loss was another one."""
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[{", ".join("ABC"[: len(shape)])}] w, float[D] v) => (float y) '
        f"{{ u = Transpose<perm = {perm}>(w) {cast} p = MatMul(t, v) q = Mul(p, p) y = ReduceSum<keepdims = 0>(q) }}"
    )
    rng = np.random.default_rng(1)
    w, v = (rng.standard_normal(lengths).astype(np.float32) for lengths in (shape, shape[-2:-1]))
    derived = ob.backward(model, wrt=["w", "v"], of=["y"])
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    y, dw, dv = session.run(["y", "w_grad", "v_grad"], {"w": w, "v": v})
    product = np.swapaxes(w, -1, -2) @ v
    assert float(np.asarray(y)) == pytest.approx(float((product**2).sum()), rel=1e-5)
    np.testing.assert_allclose(np.asarray(dw), 2 * product[..., None, :] * v[:, None], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(dv), 2 * (w @ product[..., None]).reshape(-1, v.size).sum(0), rtol=1e-4)


@pytest.mark.parametrize("scale", ["float s = {0.5}", "float[2] s = {0.5, 0.25}"])
@pytest.mark.parametrize("inputs", ["", ", int8[1,2] q"])
@pytest.mark.parametrize("opset", [18, 21])
def test_the_transpose_of_dequantised_numbers(opset: int, scale: str, inputs: str) -> None:
    """QDQPropagation rounds what is below 0 to 0, where q is an input: the gradient was 0."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[N,1] x{inputs}) => (float[N,2] y) '
        f"<int8[1,2] q = {{-4, -5}}, {scale}> {{ d = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, d) }}"
    )
    derived = ob.backward(model, wrt=["x"], of=["y"])
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    (dx,) = session.run(["x_grad"], {"x": np.ones((1, 1), np.float32), "y_grad": np.float32([[1, 2]])})
    expected = -4 * 0.5 + 2 * -5 * (0.25 if "[2]" in scale else 0.5)
    np.testing.assert_allclose(np.asarray(dx), [[expected]])


def test_the_transpose_of_dequantised_numbers_that_a_body_reads(tmp_path: Path) -> None:
    """QDQPropagation ends the process, so another one loads the file."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N,A,B,C] x, int8[2,2] q) => (float[M,L,K] y) '
        "<int8[2,2] q = {-5, 2, 3, -3}, float s = {0.5}, float[2,2] w = {1, 2, 3, 4}> { d = DequantizeLinear(q, s) "
        'a = MatMul(x, d) t = Trilu(a) y = Einsum<equation = "abcd,dz->bcz">(t, w) }'
    )
    derived = ob.jacobian(model, ["x"], ["y"])
    assert any(node.op_type == "Scan" for node in derived.graph.node)
    onnx.save(derived, tmp_path / "jacobian.onnx")
    subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "jacobian.onnx")], check=True)
