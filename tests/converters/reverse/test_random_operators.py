"""No operator that draws numbers runs a second time for a gradient, or to save memory: each of ONNX."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx import ModelProto, defs, numpy_helper, parser

import onnx_backprop as ob

DRAWING = {
    "Bernoulli": "r = Bernoulli<dtype = 1>(p)",
    "Dropout": "training = Constant<value = bool {1}>()  ratio = Constant<value_float = 0.5>()  r = Dropout(p, ratio, training)",
    "Multinomial": "logits = Unsqueeze(p, zero)  i = Multinomial<sample_size = 64>(logits)  v = Squeeze(i, zero)"
    "  r = Cast<to = 1>(v)",
    "RandomNormal": "r = RandomNormal<shape = [64]>()",
    "RandomNormalLike": "r = RandomNormalLike(p)",
    "RandomUniform": "r = RandomUniform<shape = [64]>()",
    "RandomUniformLike": "r = RandomUniformLike(p)",
}


def test_every_operator_that_takes_a_seed_is_here() -> None:
    schemas = defs.get_all_schemas_with_history()
    assert {s.name for s in schemas if s.domain == "" and "seed" in s.attributes} == set(DRAWING)


def of_vectors(nodes: str) -> ModelProto:
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (bool k, float[64] x) => (float[64] y)
        <float[64] w, int64[1] zero = {{0}}> {{ p = Sigmoid(x)  {nodes} }}
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.linspace(-1, 1, 64, dtype=np.float32), "w"))
    return model


@pytest.mark.parametrize("op_type", DRAWING)
def test_in_a_branch(op_type: str) -> None:
    """The gradient computes a branch again; what it drew is gone."""
    model = of_vectors(f"""
        y = If(k) <then_branch = t () => (float[64] a) {{ {DRAWING[op_type]}  a = Mul(x, r) }},
                   else_branch = e () => (float[64] b) {{ b = Neg(x) }}>
    """)
    with pytest.raises(ob.UnsupportedError, match=rf"computes {op_type} '.*' a second time, which would draw other"):
        ob.backward(model, wrt=["x"])


@pytest.mark.parametrize("op_type", DRAWING)
def test_with_a_budget(op_type: str) -> None:
    """What was drawn is kept, though the gradient alone reads it. To draw it again would save a third."""
    drawn = DRAWING[op_type]
    layers = ""
    for n in range(3):
        names = {name: f"{name}{n}" for name in ("r", "v", "i", "logits", "training", "ratio")}
        layers += "  ".join(
            "".join(names.get(word, word) for word in re.split(r"(\W+)", line)) for line in drawn.split("  ")
        )
        layers += f"  a{n} = Mul(b{n}, r{n})  b{n + 1} = Sin(a{n})  "
    model = of_vectors(f"b0 = Mul(x, w)  {layers}  y = Mul(b3, w)")
    with pytest.raises(ob.InvalidArgumentError, match=r"cannot be kept. The least found is .* \((8|9)\d%"):
        ob.training_graph(model, loss="mse", memory="75%", lengths={})
