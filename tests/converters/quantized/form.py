"""One quantised model by hand and what it stands for, and how such models are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper, parser

Arrays = Mapping[str, np.ndarray]
RNG = np.random.default_rng(37)
F32 = np.float32


@dataclass(frozen=True)
class Form:
    """A model and what it stands for.

    weights: float tensors of the float model, in float64. y: from x and all its float tensors. bound: of what the
    rounding of values that a run computes adds to y, 0 where none are rounded. more: kept float tensors.
    """

    nodes: str
    tensors: Arrays
    weights: Arrays
    y: Callable[[np.ndarray, Arrays], np.ndarray]
    x: np.ndarray
    bound: float
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    opset: int = 21

    def model(self) -> ModelProto:
        """The model, its input and its output having symbols for lengths."""
        kind = {"float32": "float", "int64": "int64"}[self.x.dtype.name]
        lengths = ", ".join(["N", *map(str, self.x.shape[1:])])
        free = ", ".join(f"Y{n}" for n in range(self.y(self.x, self.floats()).ndim))
        proto = parser.parse_model(
            f'<ir_version: 10, opset_import: ["": {self.opset}, "com.microsoft": 1]> '
            f"m ({kind}[{lengths}] x) => (float[{free}] y) {{ {self.nodes} }}"
        )
        for node in proto.graph.node:
            node.attribute.extend(helper.make_attribute(k, v) for k, v in self.attributes.get(node.op_type, {}).items())
        proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in self.tensors.items())
        return proto

    def floats(self) -> dict[str, np.ndarray]:
        """The weights, and the float tensors that the model has already."""
        return {n: np.asarray(a, np.float64) for n, a in self.tensors.items() if np.asarray(a).dtype == F32} | dict(
            self.weights
        )


def f32(*shape: int, size: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (RNG.standard_normal(shape) * size).astype(F32)


def ints(kind: str, *shape: int, axis: int = 0, every: int = 0, least: int | None = None) -> np.ndarray:
    """Integers of a type, from one end of its range to the other along an axis, as quantisers leave them.

    every: in each block of so many. least: the lower end, where it is another one.
    """
    low, high = {"int8": (-127, 127), "uint8": (0, 255), "int4": (-7, 7), "uint4": (0, 15)}[kind]
    low = low if least is None else least
    drawn = np.moveaxis(RNG.integers(low, high + 1, shape), axis, 0)
    for start in range(0, len(drawn), every or len(drawn)):
        block = drawn[start : start + (every or len(drawn))]
        block[0], block[-1] = high, low
    return np.moveaxis(drawn, 0, axis).astype(getattr(ml_dtypes, kind) if kind.endswith("t4") else kind)


def real(q: np.ndarray, s: np.ndarray | float, z: np.ndarray | float = 0) -> np.ndarray:
    """(q - z) · s in float64."""
    return (q.astype(np.float64) - z) * np.asarray(s, F32).astype(np.float64)


def linear(x: np.ndarray, t: Arrays) -> np.ndarray:
    """x · w + b, where there is a b."""
    return x.astype(np.float64) @ t["w"] + t.get("b", 0)


def scale(value: float) -> np.ndarray:
    """One scale."""
    return np.array(value, F32)


def other_names(model: ModelProto, kind: str) -> ModelProto:
    """A model whose nodes have no names, or odd ones, values inside too, or whose tensors are nodes without names."""
    result = ModelProto()
    result.CopyFrom(model)
    if kind == "constants":
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
        for node in nodes:
            node.attribute[0].t.name = ""
        nodes += model.graph.node
        del result.graph.initializer[:], result.graph.node[:]
        result.graph.node.extend(nodes)
        return result
    new: dict[str, str] = {}
    if kind != "no names":
        kept = {"", *(value.name for value in model.graph.output)}
        values = [name for node in model.graph.node for name in node.output if name not in kept]
        odd = {"slashes": "/a b/{}.0", "numbers": "{}", "ours": "{}"}[kind]
        ours = ["loss", "x_grad", "optimizer/Constant", "learning_rate", "target", "gradient_norms"]
        for n, name in enumerate(values):
            new[name] = ours[n % len(ours)] + ("" if n < len(ours) else str(n)) if kind == "ours" else odd.format(n + 3)
    for n, node in enumerate(result.graph.node):
        node.name = "" if kind == "no names" else f"/{n} again" if kind == "slashes" else str(n)
        _rename(node, new)
    return result


def _rename(node: NodeProto, new: Mapping[str, str]) -> None:
    node.input[:] = [new.get(name, name) for name in node.input]
    node.output[:] = [new.get(name, name) for name in node.output]
