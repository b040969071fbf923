"""Products with packed weights against onnxruntime's own forward, and against weights that are unpacked here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.support.adjoint import forward_session, run

ROUTES = ("onnx", "native", "numpy", "numba")


@dataclass(frozen=True)
class Form:
    """One MatMulNBits: attributes, tensors by place, those that are initializers, and the lengths of a."""

    attributes: dict[str, int]
    tensors: dict[int, np.ndarray]
    constant: bool
    seed: int

    @property
    def a(self) -> np.ndarray:
        return self.tensors[0]

    def weight(self) -> np.ndarray:
        """W (N, K) in float64, number by number."""
        n, k, size, bits = (self.attributes[name] for name in ("N", "K", "block_size", "bits"))
        blocks, points = -(-k // size), self.tensors.get(3)
        stored, scales = self.tensors[1].reshape(n, -1), self.tensors[2].reshape(n, blocks).astype(np.float64)
        w = np.empty((n, k))
        for column in range(k):
            block = column // size
            z = np.full(n, 2.0 ** (bits - 1))
            if points is not None and points.dtype == np.uint8:
                z = read(points.reshape(n, -1), block, bits)
            elif points is not None:
                z = points.reshape(n, blocks)[:, block].astype(np.float64)
            w[:, column] = (read(stored, column, bits) - z) * scales[:, block]
        return w

    def model(self, *, symbolic: bool) -> ModelProto:
        """Names that mean nothing, a node without one; the weight as initializers, the rest too or as inputs."""
        names = {0: "x/in put", 1: "a.b:0", 2: "ω", 3: "//z", 5: "bias"}
        inputs = [names[n] if n in self.tensors else "" for n in range(max(self.tensors) + 1)]
        node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **self.attributes)
        fixed = [n for n in self.tensors if n == 1 or (n and (self.constant or self.tensors[n].dtype == np.uint8))]
        element = helper.np_dtype_to_tensor_dtype(self.a.dtype)
        infos = [
            helper.make_tensor_value_info(
                names[n], element, [*"bt"[: x.ndim - 1], x.shape[-1]] if symbolic and not n else list(x.shape)
            )
            for n, x in self.tensors.items()
            if n not in fixed
        ]
        weights = [numpy_helper.from_array(self.tensors[n], names[n]) for n in fixed]
        graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", element, None)], weights)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def feeds(self, model: ModelProto) -> dict[str, np.ndarray]:
        """Of the graph inputs, in the order in which `model` writes them."""
        floats = [x for n, x in self.tensors.items() if n != 1 and x.dtype != np.uint8 and not (n and self.constant)]
        return dict(zip([value.name for value in model.graph.input], floats, strict=True))


def read(packed: np.ndarray, place: int, bits: int) -> np.ndarray:
    """The number at a place of each row."""
    return (packed[:, place * bits // 8] >> (place * bits % 8) & (2**bits - 1)).astype(np.float64)


def drawn(seed: int, dtype: type = np.float32) -> Form:
    """A form that onnxruntime's kernel runs."""
    rng = np.random.default_rng(seed)
    bits, size = int(rng.choice([2, 4, 8])), int(2 ** rng.integers(4, 9))
    n, k = int(rng.integers(1, 80)), int(rng.integers(1, 300))
    shape = tuple(int(d) for d in rng.integers(1, 6, rng.integers(0, 3)))
    blocks = -(-k // size)
    tensors = {
        0: rng.standard_normal((*shape, k)).astype(dtype),
        1: rng.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8),
        2: rng.uniform(-0.2, 0.2, (n, blocks)).astype(dtype),
    }
    points = rng.choice(["", "packed", "floats" if bits != 8 else ""])
    if points == "packed":
        tensors[3] = rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif points == "floats":
        tensors[3] = rng.uniform(0, 2**bits, (n, blocks)).astype(dtype)
    if rng.random() < 0.5:
        tensors[5] = rng.standard_normal(n).astype(dtype)
    if rng.random() < 0.2:  # as older quantisers write them
        tensors[2] = tensors[2].reshape(-1)
        if points == "packed":
            tensors[3] = tensors[3].reshape(-1)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": size}
    if rng.random() < 0.5:
        attributes["accuracy_level"] = int(rng.choice([0, 1, 2, 3]))
    return Form(attributes, tensors, bool(rng.random() < 0.5), seed)


def gradients(form: Form, model: ModelProto, dy: np.ndarray, route: str) -> dict[str, np.ndarray]:
    graph = ob.backward(model, wrt=list(form.feeds(model)))
    session = ob.session(graph, kernels=route)
    fed = form.feeds(model) | {"y_grad": dy}
    accepted = {value.name for value in session.get_inputs()}
    answers = run(session, {name: x for name, x in fed.items() if name in accepted})
    outputs = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))
    return {name: outputs[f"{name}_grad"] for name in form.feeds(model)}


@pytest.mark.parametrize("seed", range(48))
def test_any_form(seed: int) -> None:
    """<dy, F(x + v) - F(x - v)> / 2 = <dx, v> of onnxruntime's F, linear in each input; and dx = dy · W in float64."""
    form = drawn(seed)
    model = form.model(symbolic=seed % 2 == 0)
    feeds, session, rng = form.feeds(model), forward_session(model), np.random.default_rng(seed)
    y = run(session, feeds)[0]
    dy = rng.standard_normal(y.shape).astype(np.float32)
    grads = gradients(form, model, dy, ROUTES[seed % len(ROUTES)])
    for name, x in feeds.items():
        v = rng.standard_normal(x.shape).astype(np.float32)
        above, below = (run(session, feeds | {name: x + s * v})[0].astype(np.float64) for s in (1, -1))
        terms, moved = grads[name].astype(np.float64) * v, dy * (above - below) / 2
        scale = np.abs(dy * above).sum() + np.abs(terms).sum()
        assert grads[name].shape == x.shape
        assert abs(terms.sum() - moved.sum()) <= 3e-6 * scale, (form, name, terms.sum(), moved.sum())
    exact = dy.astype(np.float64) @ form.weight()
    np.testing.assert_allclose(grads["x/in put"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [1, 13, 30, 61, 251, 500])
def test_many_rows_and_long_sums(rows: int, dtype: type) -> None:
    """More rows than an item of the kernel has, sums along several panels, columns of several tiles."""
    rng = np.random.default_rng(rows)
    tensors = {
        0: rng.standard_normal((rows, 700)).astype(dtype),
        1: rng.integers(0, 256, (333, 22, 16)).astype(np.uint8),
        2: rng.uniform(-0.2, 0.2, (333, 22)).astype(dtype),
        3: rng.integers(0, 256, (333, 11)).astype(np.uint8),
    }
    form = Form({"K": 700, "N": 333, "bits": 4, "block_size": 32}, tensors, True, rows)
    dy = rng.standard_normal((rows, 333)).astype(dtype)
    actual = gradients(form, form.model(symbolic=True), dy, "native")["x/in put"]
    exact = dy.astype(np.float64) @ form.weight()
    close = 3e-6 if dtype == np.float32 else 1e-3
    np.testing.assert_allclose(actual, exact, rtol=0, atol=close * np.abs(exact).max())


@pytest.mark.parametrize("seed", range(100, 112))
def test_float16(seed: int) -> None:
    """Rounded once: the sums are of float32."""
    form = drawn(seed, np.float16)
    model = form.model(symbolic=seed % 2 == 0)
    y = run(forward_session(model), form.feeds(model))[0]
    dy = np.random.default_rng(seed).standard_normal(y.shape).astype(np.float16)
    actual = gradients(form, model, dy, ROUTES[seed % len(ROUTES)])["x/in put"]
    exact = dy.astype(np.float64) @ form.weight()
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, exact, rtol=2**-10, atol=1e-5 * np.abs(exact).max())


def rounding(bits: int, *, points: bool, constant: bool) -> Form:
    """One of accuracy_level 4, which rounds a to 8 bits."""
    rng = np.random.default_rng(bits)
    tensors = {
        0: rng.standard_normal((8, 256)).astype(np.float32),
        1: rng.integers(0, 256, (64, 8, 4 * bits)).astype(np.uint8),
        2: rng.uniform(0.05, 0.1, (64, 8)).astype(np.float32),
    }
    if points:
        tensors[3] = rng.integers(0, 256, (64, bits)).astype(np.uint8)
    attributes = {"K": 256, "N": 64, "bits": bits, "block_size": 32, "accuracy_level": 4}
    return Form(attributes, tensors, constant, bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("points", [False, True])
def test_the_forward_rounds_and_the_gradient_does_not(bits: int, points: bool) -> None:
    """dx stays dy · W, which the forward follows to its rounding; the forward stays that of the file, to the bit."""
    form = rounding(bits, points=points, constant=True)
    model = form.model(symbolic=True)
    session, x, rng = forward_session(model), form.a, np.random.default_rng(bits)
    graph = ob.backward(model, wrt=["x/in put"])
    assert [a.i for node in graph.graph.node for a in node.attribute if a.name == "accuracy_level"] == [4]
    dy = rng.standard_normal((8, 64)).astype(np.float32)
    ours = ob.session(graph)
    answers = run(ours, {"x/in put": x, "y_grad": dy})
    outputs = dict(zip([value.name for value in ours.get_outputs()], answers, strict=True))
    exact = dy.astype(np.float64) @ form.weight()
    np.testing.assert_allclose(outputs["x/in put_grad"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    np.testing.assert_array_equal(outputs["y"], run(session, {"x/in put": x})[0])
    v = rng.standard_normal(x.shape).astype(np.float32)
    above, below = (run(session, {"x/in put": x + s * v})[0].astype(np.float64) for s in (1, -1))
    moved, along = (dy * (above - below)).sum() / 2, (exact * v).sum()
    assert abs(moved - along) <= 0.01 * np.linalg.norm(exact) * np.linalg.norm(v)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_that_are_no_constants_are_not_rounded_with(bits: int) -> None:
    """With accuracy_level 4 onnxruntime packs the weight without them, and the forward of the file itself is wrong."""
    form = rounding(bits, points=True, constant=False)
    model = form.model(symbolic=False)
    graph = ob.backward(model, wrt=["ω"])
    assert not [a for node in graph.graph.node for a in node.attribute if a.name == "accuracy_level"]
    dy = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    ours = ob.session(graph)
    answers = run(ours, form.feeds(model) | {"y_grad": dy})
    outputs = dict(zip([value.name for value in ours.get_outputs()], answers, strict=True))
    exact = form.a.astype(np.float64) @ form.weight().T
    np.testing.assert_allclose(outputs["y"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_float16_with_a_product_beside(bits: int) -> None:
    """A Cast between float16 scales and a weight that is packed: zeros, or far off, where a session does not fold it."""
    rng = np.random.default_rng(bits)
    tensors = {
        1: rng.integers(0, 256, (50, 2, 4 * bits), np.uint8),
        2: rng.uniform(0.05, 0.15, 100).astype(np.float16),
        0: rng.standard_normal((3, 64)).astype(np.float16),
    }
    attributes = {"K": 64, "N": 50, "bits": bits, "block_size": 32, "accuracy_level": 4}
    form = Form(attributes, tensors, constant=True, seed=bits)
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float16[B,64] x) => (float16[B,50] y) {
        h = MatMul(x, m) z = com.microsoft.MatMulNBits(h, q, s) a = MatMul(h, l) b = MatMul(a, r) y = Add(z, b) }"""
    model = parser.parse_model(text)
    model.graph.node[1].attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    dense = {"m": np.eye(64) / 2, "l": rng.standard_normal((64, 4)) / 8, "r": rng.standard_normal((4, 50)) / 8}
    arrays = {name: array.astype(np.float16) for name, array in dense.items()} | {"q": tensors[1], "s": tensors[2]}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    h = form.a.astype(np.float64) @ dense["m"]
    exact = h @ form.weight().T + h @ arrays["l"].astype(np.float64) @ arrays["r"].astype(np.float64)
    graph = ob.training_graph(model, loss="mse", optimizer=None, trainable=["m", "l", "r"])
    for of in (model, graph.eval_model()):
        session = ob.session(of)
        every = {"x": form.a, "target": np.zeros((3, 50), np.float16), **graph.initial_values()}
        feeds = {value.name: every[value.name] for value in session.get_inputs()}
        y = np.asarray(session.run(["y"], feeds)[0])
        assert np.abs(y - exact).max() <= 0.02 * np.abs(exact).max(), of.graph.name


@pytest.mark.parametrize("taken", [True, False])
def test_in_a_branch(taken: bool) -> None:
    """A sub-graph that reads the weight from outside, whose bias is trained."""
    form = drawn(29)
    form.tensors.setdefault(5, np.ones(form.attributes["N"], np.float32))
    whole = Form(form.attributes, form.tensors, True, 0).model(symbolic=False)
    inner = whole.graph.node[0]
    factors = [numpy_helper.from_array(np.float32(n), f"f{n}") for n in (2, 3)]
    branches = []
    for n in (2, 3):
        product, scaled = NodeProto(), helper.make_node("Mul", [f"h{n}", f"f{n}"], [f"y{n}"])
        product.CopyFrom(inner)
        product.output[0] = f"h{n}"
        output = helper.make_tensor_value_info(f"y{n}", TensorProto.FLOAT, None)
        branches.append(helper.make_graph([product, scaled], f"b{n}", [], [output]))
    whole.graph.initializer.extend(factors)
    node = helper.make_node("If", ["taken"], ["y"], then_branch=branches[0], else_branch=branches[1])
    whole.graph.node[0].CopyFrom(node)
    whole.graph.input.append(helper.make_tensor_value_info("taken", TensorProto.BOOL, []))
    graph = ob.backward(whole, wrt=["x/in put", "bias"])
    session = ob.session(graph)
    dy = np.random.default_rng(0).standard_normal((*form.a.shape[:-1], form.attributes["N"])).astype(np.float32)
    fed = {"x/in put": form.a, "taken": np.array(taken), "y_grad": dy}
    answers = run(session, {n: x for n, x in fed.items() if n in {i.name for i in session.get_inputs()}})
    outputs = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))
    factor = 2 if taken else 3
    exact = factor * dy.astype(np.float64) @ form.weight()
    np.testing.assert_allclose(outputs["x/in put_grad"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    summed = factor * dy.astype(np.float64).reshape(-1, dy.shape[-1]).sum(axis=0)
    np.testing.assert_allclose(outputs["bias_grad"], summed, rtol=0, atol=3e-6 * np.abs(summed).max())


def behind_dequantize(seed: int) -> tuple[ModelProto, np.ndarray, np.ndarray]:
    """MatMul of x (…, K) and a weight (K, N) of 4 bits behind DequantizeLinear, the weight in float64, and x."""
    rng = np.random.default_rng(seed)
    k, n, size = int(rng.integers(1, 150)), int(rng.integers(1, 40)), int(rng.choice([0, 16, 32, 64]))
    signed, dtype = bool(rng.random() < 0.5), (np.float32, np.float16)[rng.integers(2)]
    low, element = (-8, TensorProto.INT4) if signed else (0, TensorProto.UINT4)
    q = rng.integers(low, low + 16, (k, n))
    shape = (-(-k // size), n) if size else ((n,), (), (1,))[rng.integers(3)]
    scales = rng.uniform(0.05, 0.2, shape).astype(dtype)
    tensors = [
        helper.make_tensor("q/weights", element, q.shape, q.reshape(-1)),
        numpy_helper.from_array(scales, "q/scales"),
    ]
    z = np.zeros(shape, np.int64)
    if rng.random() < 0.5:
        z = rng.integers(low, low + 16, shape)
        tensors.append(helper.make_tensor("q/points", element, shape, z.reshape(-1)))
    attributes = {"axis": int(rng.choice([0, -2])), "block_size": size} if size else {"axis": int(rng.choice([1, -1]))}

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, size, axis=0)[:k] if size else values

    weight = (q - spread(z)) * spread(scales.astype(np.float64))
    nodes = [
        helper.make_node("DequantizeLinear", [t.name for t in tensors], ["w"], **attributes),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    x = rng.standard_normal((*rng.integers(1, 5, rng.integers(0, 3)), k)).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    infos = [helper.make_tensor_value_info("x", kind, x.shape), helper.make_tensor_value_info("y", kind, None)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), weight, x


@pytest.mark.parametrize("seed", range(24))
def test_weights_of_four_bits_behind_dequantize_linear(seed: int) -> None:
    """They are products with packed weights, which compute what the file does; the gradient is dy · Wᵀ."""
    model, weight, x = behind_dequantize(seed)
    before = model.SerializeToString()
    graph = ob.backward(model, wrt=["x"])
    assert model.SerializeToString() == before
    assert not [node for node in graph.graph.node if node.op_type in ("DequantizeLinear", "MatMul")]
    session = ob.session(graph, kernels=ROUTES[seed % len(ROUTES)])
    dy = np.random.default_rng(seed).standard_normal((*x.shape[:-1], weight.shape[1])).astype(x.dtype)
    accepted = {value.name for value in session.get_inputs()}
    answers = run(session, {name: a for name, a in {"x": x, "y_grad": dy}.items() if name in accepted})
    outputs = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))
    close = {"rtol": 0, "atol": 3e-6} if x.dtype == np.float32 else {"rtol": 0, "atol": 3e-3}
    if "y" in outputs:
        y = x.astype(np.float64) @ weight  # onnxruntime fuses the two itself, with accuracy_level 4
        np.testing.assert_allclose(outputs["y"] / np.abs(y).max(), y / np.abs(y).max(), **close)
    exact = dy.astype(np.float64) @ weight.T
    np.testing.assert_allclose(outputs["x_grad"] / np.abs(exact).max(), exact / np.abs(exact).max(), **close)


def test_a_weight_that_others_read_stays_behind_dequantize_linear() -> None:
    """Whoever reads it in floats, or its integers, has a copy in floats all the same."""
    model = behind_dequantize(3)[0]
    kind = model.graph.output[0].type.tensor_type.elem_type
    model.graph.output.append(helper.make_tensor_value_info("w", kind, None))
    graph = ob.backward(model, wrt=["x"], of=["y"])
    assert [node.op_type for node in graph.graph.node].count("DequantizeLinear") == 1
    assert not [node for node in graph.graph.node if node.op_type == "MatMulNBits"]


def test_scales_behind_dequantize_linear_keep_their_name_and_gradient() -> None:
    model, weight, x = next(m for m in map(behind_dequantize, range(99)) if m[2].dtype == np.float32)
    graph = ob.backward(model, wrt=["q/scales"])
    session = ob.session(graph)
    dy = np.random.default_rng(0).standard_normal((*x.shape[:-1], weight.shape[1])).astype(np.float32)
    names = [value.name for value in session.get_inputs()]
    scales = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "q/scales")
    fed = {name: a for name, a in {"x": x, "y_grad": dy, "q/scales": scales}.items() if name in names}
    answers = run(session, fed)
    got = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))["q/scales_grad"]
    assert got.shape == scales.shape
    # y is linear in the scales, and without any it is 0
    moved = (dy.astype(np.float64) * (x.astype(np.float64) @ weight)).sum()
    assert abs((got * scales).sum() - moved) <= 1e-5 * np.abs(got * scales).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "form"), [(4, "QOperator"), (4, "QDQ"), (8, "QOperator")])
def test_files_of_onnxruntimes_quantiser(bits: int, form: str, symmetric: bool) -> None:
    """The gradient through what it makes of a float weight is that through the weight, to the quantiser's rounding."""
    quantiser = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal((100, 48)).astype(np.float32)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", size]) for n, size in (("x", 100), ("y", 48))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "fc")], "g", infos[:1], infos[1:],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    quantization = quantiser.MatMulNBitsQuantizer(
        model, block_size=32, is_symmetric=symmetric, bits=bits, accuracy_level=4,
        quant_format=quantiser.QuantFormat[form],
    )  # fmt: skip
    quantization.process()
    backward = ob.backward(quantization.model.model, wrt=["x"])
    assert [node.op_type for node in backward.graph.node].count("MatMulNBitsBackwardData") == 1
    session = ob.session(backward)
    dy = rng.standard_normal((5, 48)).astype(np.float32)
    fed = {"x": np.zeros((5, 100), np.float32), "y_grad": dy}
    answers = run(session, {name: x for name, x in fed.items() if name in {i.name for i in session.get_inputs()}})
    dx = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))["x_grad"]
    error = np.linalg.norm(dx - dy @ weight.T) / np.linalg.norm(dy @ weight.T)
    assert error <= {4: 0.15, 8: 0.01}[bits], error
