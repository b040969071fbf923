"""What constants and known lengths decide is computed once; what is drawn at random is not decided by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, parser

from onnx_backprop.converters.prepare.lengths.fold import folded, folded_lengths
from onnx_backprop.converters.prepare.load import infer

DRAWN = {
    "Bernoulli": "p = Constant<value_floats = [0.5, 0.5]>() d = Bernoulli<dtype = 9>(p)",
    "Multinomial": "p = Constant<value = float[1, 2] {0.0, 0.0}>() d = Multinomial<sample_size = 2>(p)",
    "RandomUniformLike": "p = Constant<value_float = 1.0>() d = RandomUniformLike<dtype = 1>(p)",
}


@pytest.mark.parametrize("fold", [folded, folded_lengths])
@pytest.mark.parametrize("op_type", DRAWN)
def test_what_is_drawn_anew_in_each_run_is_no_constant(op_type: str, fold: Callable[[ModelProto], ModelProto]) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float y) {{
        n = Constant<value_ints = [1, 2]>() m = Add(n, n) {DRAWN[op_type]} c = Cast<to = 1>(d)
        m2 = Sub(m, n) s = Reshape(x, m2) t = Mul(s, c) y = ReduceSum<keepdims = 0>(t) }}"""
    model = parser.parse_model(text)
    operators = [node.op_type for node in fold(infer(model)).graph.node]
    assert op_type in operators
    assert "Sub" not in operators
