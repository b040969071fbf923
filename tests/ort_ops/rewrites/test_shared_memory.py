"""What a native update reads may lie in the memory of a parameter: such a parameter is not overwritten."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import TensorProto, helper

from onnx_backprop.ort_ops.elementwise.kernel import NAME
from onnx_backprop.ort_ops.rewrites.in_place import update_in_place

# Views; operators whose kernels in onnxruntime may write over an operand; what it takes away where nothing changes,
# as a sum with 0, a product with 1, a Concat of one tensor.
PASSING = (
    *("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"),
    *("Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sub", "Sum", "Where"),
    *("Cast", "Concat", "Dropout", "Expand", "Pad", "Slice", "Split", "Tile", "Transpose"),
)


def overwritten(*operators: str) -> frozenset[str]:
    """Of the parameters a and b, where the gradient of a is b behind some operators."""
    names = ["b", *(f"t{n}" for n in range(len(operators) - 1)), "da"]
    nodes = [
        helper.make_node(op_type, [source, "other"], [result])
        for op_type, source, result in zip(operators, names, names[1:], strict=False)
    ]
    nodes.append(helper.make_node("Relu", ["a"], ["db"]))
    nodes.append(helper.make_node("ReduceSum", ["a"], ["loss"], keepdims=0))
    nodes.append(
        helper.make_node(
            NAME, ["s", "b", "db", "a", "da"], ["b_new", "a_new"], domain="ai.onnx.contrib",
            program="2 1; Mul s0 t1; Sub t0 v0 -> v1",
        )
    )  # fmt: skip

    def declared(*names: str) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [8] * (name not in ("loss", "s"))) for name in names
        ]

    graph = helper.make_graph(nodes, "g", declared("a", "b", "s"), declared("loss", "a_new", "b_new"))
    return update_in_place(helper.make_model(graph), "loss", {"a": "a_new", "b": "b_new"})


@pytest.mark.parametrize("behind", [(), ("Identity",)], ids=["directly", "over a view"])
@pytest.mark.parametrize("op_type", PASSING)
def test_memory_that_may_be_shared_is_not_overwritten(op_type: str, behind: tuple[str, ...]) -> None:
    assert overwritten(op_type, *behind) == {"a"}
    assert overwritten(*behind, op_type) == {"a"}


@pytest.mark.parametrize("op_type", ["Exp", "Gemm", "MatMul", "ReduceSum", "Relu", "Softmax", "Tanh"])
def test_memory_that_never_is_shared_is(op_type: str) -> None:
    assert overwritten(op_type) == overwritten(op_type, "Identity") == {"a", "b"}
