"""Files of tf2onnx, by which Keras exports: biases of zeros are gone, recurrent layers have a second bias."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.converters.parameters.test_torchscript import graph_and_warnings
from tests.support.numeric import outputs

RNG = np.random.default_rng(5)
KERNEL, HEAD = "net/dense_1/Cast/ReadVariableOp:0", "net/dense_2/Cast/ReadVariableOp:0"
BIAS, SHIFT = "net/dense_1/BiasAdd/ReadVariableOp:0", "net/dense_2/add/ReadVariableOp:0"


def file(nodes: list[tuple[str, list[str], str]], tensors: dict[str, tuple[int, ...]]) -> ModelProto:
    """Nodes (operator, inputs, output), each named after its output, as TensorFlow names them."""
    protos = [helper.make_node(op, inputs, [y], name=y.removesuffix(":0")) for op, inputs, y in nodes]
    stored = [numpy_helper.from_array(RNG.standard_normal(s).astype(np.float32), n) for n, s in tensors.items()]
    x, y = (helper.make_tensor_value_info(n, 1, ["N", size]) for n, size in (("x", 6), (nodes[-1][2], 3)))
    graph = helper.make_graph(protos, "tf2onnx", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def dense(*, first: bool, second: bool) -> ModelProto:
    hidden = "net/dense_1/MatMul:0"
    nodes = [("MatMul", ["x", KERNEL], hidden)]
    nodes += [("Add", [hidden, BIAS], "net/dense_1/BiasAdd:0")] if first else []
    nodes += [
        ("Relu", [nodes[-1][2]], "net/dense_1/Relu:0"),
        ("MatMul", ["net/dense_1/Relu:0", HEAD], "net/dense_2/MatMul:0"),
    ]
    nodes += [("Add", ["net/dense_2/MatMul:0", SHIFT], "Identity:0")] if second else []
    return file(
        nodes, {KERNEL: (6, 4), HEAD: (4, 3)} | ({BIAS: (4,)} if first else {}) | ({SHIFT: (3,)} if second else {})
    )


@pytest.mark.parametrize(
    ("first", "second", "lacking"),
    [
        (True, True, ""),
        (True, False, "no bias for 'net/dense_2/MatMul'."),  # as of a new head
        (False, False, "no bias for 'net/dense_1/MatMul', 'net/dense_2/MatMul'."),
    ],
)
def test_biases_of_zeros_are_gone(first: bool, second: bool, lacking: str) -> None:
    graph, warned = graph_and_warnings(dense(first=first, second=second))
    assert len(graph.parameters) == 2 + first + second
    assert lacking in warned
    assert lacking or not warned


def test_biases_that_are_frozen_or_behind_a_scale_are_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob.training_graph(dense(first=True, second=True), loss="mse", frozen=["*BiasAdd*"])
    scale, shift = "net/bn_1/mul/ReadVariableOp:0", "net/bn_1/sub/ReadVariableOp:0"
    nodes = [
        ("MatMul", ["x", KERNEL], "net/dense_1/MatMul:0"),
        ("Mul", ["net/dense_1/MatMul:0", scale], "net/bn_1/mul_1:0"),
        ("Add", ["net/bn_1/mul_1:0", shift], "Identity:0"),
    ]
    assert "no bias" not in graph_and_warnings(file(nodes, {KERNEL: (6, 3), scale: (3,), shift: (3,)}))[1]


def test_what_tensorflow_has_computed() -> None:
    """A variable is sure where an operator has a weight; what is scaled by may be anything."""
    scale, shift, gain = "net/bn_1/batchnorm/mul:0", "net/bn_1/batchnorm/sub:0", "net/scale_1/mul/ReadVariableOp:0"
    nodes = [
        ("MatMul", ["x", KERNEL], "net/dense_1/MatMul:0"),
        ("Add", ["net/dense_1/MatMul:0", BIAS], "net/dense_1/BiasAdd:0"),
        ("Mul", ["net/dense_1/BiasAdd:0", scale], "net/bn_1/batchnorm/mul_1:0"),
        ("Add", ["net/bn_1/batchnorm/mul_1:0", shift], "net/bn_1/batchnorm/add_1:0"),
        ("Mul", ["net/bn_1/batchnorm/add_1:0", gain], "Identity:0"),
    ]
    tensors = {KERNEL: (6, 3), BIAS: (3,), scale: (3,), shift: (3,), gain: (3,)}
    graph, warned = graph_and_warnings(file(nodes, tensors))
    assert set(graph.parameters) == set(tensors)
    assert (
        f"trained are '{scale}', '{shift}' (the exporter has computed it); '{gain}' (the file calls it neither"
        in warned
    )
    assert "ReadVariableOp" not in warned.split(gain)[0].split("trained are")[1]


@pytest.mark.filterwarnings("ignore:the second biases")
@pytest.mark.parametrize(
    ("op", "gates", "more"), [("LSTM", 4, ""), ("GRU", 3, ""), ("RNN", 1, ""), ("GRU", 3, ", linear_before_reset = 1")]
)
@pytest.mark.parametrize("zeros", [True, False])
def test_layers_with_one_bias(op: str, gates: int, more: str, zeros: bool) -> None:
    """The second half of B gets no gradient where it is zeros; the first has its own. Keras' GRU has both biases."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 15]> g (float[3, 2, 5] x) => (float[1, 2, 4] y) '
        f"{{ ys, y = {op}<hidden_size = 4{more}>(x, w, r, b) }}"
    )
    shapes = {"W__1": (1, gates * 4, 5), "R__2": (1, gates * 4, 4), "B0__3": (1, gates * 8)}
    arrays = {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    if zeros:
        arrays["B0__3"][:, gates * 4 :] = 0
    model.graph.node[0].input[1:] = list(arrays)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    _, warned = graph_and_warnings(model)
    zeros &= not more
    assert ("the second biases in 'B0__3' are zeros" in warned) is zeros
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(model, loss="mse", frozen=["B*"])
    assert not any("second bias" in str(w.message) for w in caught)
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"), learning_rate=1.0)
    x, target = RNG.standard_normal((3, 2, 5)).astype(np.float32), np.zeros((1, 2, 4), np.float32)
    trainer.step(x=x, target=target)
    step = arrays["B0__3"] - trainer.parameters()["B0__3"]
    whole = ob.backward(model, wrt=["B0__3"], of=["y"])
    y = outputs(model, {"x": x})["y"]
    gradient = outputs(whole, {"x": x, "y_grad": 2 * y / y.size})["B0__3_grad"]
    if zeros:
        gradient[:, gates * 4 :] = 0
    np.testing.assert_allclose(step, gradient, rtol=1e-4, atol=1e-6)
    assert np.abs(step[:, : gates * 4]).max() > 1e-3
