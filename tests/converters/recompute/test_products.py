"""The multiplications of a node that is made of sums of products, which a budget of memory counts with."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnx_backprop.converters.recompute.sizes import Sizes


def declared(name: str, shape: list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


# operator: (shapes of its inputs, of its output, multiplications)
PRODUCTS = {
    "MatMul": ([[5, 7, 3], [3, 11]], [5, 7, 11], 5 * 7 * 11 * 3),
    "MatMulInteger": ([[7, 3], [3, 11]], [7, 11], 7 * 11 * 3),
    "Gemm": ([[7, 3], [3, 11]], [7, 11], 7 * 11 * 3),
    "Gemm with transA": ([[3, 7], [3, 11]], [7, 11], 7 * 11 * 3),
    "Conv": ([[2, 6, 9], [4, 3, 5]], [2, 4, 8], 2 * 4 * 8 * 3 * 5),
    "Convolution": ([[2, 6, 9], [4, 3, 5]], [2, 4, 8], 2 * 4 * 8 * 3 * 5),
    "ConvTranspose": ([[2, 6, 9], [6, 4, 5]], [2, 4, 13], 2 * 6 * 9 * 4 * 5),
    "ConvolutionBackwardData": ([[2, 4, 8], [4, 3, 5]], [2, 6, 9], 2 * 4 * 8 * 3 * 5),
    "ConvTransposeBackwardData": ([[2, 4, 13], [6, 4, 5]], [2, 6, 9], 2 * 6 * 9 * 4 * 5),
    "ConvolutionBackwardWeights": ([[2, 6, 9], [2, 4, 8]], [4, 3, 5], 2 * 4 * 8 * 3 * 5),
    "ConvTransposeBackwardWeights": ([[2, 6, 9], [2, 4, 13]], [6, 4, 5], 2 * 6 * 9 * 4 * 5),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    inputs, output, expected = PRODUCTS[name]
    op_type, _, transposed = name.partition(" ")
    node = helper.make_node(op_type, ["a", "b"], ["y"], **({"transA": 1} if transposed else {}))
    values = {n: ir.from_proto(declared(n, shape)) for n, shape in zip("aby", [*inputs, output], strict=True)}
    product = ir.Node(
        "",
        op_type,
        [values["a"], values["b"]],
        outputs=[values["y"]],
        attributes=ir.from_proto(node).attributes.values(),
    )
    sizes = Sizes({values[n]: tuple(shape) for n, shape in zip("aby", [*inputs, output], strict=True)}, {})
    assert sizes.products(product) == expected
    assert sizes.cost(product) == 2 * expected / 16
