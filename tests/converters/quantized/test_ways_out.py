"""What is said of quantised files that are trained as they are, and what `dequantize` refuses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import onnx_backprop as ob
from tests.converters.quantized.form import F32, f32, ints, scale
from tests.converters.quantized.test_forms import run, tensors
from tests.converters.quantized.test_requantize import model

W, S = ints("int8", 4, 3), scale(0.02)
ZU = np.array(128, np.uint8)
GELU = (
    "q = QuantizeLinear(x, sx, zu) d = DequantizeLinear(q, sx, zu) w1 = DequantizeLinear(w1_quantized, s) "
    "a = MatMul(d, w1) b = Div(a, root) e = Erf(b) f = Add(e, one) g = Mul(a, f) h = Mul(g, half) "
    "r = QuantizeLinear(h, sx, zu) i = DequantizeLinear(r, sx, zu) w2 = DequantizeLinear(w2_quantized, s) "
    "y = MatMul(i, w2)"
)
OF_GELU = {"w1_quantized": ints("int8", 4, 6), "w2_quantized": ints("int8", 6, 3), "s": S, "sx": scale(0.05)}
OF_GELU |= {"zu": ZU, "root": scale(2**0.5), "one": scale(1), "half": scale(0.5)}


@pytest.mark.parametrize("straight_through", [False, True])
def test_constants_are_not_what_is_left_to_train(straight_through: bool) -> None:
    """An int8 file with GELU: the constants of GELU are all its floats, and the error names the way."""
    with pytest.raises(ob.InvalidArgumentError, match=r"nothing to differentiate.*ob\.dequantize\(model\)"):
        ob.training_graph(model(GELU, OF_GELU), loss="mse", straight_through=straight_through)


def test_its_float_model_trains_the_weights_alone() -> None:
    graph = ob.training_graph(ob.dequantize(model(GELU, OF_GELU)), loss="mse")
    assert sorted(graph.parameters) == ["w1", "w2"]


def test_rounding_names_the_way() -> None:
    given = OF_GELU | {"c": f32(4)}
    nodes = GELU.replace("QuantizeLinear(x,", "QuantizeLinear(u,", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* numbers of the file are trained", ob.OnnxBackpropWarning)
        with pytest.raises(ob.UnsupportedError, match=r"it rounds.*ob\.dequantize\(model\).*straight_through"):
            ob.training_graph(model("u = Add(x, c) " + nodes, given), loss="mse")


PARTS = {
    "QDQ": ("w = DequantizeLinear(w_quantized, s) p = MatMul(x, w) y = Add(p, b)", S),
    "Cast and Mul": ("c = Cast <to = 1> (w_quantized) w = Mul(c, s) p = MatMul(x, w) y = Add(p, b)", S),
    "dynamic": (
        "q, sx, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) f = Cast <to = 1> (i) "
        "m = Mul(s, sx) p = Mul(f, m) y = Add(p, b)",
        S,
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_trained(name: str) -> None:
    """The warning has the way out in front of the list of what is not trained."""
    nodes, s = PARTS[name]
    given = model(nodes, {"w_quantized": W, "s": s, "b": f32(3)})
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        ob.training_graph(given, loss="mse")
    shares = [str(w.message) for w in caught if "numbers of the file are trained" in str(w.message)]
    assert len(shares) == 1
    assert (
        "are trained (ob.dequantize(model) makes parameters of integers); not trained: 'w_quantized' (12" in shares[0]
    )


def test_scales_of_blocks_are_not_trained_by_a_name() -> None:
    """MatMulNBits of a file whose exporter names its parameters: what a quantiser has added is none of them."""
    given = model(
        "h = com.microsoft.MatMulNBits <K = 16, N = 3, bits = 8, block_size = 16> (x, fc_w_Q8, fc_w_scales) y = Add(h, b)",
        {"fc_w_Q8": np.arange(48, dtype=np.uint8).reshape(3, 1, 16), "fc_w_scales": f32(3), "b": f32(3)},
        "float[N, 16] x",
    )
    for key in ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.fx_node"):
        given.graph.node[0].metadata_props.add(key=key, value="['', 'fc', 'linear']")
    with pytest.warns(ob.OnnxBackpropWarning, match=r"ob\.dequantize"):
        assert list(ob.training_graph(given, loss="mse").parameters) == ["b"]


def test_concat_of_integers() -> None:
    """Which shape inference once called an invalid model."""
    given = model(
        "q = QuantizeLinear(x, s, zu) c = com.microsoft.QLinearConcat <axis = 1> (s, zu, q, s, zu, q, s, zu) "
        "y = DequantizeLinear(c, s, zu)",
        {"s": S, "zu": ZU},
    )
    with pytest.raises(ob.UnsupportedError, match=r"QLinearConcat.*ob\.dequantize"):
        ob.backward(given, wrt=["x"])
    x = np.array([[0.5, -1, 1, 0.3]], F32)
    graph = ob.backward(ob.dequantize(given), wrt=["x"])
    np.testing.assert_allclose(run(ob.dequantize(given), x), np.concatenate([x, x], axis=1), atol=0.0101)
    assert "x_grad" in {value.name for value in graph.graph.output}


QDQ = "q = QuantizeLinear(x, s, zu) "
REFUSED = {
    "another scale": (QDQ + "y = DequantizeLinear(q, t, zu)", "DequantizeLinear.*expected equal ones"),
    "a computed scale": (
        "k = ReduceMax <keepdims = 0> (x) w = DequantizeLinear(w_quantized, k) y = MatMul(x, w)",
        "the scale 'k' of the weight 'w_quantized' is computed",
    ),
    "a computed zero point": (
        "z = Cast <to = 3> (n) w = DequantizeLinear(w_quantized, s, z) y = MatMul(x, w)",
        "the zero point 'z' of the weight",
    ),
    "integers as they are": (QDQ + "y = Cast <to = 1> (q)", "Cast.*it reads the integers 'q'"),
    "sums as they are": (
        "q, a, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) j = Neg(i) y = Cast <to = 1> (j)",
        "Neg.*it reads the integers 'i'",
    ),
    "two weights": (
        "i = MatMulInteger(w_quantized, v_quantized) f = Cast <to = 1> (i) y = Mul(f, s)",
        "one operand at least",
    ),
    "one factor too many": (
        "q, a, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) f = Cast <to = 1> (i) m = Mul(a, s) "
        "p = Mul(m, t) u = Unsqueeze(p, axes) y = Mul(f, u)",
        "beside their scales",
    ),
    "one factor too few": (
        "q, a, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) f = Cast <to = 1> (i) y = Mul(f, t)",
        "MatMulInteger.*are not multiplied by all scales",
    ),
    "a bias of another scale": (
        "q, a, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) d = Div(n, s) e = Round(d) "
        "b = Cast <to = 6> (e) j = Add(i, b) f = Cast <to = 1> (j) m = Mul(a, s) y = Mul(f, m)",
        "'n' was divided by another scale",
    ),
    "another bias": (
        "q, a, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w_quantized, z) b = Cast <to = 6> (n) "
        "j = Add(i, b) f = Cast <to = 1> (j) m = Mul(a, s) y = Mul(f, m)",
        "expected a bias divided by their scale",
    ),
    "quantised twice": (
        QDQ + "r = QuantizeLinear(q, s, zu) y = DequantizeLinear(r, s, zu)",
        "quantises the integers 'q'",
    ),
    "no integers": (
        "q = QuantizeLinear <output_dtype = 17> (x, s) y = DequantizeLinear(q, s)",
        "its numbers are no integers",
    ),
    "pads with what": (
        QDQ + "v = Cast <to = 2> (n) p = Pad(q, pads, v) y = DequantizeLinear(p, s, zu)",
        "its padding value or its scale is computed",
    ),
    "channels last": (
        QDQ
        + "r = com.microsoft.QLinearGlobalAveragePool <channels_last = 1> (q, s, zu, s, zu) y = DequantizeLinear(r, s, zu)",
        "channels_last=1",
    ),
    "another operator": (QDQ + "r = com.microsoft.QOrderedGelu(q, s, t) y = Cast <to = 1> (r)", "no float form"),
    "g_idx": (
        "y = com.microsoft.MatMulNBits <K = 4, N = 3, bits = 8, block_size = 16> (x, packed, fours, , order)",
        "act-order",
    ),
    "packed for one processor": (
        "y = com.microsoft.MatMulNBits <K = 4, N = 3, bits = 8, block_size = 16, weight_prepacked = 1> (x, packed, fours)",
        "weight_prepacked=0",
    ),
    "3 bits": (
        "y = com.microsoft.MatMulNBits <K = 4, N = 3, bits = 3, block_size = 16> (x, packed, fours)",
        "2, 4 and 8 bits",
    ),
    "too few scales": (
        "y = com.microsoft.MatMulNBits <K = 40, N = 3, bits = 8, block_size = 16> (x, packed, fours)",
        "in blocks of 16 has 3 scales",
    ),
    "scales along another axis": (
        "w = DequantizeLinear <axis = 0> (w_quantized, fours) y = MatMul(x, w)",
        "along axis 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("named", [True, False], ids=["named", "no name"])
def test_refused(name: str, named: bool) -> None:
    """With the operator and the node, its outputs where it has no name, and what to do."""
    nodes, sentence = REFUSED[name]
    given = model(
        nodes,
        {
            "s": S,
            "t": scale(0.5),
            "zu": ZU,
            "w_quantized": W,
            "v_quantized": W.T.copy(),
            "n": np.array([1, 0, 2.0], F32),
        }
        | {"pads": np.array([0, 0, 0, 1]), "axes": np.array([0]), "order": np.zeros(4, np.int32)}
        | {"packed": np.zeros((3, 1, 16), np.uint8), "fours": f32(3)},
    )
    used = {i for node in given.graph.node for i in node.input}
    kept = [t for t in given.graph.initializer if t.name in used]
    del given.graph.initializer[:]
    given.graph.initializer.extend(kept)
    for n, node in enumerate(given.graph.node):
        node.name = f"node {n}" if named else ""
    with pytest.raises(ob.UnsupportedError, match=sentence) as error:
        ob.dequantize(given)
    assert ("'node " in str(error.value)) == named
    assert tensors(given)
