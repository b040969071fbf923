"""What is trained by default: what defines the function is no parameter, though it is a float."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.parameters import structure, values

pytestmark = pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")  # which most of these say

W = np.linspace(-0.9, 0.8, 24, dtype=np.float32).reshape(4, 6)
ANGLES = np.arange(16)[:, None] * 10.0 ** -np.arange(3.0)[None]


def model_of(body: str, x: str = "float[N,4] x", **tensors: object) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g ({x}) => (float y) {{ {body} }}')
    arrays = {"w": W, **tensors}
    for name, value in arrays.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


# name: nodes, tensors, what is left out and as what
CONSTANTS: dict[str, tuple[str, dict[str, object], dict[str, str]]] = {
    "exponent": ("a = MatMul(x, w) y = Pow(a, e)", {"e": 2.0}, {"e": "exponent of Pow"}),
    "exponents": ("a = MatMul(x, w) y = Pow(a, e)", {"e": [2.0, 3.0, 1.0, 2.0, 3.0, 1.5]}, {"e": "exponent of Pow"}),
    "step of a range": (
        "a = MatMul(x, w) r = Range(zero, six, one) y = Add(a, r)",
        {"zero": 0.0, "six": 6.0, "one": 1.0},
        {"zero": "limit of Range", "six": "limit of Range", "one": "step of Range"},
    ),
    "eps and GELU's numbers": (
        "a = MatMul(x, w) b = Mul(a, half) c = Add(b, eps) y = Div(c, root)",
        {"half": 0.5, "eps": [1e-5], "root": [[1.4142135]]},
        dict.fromkeys(["half", "eps", "root"], "a single number"),
    ),
    "limits": (
        "a = MatMul(x, w) b = Clip(a, low, high) c = Max(b, low2) y = Min(c, high2)",
        {"low": -1.0, "high": 1.0, "low2": [-0.5] * 6, "high2": 0.7},
        {"low": "limit of Clip", "high": "limit of Clip", "low2": "limit of Max", "high2": "limit of Min"},
    ),
    "a mask that is added": (
        "a = MatMul(x, w) y = Add(a, mask)",
        {"mask": np.triu(np.full((6, 6), -np.finfo(np.float32).max), 1)},
        {"mask": "mask or limit"},
    ),
    "a mask of -100, as Swin's": (
        "a = MatMul(x, w) b = Identity(mask) y = Add(a, b)",
        {"mask": np.triu(np.full((6, 6), -100.0), 1)},
        {"mask": "mask or limit"},
    ),
    "a mask that is multiplied": (
        "a = MatMul(x, w) y = Mul(a, mask)",
        {"mask": np.triu(np.ones((6, 6)))},
        {"mask": "mask or limit"},
    ),
    "what Where puts in": (
        "a = MatMul(x, w) c = Greater(a, low) d = Where(c, zeros, low) e = Add(a, d) f = Expand(zeros, six) y = Add(e, f)",
        {"zeros": 0.0, "low": -np.finfo(np.float32).max, "six": np.array([1, 6])},
        {"zeros": "fill of Where", "low": "fill of Where"},
    ),
    "infinities": ("a = MatMul(x, w) y = Max(a, floor)", {"floor": np.full(6, -np.inf)}, {"floor": "limit of Max"}),
    "rotary frequencies": (
        "a = Slice(x, zero, one, one) s = MatMul(a, f) t = Identity(s) c = Cos(t) d = Sin(s) e = Add(c, d) "
        "b = MatMul(x, w) y = Mul(e, b)",
        {"f": np.geomspace(1, 1e-4, 6).reshape(1, 6), "zero": np.array([0]), "one": np.array([1])},
        {"f": "frequency of Sin and Cos"},
    ),
    "sines and cosines": (
        "a = MatMul(x, w) c = Gather(cosines, n) s = Gather(sines, n) b = Mul(a, c) d = Mul(a, s) y = Sub(b, d)",
        {"cosines": np.tile(np.cos(ANGLES), 2), "sines": np.tile(np.sin(ANGLES), 2), "n": np.int64(3)},
        dict.fromkeys(["cosines", "sines"], "table of sines and cosines"),
    ),
    "positions of a transformer, sines and cosines in turn": (
        "a = MatMul(x, w) p = Slice(table, zero, ten) q = Squeeze(p, zero) r = ReduceMean<keepdims=0>(q, zero) "
        "y = Add(a, r)",
        {
            "table": np.stack([np.sin(ANGLES), np.cos(ANGLES)], -1).reshape(1, 16, 6),
            "zero": np.array([0]),
            "ten": np.array([10]),
        },
        {},  # reached through ReduceMean alone: not seen, and trained
    ),
    "anchors and strides": (
        "a = MatMul(x, w) s = Sigmoid(a) b = Add(s, anchors) y = Mul(b, strides)",
        {"anchors": np.arange(6) + 0.5, "strides": [8.0, 8, 16, 16, 32, 32]},
        dict.fromkeys(["anchors", "strides"], "table of positions"),
    ),
    "a mask along one axis, added to a product": (
        "a = MatMul(x, w) y = Add(a, mask)",
        {"mask": [0.0, 0, -1e9, -1e9, 0, 0]},
        {"mask": "mask or limit"},
    ),
    "a mask behind a logarithm": (
        "a = MatMul(x, w) m = Log(mask) y = Add(a, m)",
        {"mask": np.tril(np.ones((6, 6)))},
        {"mask": "mask or limit"},
    ),
    "rotations that are stretched, of two axes of an image": (
        "a = MatMul(x, w) b = Mul(a, cosines) c = Mul(a, sines) y = Sub(b, c)",
        {
            "cosines": 1.2 * np.cos(np.arange(36).reshape(6, 6) / 7),
            "sines": 1.2 * np.sin(np.arange(36).reshape(6, 6) / 7),
        },
        dict.fromkeys(["cosines", "sines"], "table of sines and cosines"),
    ),
    "places of a distribution, as YOLOv8's": (
        "a = MatMul(x, w) b = Softmax(a) y = MatMul(b, places)",
        {"places": np.arange(6.0).reshape(6, 1)},
        {"places": "table of positions"},
    ),
    "an input's statistics": (
        "a = Sub(x, mean) b = Div(a, deviation) y = MatMul(b, w)",
        {"mean": [0.485, 0.456, 0.406, 0.1], "deviation": [0.229, 0.224, 0.225, 0.3]},
        dict.fromkeys(["mean", "deviation"], "statistic of an input"),
    ),
    "an input's statistics before gain and shift": (
        "a = Sub(x, m) b = Div(a, d) c = Mul(b, g) e = Add(c, h) y = MatMul(e, w)",
        {"m": W[:, 0], "d": W[:, 1], "g": W[:, 2], "h": W[:, 3]},
        dict.fromkeys(["m", "d"], "statistic of an input"),
    ),
    "a weight that is limited from below": (
        "m = Max(v, eps) a = MatMul(x, w) y = MatMul(a, m)",
        {"v": 2 * W.T, "eps": 1e-3},
        {"eps": "limit of Max"},
    ),
    "scales of a Resize": (
        'a = MatMul(x, w) y = Resize<mode="linear">(a, "", s)',
        {"s": [1.0, 2.0]},
        {},  # no gradient exists for them
    ),
    "padding": (
        "a = MatMul(x, w) y = Pad(a, by, v)",
        {"by": np.array([0, 1, 0, 1]), "v": 0.3},
        {"v": "padding value of Pad"},
    ),
}


GUESSES = {structure.STATISTIC, structure.FREQUENCY, values.ANGLES, values.BANK, values.MASK, values.POSITIONS}
NAMES_OF_CONSTANTS = {"mean", "mask", "grid", "anchors", "strides", "window"}  # with which nothing is guessed


@pytest.mark.parametrize("case", CONSTANTS)
@pytest.mark.filterwarnings("ignore:the file does not say for sure")
def test_left_out(case: str) -> None:
    body, tensors, left_out = CONSTANTS[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(model_of(body, **tensors), loss="mse", optimizer="adam")
    assert graph.left_out == left_out
    doubts = [str(w.message) for w in caught if str(w.message).startswith("the file does not say")]
    guessed = {name for name, what in left_out.items() if what in GUESSES} - NAMES_OF_CONSTANTS
    assert {name for name in left_out if any(f"{name!r}" in text for text in doubts)} == guessed
    assert "w" in graph.parameters
    assert not set(graph.parameters) & set(left_out)
    assert ob.TrainingGraph.load(graph.model).left_out == left_out
    for name, what in left_out.items():
        assert any(what in line and name in line for line in graph.summary().splitlines())
    converted = ob.backward(model_of(body, **tensors))
    assert {o.name for o in converted.graph.output if o.name.endswith("_grad")} == {
        f"{n}_grad" for n in graph.parameters
    }


NAMED = [case for case, (_, _, left_out) in CONSTANTS.items() if left_out and case != "step of a range"]


@pytest.mark.parametrize("case", NAMED)
def test_trained_where_it_is_named(case: str) -> None:
    body, tensors, left_out = CONSTANTS[case]
    name = next(iter(left_out))
    graph = ob.training_graph(model_of(body, **tensors), loss="mse", trainable=["w", name])
    assert set(graph.parameters) == {"w", name}
    assert name not in graph.left_out
    globbed = ob.training_graph(model_of(body, **tensors), loss="mse", trainable=["*"])
    assert name not in globbed.parameters


WEIGHTS: dict[str, tuple[str, dict[str, object]]] = {
    "the slope of PRelu": ("a = MatMul(x, w) y = PRelu(a, s)", {"s": [0.25]}),
    "the bias of one output": ("a = MatMul(x, v) y = Add(a, b)", {"v": W[:, :1], "b": [0.5]}),
    "the bias behind a reshape": ("a = MatMul(x, v) r = Flatten(a) y = Add(b, r)", {"v": W[:, :1], "b": [0.0]}),
    "a table of one row": ("a = MatMul(x, w) t = Gather(v, n) y = Mul(a, t)", {"v": [[0.5]], "n": np.int64(0)}),
    "gain and shift": ("a = MatMul(x, w) b = Mul(a, g) y = Add(b, s)", {"g": [1.0] * 6, "s": [0.0] * 6}),
    "whole numbers of a product": ("y = MatMul(x, v)", {"v": np.arange(8.0).reshape(4, 2)}),
    "an embedding whose first row is zeros": (
        "a = MatMul(x, w) t = Gather(v, n) y = Add(a, t)",
        {"v": np.vstack([np.zeros((1, 6)), np.linspace(-1e-3, 1e-3, 54).reshape(9, 6)]), "n": np.int64(3)},
    ),
    "the bias of a sparse autoencoder": (
        "c = Sub(x, b) a = MatMul(c, w) r = Relu(a) d = MatMul(r, v) y = Add(d, b)",
        {"b": [0.3, 0.1, -0.2, 0.7], "v": 2 * W.T},
    ),
    "centres of radial functions": (
        "u = Unsqueeze(x, one) d = Sub(u, centres) e = Mul(d, d) s = ReduceSum<keepdims=0>(e, two) y = MatMul(s, v)",
        {"centres": W.T.reshape(1, 6, 4), "one": np.array([1]), "two": np.array([2]), "v": W.T},
    ),
    "Fourier features that are learned": ("s = MatMul(x, w) c = Cos(s) d = Sin(s) y = Add(c, d)", {}),
    "the scale of logits, of which the logarithm is stored": ("a = MatMul(x, w) e = Exp(s) y = Mul(a, e)", {"s": 2.65}),
    "Fourier features of one kind": ("a = MatMul(x, w) y = Sin(a)", {}),
    "nothing but single numbers": ("a = Mul(x, s) y = Add(a, t)", {"s": 2.0, "t": [1.0]}),
    "nothing but whole numbers": ("y = Mul(x, s)", {"s": [1.0, 2.0, 3.0, 4.0]}),
    "nothing but an input's statistics": ("a = Sub(x, m) y = Mul(a, s)", {"m": W[:, 0], "s": W[:, 1]}),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_trained_by_default(case: str) -> None:
    body, tensors = WEIGHTS[case]
    model = model_of(body, **tensors)
    read = {name for node in model.graph.node for name in node.input}
    graph = ob.training_graph(model, loss="mse", training_mode=False)
    floats = {"w", *(name for name, value in tensors.items() if np.asarray(value).dtype.kind == "f")}
    assert set(graph.parameters) == floats & read
    assert not graph.left_out


def test_an_exponent_at_negative_numbers_makes_no_nan() -> None:
    """GELU as PyTorch exports it: its exponent would get the logarithm of negative numbers for a gradient."""
    body = "a = MatMul(x, w) b = Pow(a, e) c = Mul(b, s) d = Add(a, c) t = Tanh(d) y = Mul(a, t)"
    model = model_of(body, e=3.0, s=0.044715)
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="adam"), learning_rate=1e-2)
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    losses = [trainer.step(x=x, target=np.ones((3, 6), np.float32)) for _ in range(10)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_a_range_keeps_its_length() -> None:
    """YOLOv8's anchors."""
    body = (
        "a = MatMul(x, w) s = Shape<start=1,end=2>(a) l = Squeeze(s) f = Cast<to=1>(l) r = Range(zero, f, one) "
        "c = Add(r, half) y = Add(a, c)"
    )
    model = model_of(body, zero=0.0, one=1.0, half=0.5)
    graph = ob.training_graph(model, loss="mse", optimizer="adam")
    assert list(graph.parameters) == ["w"]
    trainer = ob.Trainer(graph, learning_rate=1e-2)
    for _ in range(3):
        trainer.step(x=np.ones((2, 4), np.float32), target=np.zeros((2, 6), np.float32))


def test_nothing_is_left() -> None:
    model = model_of("y = Pow(x, e)", e=2.0)
    with pytest.raises(ob.InvalidArgumentError, match=r"trainable: .*'e' \(exponent of Pow\)"):
        ob.training_graph(model, loss="mse")


@pytest.mark.parametrize(
    ("name", "trained", "warned"),
    [
        ("swish.beta", True, True),
        ("block/gate", False, True),
        ("clip/logit_scale", False, True),
        ("temperature", False, True),
        ("norm/bias/eps", False, False),
        ("norm/weight_eps", False, False),
        ("model/bias_add/Const__12", False, False),
        ("half", False, False),
        ("theta", False, True),
        ("jax_const1", False, True),
        ("a17", False, True),
        ("model/dense/mul/y", False, False),
        ("17", False, False),
        ("/model/constants/FLOAT/0.0442", False, False),
        ("node/Constant_13/else_branch", False, False),
    ],
)
def test_a_single_number_by_its_name(name: str, trained: bool, warned: bool) -> None:
    """A file of no kinds: most single numbers are constants, and those of a parameter's name are said."""
    model = model_of("a = MatMul(x, w) y = Mul(a, number)", number=0.7)
    model.graph.initializer[1].name = model.graph.node[1].input[1] = name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(model, loss="mse")
    assert (name in graph.parameters) is trained
    assert any(f"{name!r} (it is a single number" in str(w.message) for w in caught) is warned


@pytest.mark.parametrize(("name", "trained"), [("const_1", True), ("jax_const1", True), ("v", True), ("fill", False)])
@pytest.mark.filterwarnings("ignore:the file does not say for sure")
def test_a_bias_of_zeros_by_its_name(name: str, trained: bool) -> None:
    """jax2onnx calls everything const_1, and writes no zeros where a module has no bias."""
    model = model_of("y = Gemm(x, w, number)", number=[0.0] * 6)
    model.graph.initializer[1].name = model.graph.node[0].input[2] = name
    graph = ob.training_graph(model, loss="mse")
    assert (name in graph.parameters) is trained
