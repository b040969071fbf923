"""Adapters beside each kind of layer: the shapes of A and B, their product, and the nodes that add it."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backprop.converters.finetune.linear import PACKED_PRODUCTS, PACKED_TABLE, Layers, Linear
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.opset.graphs.walk import attributes_of, called

Array = np.ndarray
Factor = TypeVar("Factor", str, Array, list[int])


class Form:
    """An adapter beside what a layer computes: y + scale · (x·A)·B; A random, B zero at first."""

    def __init__(self, layer: Linear) -> None:
        self.layer, self.node, self.dims = layer, layer.node, layer.dims
        self.attributes = attributes_of(layer.node)

    @property
    def inputs(self) -> int:
        """How many numbers each output is a sum over, at most."""
        return math.prod(self.dims) // self.dims[self.layer.output_axis]

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        """Those of A and B."""
        raise NotImplementedError

    def start(self, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """The first values of A and B."""
        down, up = self.shapes(rank)
        bound = 1 / math.sqrt(self.inputs)
        return rng.uniform(-bound, bound, down), np.zeros(up)

    def product(self, a: Array, b: Array) -> Array:
        """A · B, with the axes of the weight as its node reads it."""
        raise NotImplementedError

    def change(self, op: Adapter, a: str, b: str, scale: float) -> str:
        """Emit the nodes that compute scale · (x·A)·B."""
        raise NotImplementedError

    def nodes(self, layers: Layers, a: str, b: str, scale: float) -> tuple[list[NodeProto], list[NodeProto]]:
        """What comes before the layer's node and behind it; the sum has the name that the output had."""
        op, (y, *_) = Adapter(layers, self.layer), self.node.output
        self.node.output[0] = unique(f"{y}.frozen", layers.taken)
        change = self.change(op, a, b, scale)
        label = unique(f"{called(self.node)}/lora", layers.taken)
        return [], [*op.nodes, helper.make_node("Add", [self.node.output[0], change], [y], label)]


class Matrix(Form):
    """x·W of Gemm, MatMul and MatMulNBits: A (K, r), B (r, N); W·x of MatMul: A (r, K), B (M, r)."""

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        outputs = self.dims[self.layer.output_axis]
        if self.layer.place == 0:
            return [rank, self.inputs], [outputs, rank]
        return [self.inputs, rank], [rank, outputs]

    def product(self, a: Array, b: Array) -> Array:
        if self.layer.place == 0:
            return b @ a
        return (a @ b).T if self.layer.output_axis == 0 else a @ b

    def change(self, op: Adapter, a: str, b: str, scale: float) -> str:
        x = self.node.input[1 - self.layer.place]
        if self.attributes.get("transA"):
            x = op.Transpose(x, perm=[1, 0])
        order = -1 if self.layer.place == 0 else 1
        inner = op.MatMul(*(x, a)[::order])
        if self.node.op_type == "Gemm":
            scale *= self.attributes.get("alpha", 1.0)
        return op.MatMul(*(op.scaled(inner, scale), b)[::order])


class Kernel(Form):
    """Conv and ConvTranspose: A is a kernel like W that makes r channels a group, B (O, r, 1…) a Conv behind it."""

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer)
        self.groups = int(self.attributes.get("group", 1))
        self.transposed = layer.node.op_type == "ConvTranspose"

    @property
    def inputs(self) -> int:
        return super().inputs // (self.groups if self.transposed else 1)

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        first, second, *axes = self.dims
        down = [first, rank, *axes] if self.transposed else [self.groups * rank, second, *axes]
        return down, [second * self.groups if self.transposed else first, rank, *[1] * len(axes)]

    def product(self, a: Array, b: Array) -> Array:
        first, rank = self.dims[0] // self.groups, b.shape[1]
        b = b.reshape(self.groups, -1, rank)
        if self.transposed:
            a = a.reshape(self.groups, first, rank, -1)
            return np.einsum("girk,gor->giok", a, b).reshape(self.dims)
        return (b @ a.reshape(self.groups, rank, -1)).reshape(self.dims)

    def change(self, op: Adapter, a: str, b: str, scale: float) -> str:
        inner = op.emit(self.node.op_type, (self.node.input[0], a), {})[0]
        op.nodes[-1].attribute.extend(self.node.attribute)
        return op.Conv(op.scaled(inner, scale), b, group=self.groups)


class Table(Form):
    """W[ids] of Gather and GatherBlockQuantized: A (V, r), B (r, D); at first A zero, B standard normal, as in PEFT."""

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        return [self.dims[0], rank], [rank, self.dims[1]]

    def start(self, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        down, up = self.shapes(rank)
        return np.zeros(down), rng.standard_normal(up)

    def product(self, a: Array, b: Array) -> Array:
        return a @ b

    def change(self, op: Adapter, a: str, b: str, scale: float) -> str:
        rows = op.Gather(a, self.node.input[1])
        return op.MatMul(op.scaled(rows, scale), b)


class InFront(Form):
    """An adapter in front of a node, which reads W + scale · ΔW.

    A is on the side of the inputs, B on that of the outputs: W (…, K, N), A (…, K, r), B (…, r, N), or W (…, N, K),
    A (…, r, K), B (…, N, r).
    """

    @property
    def inputs(self) -> int:
        return super().inputs // math.prod(self.dims[:-2])

    def _ordered(self, a: Factor, b: Factor) -> tuple[Factor, Factor]:
        """A and B, or B and A, as they are multiplied."""
        return (a, b) if self.layer.output_axis == len(self.dims) - 1 else (b, a)

    def shapes(self, rank: int) -> tuple[list[int], list[int]]:
        *stack, rows, columns = self.dims
        return self._ordered([*stack, rows, rank], [*stack, rank, columns])

    def product(self, a: Array, b: Array) -> Array:
        first, second = self._ordered(a, b)
        return first @ second

    def nodes(self, layers: Layers, a: str, b: str, scale: float) -> tuple[list[NodeProto], list[NodeProto]]:
        op, place = Adapter(layers, self.layer), self.layer.place
        delta = op.scaled(op.MatMul(*self._ordered(a, b)), scale)
        self.node.input[place] = op.Add(self.node.input[place], delta)
        return op.nodes, []


class Adapter(Emitter):
    """The nodes of one adapter; they have the names of what they compute."""

    def __init__(self, layers: Layers, layer: Linear) -> None:
        super().__init__(f"{called(layer.node)}/lora", layers.taken)
        self.layers, self.dtype = layers, layer.weight.dtype

    def scaled(self, value: str, scale: float) -> str:
        """The value times a number; there is one initializer for each number and type."""
        if scale == 1:
            return value
        name = f"lora_scale/{TensorProto.DataType.Name(self.dtype)}/{scale!r}"
        if name not in self.layers.tensors:
            self.layers.taken.add(name)
            self.layers.add(helper.make_tensor(name, self.dtype, [], [scale]))
        return self.Mul(value, name)


def form_of(layer: Linear) -> Form:
    """How an adapter goes beside a layer."""
    op_type = layer.node.op_type
    if op_type in ("Conv", "ConvTranspose"):
        return Kernel(layer)
    if op_type in ("Gather", PACKED_TABLE):
        return Table(layer)
    matrix = op_type in ("Gemm", *PACKED_PRODUCTS) or (op_type == "MatMul" and len(layer.dims) == 2)
    return Matrix(layer) if matrix else InFront(layer)
