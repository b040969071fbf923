"""Factors of a loss that the graph has, as weights of classes: no parameters, since the loss is linear in them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.support.torch_files import exported

pytestmark = pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")

W = np.linspace(-0.9, 0.8, 12, dtype=np.float32).reshape(4, 3)
V = np.float32([0.2, 1.3, 0.5])
LOGITS = "a = MatMul(x, w) p = LogSoftmax(a) "
PICKED = "u = Unsqueeze(t, one) e = GatherElements<axis=1>(p, u) q = Squeeze(e, one) "
# what becomes of v
FACTORS = {
    "of labels, as onnxruntime writes the loss out": LOGITS
    + PICKED
    + "g = Gather(v, t) m = Mul(q, g) s = ReduceSum<keepdims=0>(m) d = ReduceSum<keepdims=0>(g) r = Div(s, d) y = Neg(r)",
    "of the labels of one kind, as pos_weight": "a = MatMul(x, w) f = Cast<to=1>(o) z = Sigmoid(a) l = Log(z) "
    "b = Mul(f, l) c = Mul(b, v) n = Neg(c) y = ReduceMean<keepdims=0>(n)",
    "less 1, beside the labels": "a = MatMul(x, w) f = Cast<to=1>(o) l = Softplus(a) i = Mul(v, f) j = Add(i, unit) "
    "b = Mul(j, l) y = ReduceMean<keepdims=0>(b)",
    "of squares": "a = MatMul(x, w) d = Sub(a, o2) s = Mul(d, d) m = Mul(v, s) y = ReduceMean<keepdims=0>(m)",
}
PARAMETERS = {
    "a bias": "a = MatMul(x, w) b = Add(a, v) s = Mul(b, b) y = ReduceMean<keepdims=0>(s)",
    "a bias whose mean is the loss": "a = MatMul(x, w) b = Add(a, v) y = ReduceMean<keepdims=0>(b)",
    "a scale of each item": LOGITS + "g = Gather(v, t) u = Unsqueeze(g, one) m = Mul(a, u) z = Sigmoid(m) "
    "y = ReduceMean<keepdims=0>(z)",
    "a weight that the loss has in itself too": "a = MatMul(x, w) s = Mul(a, a) m = Mul(v, s) k = Mul(v, v) "
    "i = Sub(m, k) y = ReduceMean<keepdims=0>(i)",
    "what it is divided by": "a = MatMul(x, w) s = Mul(a, a) m = Div(s, v) y = ReduceMean<keepdims=0>(m)",
    "the last matrix of a critic": "a = MatMul(x, w) h = Tanh(a) y0 = MatMul(h, v) y = ReduceMean<keepdims=0>(y0)",
}


def file_of(body: str) -> ModelProto:
    """Names of a person's: v is the tensor in question."""
    head = "(float[5,4] x, int64[5] t, int64[5,3] o, float[5,3] o2) => (float y)"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g {head} {{ {body} }}')
    tensors = {"w": W, "v": V, "one": np.array([1]), "unit": np.float32(1.0)}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tensors.items() if n in read)
    inputs = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model


@pytest.mark.parametrize("case", FACTORS)
@pytest.mark.parametrize("name", ["v", "crit.weight", "encoder.layer.0.bias"])
def test_a_factor_is_not_trained_and_said(case: str, name: str) -> None:
    file = file_of(FACTORS[case])
    for node in file.graph.node:
        node.input[:] = [name if one == "v" else one for one in node.input]
    next(t for t in file.graph.initializer if t.name == "v").name = name
    with pytest.warns(ob.OnnxBackpropWarning, match=f"left out are '{name}' .nothing bounds it"):
        graph = ob.training_graph(file, loss=None)
    assert list(graph.parameters) == ["w"]
    assert graph.left_out[name] == "factor of the loss"
    assert name in ob.training_graph(file, loss=None, trainable=[name]).parameters


@pytest.mark.parametrize("case", PARAMETERS)
def test_what_is_no_factor_is_trained(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ob.OnnxBackpropWarning)
        assert "v" in ob.training_graph(file_of(PARAMETERS[case]), loss=None).parameters


def test_a_scale_of_predictions_is_no_factor() -> None:
    """The loss comes behind: a sum over atoms with a scale for each kind."""
    body = "a = MatMul(x, w) g = Gather(v, t) u = Unsqueeze(g, one) m = Mul(a, u) y = ReduceSum<keepdims=0>(m)"
    assert "v" in ob.training_graph(file_of(body), loss="mse").parameters


def test_what_is_computed_from_a_parameter_is_no_factor() -> None:
    """exp(-s) of a learned s, which the loss has in a term of its own: left out, s would fall without end."""
    body = "a = MatMul(x, w) s = Mul(a, a) m = Mul(s, v) y = ReduceMean<keepdims=0>(m)"
    file = exported(body, {"w": W[:3], "v": V}, "w s", folded={"v": ["s", "neg", "exp"]})
    file.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, []))
    with pytest.warns(ob.OnnxBackpropWarning, match="trained are 's' .v. .the exporter has computed it from 's'"):
        assert "v" in ob.training_graph(file, loss=None).parameters


def test_a_factor_with_numbers_below_0_is_trained_and_said() -> None:
    """The last layer of a critic or an energy, written as a product and a sum."""
    body = "a = MatMul(x, w) h = Tanh(a) m = Mul(h, v) s = ReduceSum<keepdims=0>(m, one) y = ReduceMean<keepdims=0>(s)"
    file = file_of(body)
    start = np.float32([0.3, -0.4, 0.9])
    next(t for t in file.graph.initializer if t.name == "v").CopyFrom(numpy_helper.from_array(start, "v"))
    with pytest.warns(ob.OnnxBackpropWarning, match="trained are 'v' .the loss is linear in it"):
        graph = ob.training_graph(file, loss=None, optimizer="sgd")
    x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    trainer = ob.Trainer(graph, learning_rate=1.0)
    trainer.step(x=x)
    expected = np.tanh(x.astype(np.float64) @ W).mean(0)
    np.testing.assert_allclose(start - trainer.parameters()["v"], expected, rtol=1e-5, atol=1e-6)
