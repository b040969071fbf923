"""What a budget of memory knows of operators: what onnxruntime melts into products, what they cost, what costs nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from onnx_backprop.converters.recompute.program import Program
from onnx_backprop.converters.recompute.sizes import Sizes

# t, which a product reads and others too; where it takes two nodes, the first is a Transpose in float16
BEFORE = {
    **{op: f"t = {op}(x, c)" for op in ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")},
    **{op: f"t = {op}(x)" for op in ("Abs", "Erf", "Exp", "Flatten", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Sqrt", "Tanh")},
    "Cast": "h = Transpose<perm = [1, 0]>(x)  t = Cast<to = 1>(h)",
    "Reshape": "t = Reshape(x, s)",
    "Slice": "t = Slice(x, zeros, s)",
    "Transpose": "t = Transpose<perm = [1, 0]>(x)",
}  # fmt: skip
MELTED = {"Cast", "Div", "Mul", "Transpose"}


def model_of(op_type: str, product: str) -> onnx.ModelProto:
    x = "float16" if op_type == "Cast" else "float"
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g ({x}[6,6] x, float[6,6] w) => (float[6,6] y, float[6,6] z)
        <float c = {{2.0}}, int64[2] s = {{6, 6}}, int64[2] zeros = {{0, 0}}>
        {{ {BEFORE[op_type]}  y = {product}  z = Cos(t) }}
    """)


def melts(model: onnx.ModelProto) -> bool:
    """What a Program says, whose buffers hold t."""
    graph = ir.from_proto(model).graph
    (product,) = (node for node in graph if node.op_type in ("MatMul", "Gemm"))
    t = next(value for value in product.inputs if value is not None and value.name == "t")
    program: Any = SimpleNamespace(of={t: None})
    return Program.melts(program, t, product)


@pytest.mark.parametrize("op_type", BEFORE)
def test_what_onnxruntime_melts_into_products(op_type: str, tmp_path: Path) -> None:
    """As its own optimiser writes it down."""
    products = ["MatMul(t, w)", "MatMul(w, t)", "Gemm(t, w)", "Gemm(w, t)"]
    melted = False
    for n, product in enumerate(products):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / f"{n}.onnx")
        model = model_of(op_type, product)
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        nodes = onnx.load(tmp_path / f"{n}.onnx").graph.node
        here = not any(node.op_type in ("MatMul", "Gemm") and "t" in node.input for node in nodes)
        assert melts(model) or not here
        melted |= here
    assert melted == (op_type in MELTED)
    assert melts(model_of(op_type, products[0])) == melted


# How often an operator goes over its tensors, or takes as long as so many passes: functions that are no single
# instruction; statistics first, then what they are for; the largest, the sum and the quotient of a softmax.
PASSES = {
    **dict.fromkeys(("Erf", "Exp", "Gelu", "Log", "Pow", "Sigmoid", "Softplus", "Tanh"), 2),
    **{"BatchNormalization": 2, "LayerNormalization": 2, "Resize": 2},
    **{"GroupNormalization": 3, "InstanceNormalization": 3, "LogSoftmax": 3, "Softmax": 3},
    **dict.fromkeys(("Add", "Concat", "Div", "Mul", "Pad", "ReduceSum", "Relu", "Sub", "Transpose", "Where"), 1),
    **dict.fromkeys(("Constant", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"), 0),
}


@pytest.mark.parametrize("op_type", PASSES)
def test_passes_over_memory(op_type: str) -> None:
    """The cost of a node is in bytes moved, of its inputs and outputs."""
    node = ir.from_proto(helper.make_node(op_type, ["x"], ["y"]))
    sizes = Sizes({}, {node.inputs[0]: 400, node.outputs[0]: 100})
    assert sizes.cost(node) == 500 * PASSES[op_type]


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
