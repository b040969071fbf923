"""An ONNX file in PyTorch, node by node and in float64: an opinion on its gradients that shares no code with ours.

The operators are in `twin_operators`, written after ONNX's text. What none of them covers raises `UnknownOperatorError`. Needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from tests.field import twin_operators

torch: Any = import_module("torch")


class UnknownOperatorError(Exception):
    """The twin has no such operator."""


class _Graph:
    """A graph taken apart once; subgraphs are among the attributes of the nodes."""

    def __init__(self, graph: GraphProto) -> None:
        nodes = _sorted(list(graph.node))
        self.nodes = [(node, {a.name: _attribute(a) for a in node.attribute}) for node in nodes]
        self.stored = list(graph.initializer)
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.values: dict[str, Any] = {}


def _sorted(nodes: list[NodeProto]) -> list[NodeProto]:
    """In an order that can be run: some converters put casts of the inputs last, and onnxruntime does not mind."""
    missing = {name for node in nodes for name in node.output if name}
    result: list[NodeProto] = []
    while nodes:
        later: list[NodeProto] = []
        for node in nodes:
            if _reads(node) & missing:
                later.append(node)
            else:
                result.append(node)
                missing.difference_update(node.output)
        if len(later) == len(nodes):
            raise NotImplementedError("a cycle")
        nodes = later
    return result


def _sources(graph: GraphProto) -> dict[str, str]:
    """Of each value that torch's exporter computed from one other, the other."""
    sources: dict[str, str] = {}
    for value in graph.value_info:
        folded = next((p.value for p in value.metadata_props if p.key == "pkg.onnxscript.optimizer.folded_from"), "")
        names = re.findall(r"'([^']+)'", folded)
        if len(names) == 1:
            sources[value.name] = names[0]
    return sources


def _reads(node: NodeProto) -> set[str]:
    inner = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
    return set(node.input).union(*(_reads(n) for n in inner))


def _attribute(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return _Graph(value) if isinstance(value, GraphProto) else value


class Twin:
    """A file as a function in PyTorch.

    leaves: values that stand for the tensors of these names wherever the file stores one, in initializers and
    Constant nodes, also those of subgraphs. found: the leaves that a run has met. at: what onnxruntime has computed,
    tensor by tensor. It replaces what the twin computes, so that derivatives are taken at the same point and on the same
    side of every kink, where rounding would else put some cells of some Relu beyond it. gap: how far a node's result was
    from it at most, relative to its largest number, and that result's name. tied: copies of leaves are leaves, too.
    """

    def __init__(self, model: ModelProto, leaves: Mapping[str, Any], dtype: Any = None, *, tied: bool = False) -> None:
        self.at: Mapping[str, np.ndarray] = {}
        self.gap = 0.0, ""
        self.model = inliner.inline_local_functions(model) if model.functions else model
        self.opset = {entry.domain: entry.version for entry in self.model.opset_import}
        self.leaves, self.tied = leaves, tied
        self.dtype = dtype or torch.float64
        self.found: set[str] = set()
        self._sources = _sources(self.model.graph)
        self._origins: dict[tuple[str, int], tuple[str, bool]] = {}
        self._graph = _Graph(self.model.graph)

    def __call__(self, feeds: Mapping[str, Any], output: str) -> Any:
        """One output of the file. A feed in float is taken as it is, so that it can be differentiated by."""
        return self._run(self._graph, {"": None} | dict(feeds))[output]

    def _tensor(self, name: str, stored: Any) -> Any:
        if name in self.leaves:
            self.found.add(name)
            return self.leaves[name]
        array = self.tensor(stored)
        key = name, array.numel()
        if key not in self._origins:  # before a step changes the leaves
            self._origins[key] = self._origin(name, array)
        origin, is_transposed = self._origins[key]
        if not origin:
            return array
        leaf = self.leaves[origin]
        return (leaf.T if is_transposed else leaf).reshape(array.shape)

    def _origin(self, name: str, array: Any) -> tuple[str, bool]:
        """The leaf that a stored tensor is a copy of, or of whose transpose; no name if there is none.

        A tied tensor is two in many files: exporters and simplifiers transpose the one that a product reads. If `tied`,
        equal numbers show it, unless they are all one number, as zeros are.
        """
        sources = [self._sources[name]] if self._sources.get(name) in self.leaves else []
        if self.tied and not sources and array.is_floating_point() and array.ndim == 2 and array.unique().numel() > 1:
            sources = [n for n, leaf in self.leaves.items() if leaf.shape in (array.shape, array.T.shape)]
        for n in sources:
            leaf = self.leaves[n].detach()
            for is_transposed in (leaf.ndim == 2, False):
                copy = leaf.T if is_transposed else leaf
                if copy.numel() == array.numel() and bool((copy.reshape(-1) == array.reshape(-1)).all()):
                    return n, is_transposed
        return "", False

    def tensor(self, stored: Any) -> Any:
        """A stored tensor or array, floats in the type of the twin."""
        array = numpy_helper.to_array(stored) if isinstance(stored, TensorProto) else np.asarray(stored)
        if array.dtype.kind in "USO":
            return array
        if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float8_e4m3fn"):
            array = array.astype(np.float32)
        value = torch.from_numpy(np.array(array))
        return value.to(self.dtype) if value.is_floating_point() else value

    def _run(self, graph: _Graph, outer: dict[str, Any]) -> dict[str, Any]:
        if not graph.values:
            graph.values = {t.name: self._tensor(t.name, t) for t in graph.stored}
        values = outer | graph.values | {name: value for name, value in outer.items() if name in graph.inputs}
        for node, attributes in graph.nodes:
            results = self._node(node, attributes, values)
            for name, value in zip(node.output, results, strict=False):
                if name:
                    values[name] = self._replaced(name, value) if name in self.at else value
        return values

    def _replaced(self, name: str, value: Any) -> Any:
        """What onnxruntime has computed, with the derivative of what the twin has."""
        there = torch.from_numpy(np.asarray(self.at[name], np.float64)).to(self.dtype)
        if value.shape != there.shape or not value.is_floating_point():
            return value
        change = (there - value.detach()).nan_to_num(0, 0, 0)  # a mask's -inf
        if change.numel():
            self.gap = max(self.gap, (float(change.abs().max() / (value.detach().abs().max() + 1e-2)), name))
        return value + change

    def _node(self, node: NodeProto, attributes: dict[str, Any], values: dict[str, Any]) -> tuple[Any, ...]:
        if node.op_type == "Constant" and not node.domain:
            ((name, value),) = attributes.items()
            return (self._tensor(node.output[0], np.array(value) if name != "value" else value),)
        if node.op_type == "If" and not node.domain:
            branch = attributes["then_branch" if bool(values[node.input[0]]) else "else_branch"]
            results = self._run(branch, values)
            return tuple(results[value] for value in branch.outputs)
        if node.op_type == "Loop" and not node.domain:
            return self._loop(node, attributes["body"], values)
        if node.op_type == "Scan" and not node.domain:
            return self._scan(node, attributes, values)
        operator = twin_operators.OPERATORS.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
        if operator is None:
            raise UnknownOperatorError(f"{node.domain or 'ai.onnx'}.{node.op_type} '{node.name}'")
        call = twin_operators.Call(node, attributes, self.opset.get(node.domain, 1), self.dtype, len(node.output))
        result = operator(call, *(values[name] for name in node.input))
        return result if isinstance(result, tuple) else (result,)

    def _loop(self, node: NodeProto, body: _Graph, values: dict[str, Any]) -> tuple[Any, ...]:
        count, condition, *carried = (values[name] for name in node.input)
        count = 2**62 if count is None else int(count)
        going = True if condition is None else bool(condition)
        scans: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
        n = 0
        while going and n < count:
            given = [torch.tensor(n), torch.tensor(going), *carried]
            computed = self._run(body, values | dict(zip(body.inputs, given, strict=True)))
            going = bool(computed[body.outputs[0]])
            results = [computed[value] for value in body.outputs[1:]]
            carried, last = results[: len(carried)], results[len(carried) :]
            for scan, value in zip(scans, last, strict=True):
                scan.append(value)
            n += 1
        return (*carried, *(torch.stack(scan) for scan in scans))

    def _scan(self, node: NodeProto, attributes: dict[str, Any], values: dict[str, Any]) -> tuple[Any, ...]:
        """Of opset 9 and later, where no axis is that of a batch."""
        body, count = attributes["body"], attributes["num_scan_inputs"]
        given = [values[name] for name in node.input]
        carried, scanned = given[:-count], given[-count:]
        axes = attributes.get("scan_input_axes") or [0] * count
        back = attributes.get("scan_input_directions") or [0] * count
        scans: list[list[Any]] = [[] for _ in body.outputs[len(carried) :]]
        steps = scanned[0].shape[axes[0]]
        for n in range(steps):
            slices = [x.select(axis, steps - 1 - n if b else n) for x, axis, b in zip(scanned, axes, back, strict=True)]
            inner = self._run(body, values | dict(zip(body.inputs, [*carried, *slices], strict=True)))
            results = [inner[value] for value in body.outputs]
            carried, last = results[: len(carried)], results[len(carried) :]
            for scan, value in zip(scans, last, strict=True):
                scan.append(value)
        axes = attributes.get("scan_output_axes") or [0] * len(scans)
        back = attributes.get("scan_output_directions") or [0] * len(scans)
        stacked = [
            torch.stack(scan[::-1] if b else scan, axis if axis >= 0 else axis + scan[0].ndim + 1)
            for scan, axis, b in zip(scans, axes, back, strict=True)
        ]
        return (*carried, *stacked)
