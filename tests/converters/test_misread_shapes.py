"""Lengths that onnx's inference gets wrong are not stated of a seed."""

from __future__ import annotations

import onnx
import pytest

import onnx_backprop as ob


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        ("(float[2,Q,W] q, float[2,K,W] k, float[2,K,V] v) => (float[2,Q,Z] y) "
         "{ y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, k, v) }", [2, "Q", ""]),
        ("(float[1,128,1] q) => (float[1,15,9,2] y) <int64 s = {8}, int64 l = {16}> "
         '{ y = STFT(q, s, "", l) }', [1, 15, "", 2]),
    ],
)  # fmt: skip
def test_seeds_state_no_wrong_length(text: str, seed: list[int | str]) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> g {text}')
    derived = ob.vjp(model, ["q"], ["y"])
    (given,) = (value for value in derived.graph.input if value.name == "y_grad")
    assert [d.dim_value or d.dim_param for d in given.type.tensor_type.shape.dim] == seed
