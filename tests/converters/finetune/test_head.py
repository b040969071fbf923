"""Another last layer: which one it is, what it begins with, what becomes of the outputs, what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.finetune.head import replace_head
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from tests.converters.finetune.cases import f32

CLASSES = 3
W, C = f32(6, 10), f32(10)
PACKED = {"w": np.arange(10 * 16, dtype=np.uint8).reshape(10, 1, 16), "s": np.full(10, 0.1, np.float32), "c": C}
STEPS = {"w": np.ones((6, 10), np.int8), "s": np.full(10, 0.1, np.float32), "c": C}
KERNEL = {"w": f32(10, 6, 1, 1), "c": C}

# name -> the model's end from h on, the shape of h, tensors, the lengths of y, names that are trainable
HEADS = {
    "gemm": ("y = Gemm(h, w, c)", "N, 6", {"w": W, "c": C}, ["N", 3], ("w", "c")),
    "gemm, transposed": ("y = Gemm <transB = 1> (h, w)", "N, 6", {"w": W.T.copy()}, ["N", 3], ("w",)),
    "matmul and bias": ("p = MatMul(h, w) y = Add(c, p)", "N, 5, 6", {"w": W, "c": C}, ["N", 5, 3], ("w", "c")),
    "linear of PyTorch": (
        "t = Transpose(w) p = MatMul(h, t) b = Add(p, c) y = Softmax(b)",
        "N, 6",
        {"w": W.T.copy(), "c": C[None]},
        ["N", 3],
        ("t.new", "c"),
    ),
    "conv and mean": (
        "p = Conv(h, w, c) r = Relu(p) m = GlobalAveragePool(r) f = Flatten(m) y = Softmax(f)",
        "N, 6, 4, 4",
        KERNEL,
        ["N", 3],
        ("w", "c"),
    ),
    "a shape with the classes in it": (
        "p = Conv(h, w, c) m = GlobalAveragePool(p) l = Constant <value_ints = [-1, 10]> () y = Reshape(m, l)",
        "N, 6, 4, 4",
        KERNEL,
        [None, 3],
        ("w", "c"),
    ),
    "dequantized": (
        "d = DequantizeLinear <axis = 1> (w, s) p = MatMul(h, d) y = Add(p, c)",
        "N, 6",
        STEPS,
        ["N", 3],
        ("d.new", "c"),
    ),
    "packed": (
        "y = com.microsoft.MatMulNBits <K = 32, N = 10, bits = 4, block_size = 32> (h, w, s, , , c)",
        "N, 32",
        PACKED,
        ["N", 3],
        ("w", "c"),
    ),
    "packed by bitsandbytes": (
        "p = com.microsoft.MatMulBnb4 <K = 32, N = 10, block_size = 32, quant_type = 1> (h, w, s) y = Add(p, c)",
        "N, 32",
        PACKED | {"w": PACKED["w"].reshape(-1)},
        ["N", 3],
        ("w", "c"),
    ),
    "a temperature behind it": (
        "p = Gemm(h, w, c) y = Div(p, k)",
        "N, 6",
        {"w": W, "c": C, "k": np.float32(2)},
        ["N", 3],
        ("w", "c"),
    ),
}


def model(nodes: str, h: str, tensors: dict[str, np.ndarray], outputs: str = "float[N, 10] y") -> ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> m (float[{h}] x) => ({outputs}) '
        f"{{ h = Tanh(x) {nodes} }}"
    )
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in tensors.items())
    return proto


def lengths(proto: ModelProto, name: str) -> list[str | int | None]:
    (value,) = (v for v in proto.graph.output if v.name == name)
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("name", HEADS)
def test_another_head(name: str) -> None:
    nodes, h, tensors, expected, trainable = HEADS[name]
    base = model(nodes, h, tensors, "float y")
    head = replace_head(base, "y", CLASSES)
    assert head.trainable == trainable
    actual = lengths(head.model, "y")
    assert [a for a, b in zip(actual, expected, strict=True) if b is not None] == [b for b in expected if b is not None]
    stored = {t.name: numpy_helper.to_array(t) for t in head.model.graph.initializer}
    fan_in = 32 if name.startswith("packed") else 6
    assert 0.5 < np.abs(stored[trainable[0]]).max() * np.sqrt(fan_in) <= 1
    for bias in trainable[1:]:
        np.testing.assert_array_equal(stored[bias], np.zeros_like(stored[bias]))
        assert stored[bias].size == CLASSES
    graph = ob.training_graph(head.model, loss="mse", trainable=head.trainable, optimizer="sgd")
    assert tuple(graph.parameters) == trainable
    x = np.random.default_rng(0).standard_normal([2 if d == "N" else int(d) for d in h.split(", ")]).astype(np.float32)
    y = np.asarray(onnxruntime.InferenceSession(head.model.SerializeToString()).run(["y"], {"x": x})[0])
    assert CLASSES in y.shape
    assert 10 not in y.shape
    trainer = ob.Trainer(graph, learning_rate=0.05)
    losses = [trainer.step(x=x, target=np.ones_like(y)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_outputs_behind_it_have_the_new_length_and_others_stay() -> None:
    nodes = "y = Gemm(h, w, c) p = Softmax(y) l = ArgMax <axis = 1, keepdims = 0> (y)"
    outputs = "float[N, 10] y, float[batch, 10] p, int64[N] l, float[N, 6] h"
    head = replace_head(model(nodes, "N, 6", {"w": W, "c": C}, outputs), "p", CLASSES)
    assert [lengths(head.model, name) for name in "yplh"] == [["N", 3], ["batch", 3], ["N"], ["N", 6]]
    onnx.checker.check_model(head.model, full_check=True)


def test_a_tied_weight_stays_with_its_other_reader() -> None:
    """The head of a language model, tied to its embedding."""
    base = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (int64[N] x) => (float[N, 10] y) '
        "{ e = Gather(w, x) t = Transpose(w) y = MatMul(e, t) }"
    )
    base.graph.initializer.append(numpy_helper.from_array(W.T.copy(), "w"))
    head = replace_head(base, "y", CLASSES)
    assert head.trainable == ("t.new",)
    stored = {t.name: numpy_helper.to_array(t) for t in head.model.graph.initializer}
    np.testing.assert_array_equal(stored["w"], W.T)
    y = onnxruntime.InferenceSession(head.model.SerializeToString()).run(None, {"x": np.array([1, 9])})[0]
    np.testing.assert_allclose(np.asarray(y), W.T[[1, 9]] @ stored["t.new"], rtol=1e-5)


def test_the_seed_chooses_the_weight_and_the_model_is_not_changed() -> None:
    base = model("y = Gemm(h, w, c)", "N, 6", {"w": W, "c": C})
    text = base.SerializeToString()
    one, two, other = (replace_head(base, "y", 3, seed=seed).model for seed in (1, 1, 2))
    assert one == two != other
    assert base.SerializeToString() == text


REFUSED = [
    (
        "y = Gemm(h, w, c)",
        {"w": W, "c": C},
        "z",
        3,
        InvalidArgumentError,
        "expected a graph output, got 'z'. There are y",
    ),
    ("y = Gemm(h, w, c)", {"w": W, "c": C}, "y", 0, InvalidArgumentError, "classes: expected a whole number of 1"),
    ("y = Tanh(h)", {}, "y", 3, InvalidArgumentError, "no layer with a weight leads to 'y', only 'x'"),
    ("p = Gemm(h, w) y = MatMul(p, p)", {"w": W}, "y", 3, UnsupportedError, "lies between 'y' and the last Gemm"),
    ("p = Gemm(h, w) y = Mul(p, c)", {"w": W, "c": C}, "y", 3, UnsupportedError, "expected a bias of 10 numbers"),
    ("y = Gemm(h, w, h)", {"w": f32(6, 6)}, "y", 3, UnsupportedError, "got a computed one"),
    (
        "p = Gemm(h, w) l = Constant <value_ints = [10, -1]> () y = Reshape(p, l)",
        {"w": W},
        "y",
        3,
        UnsupportedError,
        r"its lengths are \[10, -1\]; expected the 10 classes in one place behind the first",
    ),
    (
        "y = Conv <group = 2> (h, w)",
        {"w": f32(10, 3, 1)},
        "y",
        3,
        UnsupportedError,
        "its groups do not divide 3 classes",
    ),
]


@pytest.mark.parametrize(("nodes", "tensors", "output", "classes", "error", "sentence"), REFUSED)
def test_refusals(
    nodes: str, tensors: dict[str, np.ndarray], output: str, classes: int, error: type[Exception], sentence: str
) -> None:
    shape = "N, 6, 4" if "Conv" in nodes else "N, 6"
    with pytest.raises(error, match=sentence):
        replace_head(model(nodes, shape, tensors, "float y"), output, classes)
