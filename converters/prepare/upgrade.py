"""Bring a model to the opset that gradients are written in, once and without changing what it computes.

onnx's own version converter does the work, except for Upsample and Resize before opset 11. Those define no
coordinate rule; what runtimes do is x = o / scale, nearest taking floor(x) when scale >= 1 and ceil(x) below.
onnx's adapter turns them into a Resize with the newer defaults, which is another function, so they are set aside
under a name of ours and written back as a Resize that says what they do.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper, version_converter

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, all_nodes, assign, scoped_graphs, without_imports
from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedError
from onnx_backprop.opset.functions.scope import Scope
from onnx_backprop.opset.functions.use_kernels import MIN_BODY_OPSET

MIN_OPSET = MIN_BODY_OPSET
_ASIDE = "onnx_backprop.aside"


def default_opset(proto: ModelProto) -> int:
    """The version of the default domain that a model imports."""
    version = next((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), None)
    if version is None:
        raise InvalidModelError("the model imports no opset of the default domain")
    return version


def upgrade(proto: ModelProto) -> ModelProto:
    """The model at opset 18 or later; a model already there is returned as it is.

    Errors: UnsupportedError when onnx has no converter for an operator.
    """
    version = default_opset(proto)
    if version >= MIN_OPSET:
        return proto
    for domain in [o for o in proto.opset_import if o.domain == "ai.onnx"]:
        domain.domain = ""
    legacy = version < 11 and _set_aside(proto)
    if legacy:
        proto.opset_import.append(helper.make_opsetid(_ASIDE, 1))
    try:
        result = version_converter.convert_version(proto, MIN_OPSET)
    except Exception as e:
        raise UnsupportedError(
            f"converting the model from opset {version} to {MIN_OPSET} failed: {e}. Convert it another way first"
        ) from e
    if legacy:
        _write_back(result)
        without_imports(result, _ASIDE)
    return result


def _set_aside(model: ModelProto) -> bool:
    """Move legacy nodes to a domain of ours, in sub-graphs too; whether there are any."""
    legacy = [n for n in all_nodes(model.graph) if n.domain in DEFAULT_DOMAINS and n.op_type in ("Upsample", "Resize")]
    for node in legacy:
        node.domain = _ASIDE
    return bool(legacy)


def _write_back(model: ModelProto) -> None:
    for graph, scope in reversed(list(scoped_graphs(model.graph))):  # inner ones first: the outer nodes are copied
        rewritten = [_Legacy(node, scope).nodes() if node.domain == _ASIDE else [node] for node in graph.node]
        assign(graph.node, chain.from_iterable(rewritten))


class _Legacy:
    """A legacy Upsample or Resize, and the Resize-18 nodes that compute the same."""

    def __init__(self, node: NodeProto, scope: Scope) -> None:
        attributes: dict[str, AttributeProto] = {a.name: a for a in node.attribute}
        self._node = node
        self._mode = attributes["mode"].s.decode() if "mode" in attributes else "nearest"
        self._result: list[NodeProto] = []
        if "scales" in attributes:  # Upsample-7
            self._scales = np.array(attributes["scales"].floats, np.float32)
            self._scales_name = self._constant("scales", self._scales)
        else:
            known = scope.constant(node.input[1])
            self._scales = None if known is None else np.array(known, np.float32)
            self._scales_name = node.input[1]

    def nodes(self) -> list[NodeProto]:
        """Nearest takes floor(x) on axes with a scale >= 1 and ceil(x) below; a scale of Upsample is never below."""
        x, y = self._node.input[0], self._node.output[0]
        scales = self._scales
        if self._mode != "nearest":
            self._resize(x, self._scales_name, y)
        elif self._node.op_type == "Upsample" or (scales is not None and (scales >= 1).all()):
            self._resize(x, self._scales_name, y, "floor")
        elif scales is not None and (scales <= 1).all():
            self._resize(x, self._scales_name, y, "ceil")
        else:
            self._both_ways(x, y)
        return self._result

    def _both_ways(self, x: str, y: str) -> None:
        """First up on the axes with a scale above 1, then down on those below.

        That is exact for nearest, an axis of scale 1 being copied, but for one thing: where the first step keeps every
        length, onnxruntime copies, which it would not have done with the second. So the first step gets one more axis,
        of length 1, that grows to 2 if there is a second step; its second half is dropped.
        """
        scales, one = self._scales, self._constant("one", np.array([1], np.float32))
        if scales is not None:
            up = self._constant("up", np.maximum(scales, np.float32(1)))
            down = self._constant("down", np.minimum(scales, np.float32(1)))
        else:
            up = self._add("Max", [self._scales_name, one], "up")
            down = self._add("Min", [self._scales_name, one], "down")
        if scales is not None and scales.max() >= 2:  # no length is kept
            larger = self._resize(x, up, self._name("larger"), "floor")
        else:
            smallest = self._add("ReduceMin", [down], "smallest", keepdims=1)
            shrinks = self._add("Less", [smallest, one], "shrinks")
            two = self._constant("two", np.array([2], np.float32))
            more = self._add("Where", [shrinks, two, one], "more")
            last = self._constant("last", np.array([-1], np.int64))
            first = self._constant("first", np.array(0, np.int64))
            wide = self._add("Unsqueeze", [x, last], "wide")
            scales_of_wide = self._add("Concat", [up, more], "up_of_wide", axis=0)
            grown = self._resize(wide, scales_of_wide, self._name("grown"), "floor")
            larger = self._add("Gather", [grown, first], "larger", axis=-1)
        self._resize(larger, down, y, "ceil")

    def _resize(self, x: str, scales: str, y: str, nearest_mode: str | None = None) -> str:
        attributes = {} if nearest_mode is None else {"nearest_mode": nearest_mode}
        self._result.append(
            helper.make_node(
                "Resize",
                [x, "", scales],
                [y],
                name=self._node.name if y == self._node.output[0] else y,
                mode=self._mode,
                coordinate_transformation_mode="asymmetric",
                **attributes,
            )
        )
        return y

    def _name(self, part: str) -> str:
        return f"{self._node.output[0]}/{part}"

    def _add(self, op_type: str, inputs: list[str], part: str, **attributes: Any) -> str:
        name = self._name(part)
        self._result.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def _constant(self, part: str, value: np.ndarray) -> str:
        return self._add("Constant", [], part, value=numpy_helper.from_array(value))
