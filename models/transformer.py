"""A small transformer encoder over sequences of vectors.

Source: Vaswani et al., "Attention Is All You Need", 2017, with the normalisation in front of each block.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto, TensorProto, helper, numpy_helper

from models.graphs import IR_VERSION, OPSET, main

PATCH = 2  # pixels of a patch's side


def build(
    *,
    inputs: int = 6,
    classes: int = 5,
    width: int = 16,
    heads: int = 2,
    layers: int = 2,
    image: int = 0,
    seed: int = 0,
) -> ModelProto:
    """Encoder: tokens (N, T, inputs) -> logits (N, classes), from the mean over the T positions.

    With an `image` side, a vision transformer: image (N, 1, image, image), whose patches of 2×2 pixels are the tokens,
    with a table of positions that is trained.

    Each layer: x + Attention(norm(x)), then x + W₂ gelu(W₁ norm(x)), W₁ four times as wide. The projections of
    queries, keys and values carry no bias.
    """
    if width % heads:
        raise ValueError(f"width: expected a multiple of heads ({heads}), got {width}")
    net = _Encoder(np.random.default_rng(seed), width, heads)
    if image:
        x = net.linear(net.patches("image", image), "embed", PATCH**2, width)
        positions = np.random.default_rng(seed + 1).standard_normal(((image // PATCH) ** 2, width)) / 10
        x = net.op("Add", x, net.weight("positions", positions))
    else:
        x = net.linear("tokens", "embed", inputs, width)
    for layer in range(layers):
        x = net.op("Add", x, net.attention(net.norm(x, f"layer{layer}.norm1"), f"layer{layer}.attention"))
        hidden = net.linear(net.norm(x, f"layer{layer}.norm2"), f"layer{layer}.rise", width, 4 * width)
        x = net.op("Add", x, net.linear(net.gelu(hidden), f"layer{layer}.fall", 4 * width, width))
    mean = net.op("ReduceMean", net.norm(x, "norm"), net.constant(np.array([1])), keepdims=0)
    net.nodes.append(helper.make_node("Identity", [net.linear(mean, "head", width, classes)], ["logits"]))
    graph = helper.make_graph(
        net.nodes,
        "transformer",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, image, image])
            if image
            else helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["N", "T", inputs])
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes])],
        net.weights,
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="onnx-backprop models",
    )


class _Encoder:
    """Nodes and weights under construction; every method returns the name of a tensor."""

    def __init__(self, rng: np.random.Generator, width: int, heads: int) -> None:
        self.nodes: list = []
        self.weights: list[TensorProto] = []
        self._rng, self._width, self._heads = rng, width, heads

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))  # type: ignore[arg-type]
        return name

    def constant(self, array: ArrayLike) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def weight(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def linear(self, x: str, name: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
        values = self._rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        y = self.op("MatMul", x, self.weight(f"{name}.weight", values))
        return self.op("Add", y, self.weight(f"{name}.bias", np.zeros(outputs))) if bias else y

    def patches(self, x: str, side: int) -> str:
        """(N, 1, side, side) -> (N, T, 4), row by row."""
        across = side // PATCH
        split = self.op("Reshape", x, self.constant(np.array([0, across, PATCH, across, PATCH])))
        together = self.op("Transpose", split, perm=[0, 1, 3, 2, 4])
        return self.op("Reshape", together, self.constant(np.array([0, across**2, PATCH**2])))

    def norm(self, x: str, name: str) -> str:
        scale = self.weight(f"{name}.scale", np.ones(self._width))
        return self.op("LayerNormalization", x, scale, self.weight(f"{name}.bias", np.zeros(self._width)), axis=-1)

    def gelu(self, x: str) -> str:
        """x/2 · (1 + erf(x/√2))."""
        half, root, one = (self.constant(np.float32(v)) for v in (0.5, np.sqrt(0.5), 1.0))
        return self.op("Mul", self.op("Mul", half, x), self.op("Add", one, self.op("Erf", self.op("Mul", root, x))))

    def attention(self, x: str, name: str) -> str:
        """softmax(q kᵀ / √d) v in every head, then a projection."""
        size = self._width // self._heads
        split = self.constant(np.array([0, 0, self._heads, size]))
        q, k, v = (
            self.op("Reshape", self.linear(x, f"{name}.{part}", self._width, self._width, bias=False), split)
            for part in ("query", "key", "value")
        )
        scores = self.op(
            "MatMul", self.op("Transpose", q, perm=[0, 2, 1, 3]), self.op("Transpose", k, perm=[0, 2, 3, 1])
        )
        share = self.op("Softmax", self.op("Mul", scores, self.constant(np.float32(1 / np.sqrt(size)))), axis=-1)
        seen = self.op("MatMul", share, self.op("Transpose", v, perm=[0, 2, 1, 3]))
        merged = self.op(
            "Reshape", self.op("Transpose", seen, perm=[0, 2, 1, 3]), self.constant(np.array([0, 0, self._width]))
        )
        return self.linear(merged, f"{name}.out", self._width, self._width)


if __name__ == "__main__":
    sys.exit(main(build))
