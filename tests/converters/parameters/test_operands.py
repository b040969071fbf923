"""Files of torch.export in which a parameter equals at first what torch computes of it, and the exporter merged both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
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


def loss_of(graph: ob.TrainingGraph, x: np.ndarray, w: np.ndarray) -> float:
    """The mean of y² at other weights than those of the file."""
    shape = w.shape if w.ndim == 3 else (len(x), 3)
    feeds = {"x": x, graph.target: np.zeros(shape, np.float32), **graph.initial_values(), "w": w}
    return float(np.asarray(ob.session(graph.model).run([graph.loss], feeds)[0]))


@pytest.mark.parametrize("case", CASES)
def test_what_torch_read_transposed(case: str) -> None:
    """An identity matrix is its transpose until the first step."""
    *nodes, formula = CASES[case]
    graph = ob.training_graph(written(EYE, *nodes), loss="mse")
    x, w = (RNG.standard_normal((3, 3)).astype(np.float32) for _ in range(2))
    assert loss_of(graph, x, w) == pytest.approx(np.square(formula(x, w)).mean(), rel=1e-5)


def test_a_stack_of_symmetric_matrices() -> None:
    calls = (MATMUL, "%x, %p_w"), (MATMUL, "%b, %transpose")
    graph = ob.training_graph(written(STACK, "MatMul(b, w)", *calls, x="float[2,3,3] x"), loss="mse")
    x, w = (RNG.standard_normal((2, 3, 3)).astype(np.float32) for _ in range(2))
    expected = np.tanh(x @ w) @ w.transpose(0, 2, 1)
    assert loss_of(graph, x, w) == pytest.approx(np.square(expected).mean(), rel=1e-5)


@pytest.mark.parametrize("operand", ["relu", "tril_1", "clone"])
def test_what_is_computed_otherwise_is_named(operand: str) -> None:
    """relu(w) is w as long as no number is negative; what is cloned may have been transposed before."""
    file = written(EYE, "MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, f"%b, %{operand}"))
    with pytest.warns(ob.OnnxBackpropWarning, match=r"trained are 'w' \(w/computed\).*computed it from 'w'"):
        graph = ob.training_graph(file, loss="mse")
    assert sorted(graph.parameters) == ["w", "w/computed"]


@pytest.mark.parametrize("operand", ["clone", "t", "expand"])
def test_a_matrix_that_is_not_symmetric_stays_as_the_file_has_it(operand: str) -> None:
    """Then the numbers say which way round torch read it."""
    weight = RNG.standard_normal((3, 3)).astype(np.float32)
    graph = ob.training_graph(
        written(weight, "MatMul(b, w)", (MATMUL, "%x, %p_w"), (MATMUL, f"%b, %{operand}")), loss="mse"
    )
    assert list(graph.parameters) == ["w"]
    assert all(node.op_type != "Transpose" or node.input[0] != "w" for node in graph.inference_model().graph.node)
