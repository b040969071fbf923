"""What an input of an operator of ONNX is: a weight, a number that defines the function, or nothing. By its own names."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
from onnx import defs, parser

import onnx_backprop as ob
from onnx_backprop.converters.parameters import structure

DEFINING = {
    "BatchNormalization": {"input_mean": "running statistic", "input_var": "running statistic"},
    "Clip": {"min": "limit", "max": "limit"},
    "DequantizeLinear": {"x": "quantized number", "x_scale": "quantization scale"},
    "Dropout": {"ratio": "ratio"},
    "MaxRoiPool": {"rois": "region"},
    "MelWeightMatrix": {"lower_edge_hertz": "limit", "upper_edge_hertz": "limit"},
    "Mod": {"B": "divisor"},
    "NonMaxSuppression": {"iou_threshold": "threshold", "score_threshold": "threshold"},
    "OneHot": {"values": "value"},
    "Pad": {"constant_value": "padding value"},
    "Pow": {"Y": "exponent"},
    "QuantizeLinear": {"y_scale": "quantization scale"},
    "Range": {"start": "limit", "limit": "limit", "delta": "step"},
    "Resize": {"roi": "region", "scales": "scale"},
    "RoiAlign": {"rois": "region"},
    "STFT": {"window": "window"},
    "Upsample": {"scales": "scale"},
}
WEIGHTS = {
    "BatchNormalization": "scale B",
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv"), "W B"),
    "Exp": "input",
    "GRU": "W R B initial_h",
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), "data"),
    "Gemm": "A B C",
    **{"GroupNormalization": "scale bias", "InstanceNormalization": "scale B", "LayerNormalization": "Scale B"},
    "LSTM": "W R B initial_h initial_c P",
    "MatMul": "A B",
    **{"PRelu": "slope", "RMSNormalization": "scale", "RNN": "W R B initial_h"},
}
OTHERS = ("Add", "AveragePool", "Concat", "Div", "Relu", "Softmax", "Sub", "Where")
# where an exporter puts numbers in place of nothing, by the names of the inputs
NOTHING = {
    **{"GroupNormalization": {"scale": 1, "bias": 0}, "InstanceNormalization": {"scale": 1, "B": 0}},
    **{"LayerNormalization": {"Scale": 1, "B": 0}, "RMSNormalization": {"scale": 1}},
    **{"GRU": {"initial_h": 0}, "LSTM": {"initial_h": 0, "initial_c": 0}, "RNN": {"initial_h": 0}},
    **{"Conv": {"B": 0}, "ConvTranspose": {"B": 0}, "Gemm": {"C": 0}},
}
BASES = {"Scatter": "data", "ScatterElements": "data", "ScatterND": "data"}


@cache
def formals(op_type: str) -> list[str]:
    return [
        formal.name for formal in defs.get_schema(op_type, 24 if op_type not in ("Scatter", "Upsample") else 10).inputs
    ]


def nodes(op_type: str) -> list[tuple[ir.Node, ir.Value, int, str]]:
    """A node of the operator with each of its inputs in turn, a matrix, and the input's name."""
    values = [ir.Value(name=f"v{n}", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT)) for n in range(9)]
    node = ir.Node("", op_type, values[: len(formals(op_type))])
    return [(node, values[n], n, name) for n, name in enumerate(formals(op_type))]


@pytest.mark.parametrize("op_type", sorted({*DEFINING, *WEIGHTS, *NOTHING, *BASES, *OTHERS}))
def test_every_input(op_type: str) -> None:
    for node, value, index, name in nodes(op_type):
        what = DEFINING.get(op_type, {}).get(name)
        assert structure.defines(value, node, index) == (what and f"{what} of {op_type}"), name
        assert structure.is_weight(value, node, index) == (name in WEIGHTS.get(op_type, "").split()), name
        for number in (0.0, 1.0, 2.0):
            reason = structure.stands_for_nothing(value, np.full((2, 3), number, np.float32), node, index)
            if op_type in BASES and name == BASES[op_type]:
                assert reason == structure.BASE
            elif op_type == "Add":
                assert reason == ("zeros that are added" if number == 0 else None)
            else:
                assert (reason is not None) == (NOTHING.get(op_type, {}).get(name) == number), (name, number)
                assert reason is None or reason.endswith(f" of {op_type}")
        assert structure.stands_for_nothing(value, np.float32([0, 1]), node, index) is None


def test_einsum_has_weights_everywhere() -> None:
    values = [ir.Value(name=f"v{n}", shape=ir.Shape([2, 3])) for n in range(16)]
    node = ir.Node("", "Einsum", values)
    assert all(structure.is_weight(value, node, n) for n, value in enumerate(values))


FIRST = (
    *("Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "ScatterND", "Slice", "Squeeze", "Tile"),
    *("Transpose", "Trilu", "Unsqueeze"),
)


@pytest.mark.parametrize("op_type", [*FIRST, "Concat", "Sum", "Relu", "Mul", "Gather"])
def test_what_hands_numbers_on(op_type: str) -> None:
    """The readers of a value are those behind it: of its first input, of any, or it is the reader itself."""
    x, other, w = (ir.Value(name=name) for name in ("x", "other", "w"))
    node = ir.Node("", op_type, [x, other])
    reader = ir.Node("", "MatMul", [w, node.outputs[0]])
    joins, passes = op_type in ("Concat", "Sum"), op_type in FIRST
    assert list(structure.uses_of(x)) == [(reader, 1) if passes or joins else (node, 0)]
    assert list(structure.uses_of(other)) == [(reader, 1) if joins else (node, 1)]
    assert structure.source_of(node.outputs[0]) is (x if passes else node.outputs[0])


def test_scales_that_are_hidden_from_inference_are_scales() -> None:
    """Those that a caller may override, which are something's weight, too: Resize reads them behind a Where."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[1, 3] x, float[2] scales) => (float[1, 3] y, float[a, b] z)
        <float[2] scales = {1, 2}, float[3] w = {0.5, -2, 0.25}>
        { e = Exp (scales) m = ReduceMean <keepdims = 0> (e) s = Mul (x, m) y = Mul (s, w) z = Resize (y, , scales) }"""
    )
    with pytest.warns(ob.OnnxBackpropWarning, match="scale of Resize"):
        graph = ob.training_graph(model, loss="mse", prediction="y")
    assert list(graph.parameters) == ["w"]
    assert graph.left_out["scales"] == "scale of Resize"


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul", "Relu", "Mul"])
def test_what_is_added_to_a_product_is_a_weight(op_type: str) -> None:
    shapes = {"x": (2, 3), "w": (3, 3), "b": (3,)}
    x, w, b = (ir.Value(name=name, shape=ir.Shape(shape)) for name, shape in shapes.items())
    product = ir.Node("", op_type, [x, w])
    add = ir.Node("", "Add", [product.outputs[0], b])
    assert structure.is_weight(b, add, 1) == (op_type not in ("Relu", "Mul"))


@pytest.mark.parametrize("op_type", ["ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "MatMul"])
def test_what_scales_a_product_of_integers(op_type: str) -> None:
    x, s = ir.Value(name="x"), ir.Value(name="s", shape=ir.Shape([3]))
    node = ir.Node("", op_type, [x])
    reason = structure.defines(s, ir.Node("", "Mul", [node.outputs[0], s]), 1)
    assert reason == (None if op_type == "MatMul" else f"quantization scale of {op_type}")
