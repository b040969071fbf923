"""Files of torch.export in which a parameter equals at first what torch computes of it, and the exporter merged both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.converters.parameters.layout import layout_of
from onnx_backprop.converters.prepare.load import prepare
from tests.support.torch_files import exported, with_operations

RNG = np.random.default_rng(5)
EYE, STACK = np.eye(3, dtype=np.float32), np.stack([np.eye(3, dtype=np.float32)] * 2)
LINEAR, MATMUL, ADDMM = (f"torch.ops.aten.{name}.default" for name in ("linear", "matmul", "addmm"))
TWO = "a = MatMul(x, w) b = Tanh(a) y = {}"
Call = tuple[str, str]  # an operation of torch and its arguments
Formula = Callable[[np.ndarray, np.ndarray], np.ndarray]

# what the last node is, the calls that the first and the last come from, and what torch computes
CASES: dict[str, tuple[str, Call, Call, Formula]] = {
    "as it is": ("MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, "%b, %p_w"), lambda x, w: np.tanh(x @ w) @ w),
    "t": ("MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, "%b, %t"), lambda x, w: np.tanh(x @ w) @ w.T),
    "permute": ("MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, "%b, %permute_2"), lambda x, w: np.tanh(x @ w) @ w.T),
    "linear": ("MatMul(b, w)", (LINEAR, "%x, %p_w"), (MATMUL, "%b, %p_w"), lambda x, w: np.tanh(x @ w.T) @ w),
    "linear of t": (
        "Gemm<transB = 1>(b, w)",
        (MATMUL, "%x, %p_w"),
        (LINEAR, "%b, %t"),
        lambda x, w: np.tanh(x @ w) @ w,
    ),
    "a Gemm that transposes": (
        "Gemm<transB = 1>(b, w)",
        (MATMUL, "%x, %p_w"),
        (LINEAR, "%b, %p_w"),
        lambda x, w: np.tanh(x @ w) @ w.T,
    ),
    "addmm": ("Gemm(b, w, c)", (MATMUL, "%x, %p_w"), (ADDMM, "%b_c, %b, %t"), lambda x, w: np.tanh(x @ w) @ w.T + 1),
    "no product": (
        "Mul(b, w)",
        (MATMUL, "%x, %p_w"),
        ("torch.ops.aten.mul.Tensor", "%b, %t"),
        lambda x, w: np.tanh(x @ w) * w.T,
    ),
}


def written(weight: np.ndarray, node: str, first: Call, last: Call, x: str = "float[N,3] x") -> ModelProto:
    """A file as torch writes it of a module whose parameter is w."""
    bias = {"c": np.ones(3, np.float32)} if "c)" in node else {}
    file = exported(TWO.format(node), {"w": weight, **bias}, " ".join(["w", *bias]), x=x)
    for name, (operation, arguments) in zip("ay", (first, last), strict=True):
        with_operations(file, {name: arguments}, operation)
    return file


def loss_of(graph: ob.TrainingGraph, x: np.ndarray, w: np.ndarray, name: str = "w") -> float:
    """The mean of y² at other weights than those of the file."""
    shape = w.shape if w.ndim == 3 else (len(x), 3)
    feeds = {"x": x, graph.target: np.zeros(shape, np.float32), **graph.initial_values(), name: w}
    return float(np.asarray(ob.session(graph.model).run([graph.loss], feeds)[0]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:the file has one tensor for a parameter and for what torch computed")
def test_a_weight_is_transposed_where_torch_reads_its_transpose(case: str) -> None:
    """An identity matrix is its transpose until the first step."""
    *nodes, formula = CASES[case]
    graph = ob.training_graph(written(EYE, *nodes), loss="mse")
    x, w = (RNG.standard_normal((3, 3)).astype(np.float32) for _ in range(2))
    assert loss_of(graph, x, w) == pytest.approx(np.square(formula(x, w)).mean(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:the file has one tensor for a parameter and for what torch computed")
def test_a_stack_of_symmetric_matrices() -> None:
    calls = (MATMUL, "%x, %p_w"), (MATMUL, "%b, %transpose")
    graph = ob.training_graph(written(STACK, "MatMul(b, w)", *calls, x="float[2,3,3] x"), loss="mse")
    x, w = (RNG.standard_normal((2, 3, 3)).astype(np.float32) for _ in range(2))
    expected = np.tanh(x @ w) @ w.transpose(0, 2, 1)
    assert loss_of(graph, x, w) == pytest.approx(np.square(expected).mean(), rel=1e-5)


READ_AS = "the file has one tensor for a parameter and for what torch computed of it"


@pytest.mark.parametrize("operand", ["relu", "tril_1", "clone", "leaky_relu", "stack"])
def test_the_warning_for_a_weight_that_equals_what_torch_computes_from_it(operand: str) -> None:
    """relu(w) is w as long as no number is negative; what is cloned may have been transposed before."""
    file = written(EYE, "MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, f"%b, %{operand}"))
    with pytest.warns(ob.OnnxBackpropWarning, match=rf"{READ_AS}.*'w' \({operand}\)"):
        graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == ["w"]


@pytest.mark.parametrize("arguments", ["%clone, %t", "%t, %b"])
def test_a_place_that_the_file_does_not_say_is_named(arguments: str) -> None:
    """The exporter dropped a copy of the other operand, or changed their order."""
    file = written(EYE, "Mul(b, w)", (MATMUL, "%x, %p_w"), ("torch.ops.aten.mul.Tensor", arguments))
    with pytest.warns(ob.OnnxBackpropWarning, match=rf"{READ_AS}.*'w' \(t\)"):
        ob.training_graph(file, loss="mse")


def test_layers_of_a_tied_autoencoder_on_three_axes() -> None:
    """The only tensor is what the first layer reads, the transposed weight under a name of the exporter."""
    file = exported(
        "a = MatMul(x, val_0) b = Tanh(a) y = MatMul(b, val_0)",
        {"val_0": EYE},
        "w",
        folded={"val_0": ["w"]},
        x="float[N,3] x",
    )
    with_operations(with_operations(file, {"a": "%x, %p_w"}, LINEAR), {"y": "%b, %t"}, LINEAR)
    with pytest.warns(ob.OnnxBackpropWarning, match=rf"{READ_AS}.*'w' \(t\)"):
        graph = ob.training_graph(file, loss="mse")
    x, w = (RNG.standard_normal((3, 3)).astype(np.float32) for _ in range(2))
    assert loss_of(graph, x, w, "val_0") == pytest.approx(np.square(np.tanh(x @ w) @ w.T).mean(), rel=1e-5)
    assert layout_of(ir.from_proto(prepare(file)).graph.initializers["val_0"]) == ("w", (3, 3), True, False)


@pytest.mark.filterwarnings("ignore:the file has one tensor for a parameter and for what torch computed")
@pytest.mark.filterwarnings("ignore:trained as one, since the file holds one tensor of equal numbers")
def test_a_zero_bias_beside_a_transpose_is_there_again() -> None:
    """Both layers have it, and the exporter dropped it from both."""
    file = exported("a = Gemm<transB = 1>(x, w) b = Tanh(a) y = Gemm<transB = 1>(b, w)", {"w": EYE}, "w c")
    with_operations(with_operations(file, {"a": "%x, %p_w, %p_c"}, LINEAR), {"y": "%b, %t, %p_c"}, LINEAR)
    graph = ob.training_graph(file, loss="mse")
    assert sorted(graph.parameters) == ["c", "w"]
    assert sum("c" in node.input for node in graph.inference_model().graph.node if node.op_type == "Gemm") == 2


@pytest.mark.parametrize("value", ["h", "t"])
def test_a_mask_of_an_attention_is_no_value(value: str) -> None:
    """An Add behind a product is an attention's mask too, whose call names the value third, and the mask last."""
    body = "k = Transpose<perm = [1, 0]>(HH) a = MatMul(x, k) b = Add(a, w) c = MatMul(b, HH) y = MatMul(w, c)"
    file = exported(body.replace("HH", value), {"w": EYE}, "w", x=f"float[3,3] x, float[3,3] {value}")
    call = f"%x, %{value}, %{value}, %p_w"
    with_operations(file, dict.fromkeys("abc", call), "torch.ops.aten.scaled_dot_product_attention.default")
    graph = ob.training_graph(with_operations(file, {"y": "%p_w, %c"}, MATMUL), loss="mse")
    assert not any(node.op_type == "Transpose" and node.input[0] == "w" for node in graph.model.graph.node)


def test_a_normalisation_without_a_bias() -> None:
    """Whose call names fewer arguments than the operator may have inputs."""
    body = "y = LayerNormalization<axis = -1>(x, norm.weight)"
    file = exported(body, {"norm.weight": np.ones(3, np.float32)}, "norm.weight other.weight", modules={"y": "norm"})
    with_operations(file, {"y": "%x, %p_norm_weight"}, "torch.ops.aten.layer_norm.default")
    with pytest.warns(ob.OnnxBackpropWarning, match="no tensor for these parameters of the module: 'other.weight'"):
        graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == ["norm.weight"]


@pytest.mark.parametrize("operand", ["clone", "t", "expand"])
def test_a_matrix_that_is_not_symmetric_stays_as_the_file_has_it(operand: str) -> None:
    """Then the numbers say which way round torch read it."""
    weight = RNG.standard_normal((3, 3)).astype(np.float32)
    graph = ob.training_graph(
        written(weight, "MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, f"%b, %{operand}")), loss="mse"
    )
    assert list(graph.parameters) == ["w"]
    assert all(node.op_type != "Transpose" or node.input[0] != "w" for node in graph.inference_model().graph.node)
