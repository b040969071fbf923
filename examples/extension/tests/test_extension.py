"""What the package brings works behind every door; it is installed, and nothing here imports it."""

import numpy as np
import onnx
import pytest

import onnx_backprop as ob

ROUTES = ("native", "numpy", "onnx")
X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


@pytest.fixture
def model():
    """x·w, Snake, SquaredRelu, ·v: two operators that onnxruntime does not know."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "acme": 1]>
        g (float[N, 4] x) => (float[N, 3] y) {
            a = MatMul (x, w)
            s = acme.Snake <alpha = 2.0> (a)
            b = acme.SquaredRelu (s)
            y = MatMul (b, v)
        }""")
    rng = np.random.default_rng(1)
    for name, shape in (("w", (4, 5)), ("v", (5, 3))):
        weights = rng.normal(0, 0.6, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return proto


def weights_of(model):
    """The weights in float64."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}


def forward(x, w, v):
    """The model in NumPy."""
    a = x @ w
    s = a + np.sin(2 * a) ** 2 / 2
    return np.maximum(s, 0) ** 2 @ v


def differences(function, x, step=1e-6):
    """The gradient of a number by the entries of x, by central differences."""
    result = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        shifted = [x.copy() for _ in range(2)]
        shifted[0][index] += step
        shifted[1][index] -= step
        result[index] = (function(shifted[0]) - function(shifted[1])) / (2 * step)
    return result


def run(model, kernels, **feeds):
    """The outputs by name."""
    session = ob.session(model, kernels=kernels)
    results = map(np.asarray, session.run(None, feeds))
    return dict(zip([value.name for value in session.get_outputs()], results, strict=True))


@pytest.mark.parametrize("kernels", ROUTES)
def test_forward(model, kernels):
    np.testing.assert_allclose(run(model, kernels, x=X)["y"], forward(X, **weights_of(model)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ROUTES)
def test_gradients_and_products(model, kernels):
    weights, rng = weights_of(model), np.random.default_rng(2)
    seed, direction = rng.standard_normal((8, 3)), rng.standard_normal(X.shape)

    def scalar(x):
        return (seed * forward(x, **weights)).sum()

    x = X.astype(np.float64)
    gradient = differences(scalar, x)
    outputs = run(ob.vjp(model, wrt=["x"]), kernels, x=X, y_grad=seed.astype(np.float32))
    np.testing.assert_allclose(outputs["x_grad"], gradient, rtol=1e-3, atol=1e-3)

    tangent = differences(lambda t: forward(x + t * direction, **weights).sum(), np.zeros(1))
    outputs = run(ob.jvp(model, wrt=["x"]), kernels, x=X, x_tangent=direction.astype(np.float32))
    np.testing.assert_allclose(outputs["y_tangent"].sum(), tangent[0], rtol=1e-3, atol=1e-3)

    scored = onnx.compose.add_prefix(model, "")
    scored.graph.node.append(onnx.helper.make_node("ReduceSum", ["y"], ["score"], keepdims=0))
    del scored.graph.output[:]
    scored.graph.output.append(onnx.helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, []))

    def gradient_of_score(x):
        a = x @ weights["w"]
        s = a + np.sin(2 * a) ** 2 / 2
        slope = 2 * np.maximum(s, 0) * weights["v"].sum(1)
        return slope * (1 + np.sin(4 * a)) @ weights["w"].T

    step = 1e-6
    ends = [gradient_of_score(x + sign * step * direction) for sign in (1, -1)]
    product = (ends[0] - ends[1]) / (2 * step)
    outputs = run(ob.hvp(scored, wrt=["x"]), kernels, x=X, x_direction=direction.astype(np.float32))
    np.testing.assert_allclose(outputs["x_hvp"], product, rtol=2e-3, atol=2e-3)


def test_losses_are_the_same_on_every_route(model):
    target = X[:, :3]
    losses = []
    for kernels in (*ROUTES, "numba"):
        try:
            trainer = ob.Trainer(
                ob.training_graph(model, loss="log_cosh", optimizer="signsgd"), learning_rate=1e-2, kernels=kernels
            )
        except ob.KernelError as e:  # without Numba
            if kernels != "numba":
                raise
            print(e)
            continue
        losses.append([trainer.step(x=X, target=target) for _ in range(4)])
        assert losses[-1][-1] < losses[-1][0]
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-5)
    y = forward(X.astype(np.float64), **weights_of(model))
    np.testing.assert_allclose(losses[0][0], np.log(np.cosh(y - target)).mean(), rtol=1e-4)


def test_it_is_explained_and_checked(model):
    assert "acme_operators.squared_relu" in str(ob.explain_gradients(model))
    assert {("acme", "SquaredRelu"), ("acme", "SquaredReluBackward")} <= {op[:2] for op in ob.supported_ops()}
    assert ob.check_gradients(model).verdict == "right"


def test_a_shape_that_does_not_fit_is_refused_by_its_sentence():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "acme": 1]>
        g (float[N] x, float[M, K] dy) => (float[N] dx) { dx = acme.SquaredReluBackward (x, dy) }""")
    with pytest.raises(ob.OnnxBackpropError, match="expected dy of the shape of x"):
        ob.session(model, kernels="onnx")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_half_precision(dtype):
    kind = onnx.helper.tensor_dtype_to_string(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    kind = kind.rpartition(".")[2].lower()
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "acme": 1]>
        g ({kind}[N] x) => ({kind}[N] y) {{ y = acme.SquaredRelu (x) }}""")
    x = np.linspace(-2, 2, 100_001).astype(dtype)
    expected = (np.maximum(x.astype(np.float64), 0) ** 2).astype(np.float32).astype(dtype)
    for kernels in ROUTES:
        assert np.array_equal(run(model, kernels, x=x)["y"], expected)


def test_it_can_be_compiled(model, tmp_path):
    graph = ob.training_graph(model, loss="log_cosh", optimizer="signsgd")
    try:
        (library,) = ob.compile_plugin(graph, tmp_path, lengths={"N": 8})
    except ob.KernelError as e:  # without a compiler for C
        pytest.skip(str(e).partition("\n")[0])
    assert library.is_file()
    step = onnx.load(tmp_path / "training.onnx")
    assert any("acme.SquaredRelu" in node.op_type for node in step.graph.node)
