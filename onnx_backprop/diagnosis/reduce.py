"""`reduce`: the smallest part of a model that still fails, by delta debugging over nodes (Zeller, Hildebrandt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import onnx
import onnx_ir as ir
from onnx import ModelProto
from onnx.inliner import inline_local_functions

from onnx_backprop.converters.prepare.submodel import Submodels, with_outputs
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_nodes

T = TypeVar("T")


def reduce(
    model: ModelProto | ir.Model | str | Path,
    fails: Callable[[ModelProto], bool],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> ModelProto:
    """The smallest part of the model that still fails: without any further node or output, it would pass.

        def fails(model):
            try:
                ob.backward(model)
            except ob.OnnxBackpropError as e:
                return "Wobble" in str(e)
            return False

        small = ob.reduce("model.onnx", fails)

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        fails: whether a model shows the failure. It should test for the words of one error, since a part of the model
            may fail with another. An exception from it ends the search.
        progress: called after each step with the number of remaining nodes.

    Nodes of the main graph are removed, first many at once, then fewer. What the others read of them becomes an input
    with the inferred type; what nothing reads any more becomes an output. Functions are inlined, if the model still
    fails without them. Branches and bodies stay whole.

    Errors: InvalidArgumentError if the whole model does not fail.
    """
    whole = load(model)
    if not fails(copied(whole)):
        raise InvalidArgumentError("fails: the whole model does not fail, so there is nothing to reduce")
    if whole.functions and fails(copied(inlined := inline_local_functions(whole))):
        whole = inlined
    parts = _Parts(whole)
    nodes = _smallest(range(len(parts.nodes)), lambda kept: fails(parts.model(kept)), progress)
    result = parts.model(nodes)
    outputs = [value.name for value in result.graph.output]
    outputs = _smallest(outputs, lambda kept: fails(with_outputs(result, kept)), lambda _: progress(len(nodes)))
    return with_outputs(result, outputs)


class _Parts:
    """Parts of a model by the positions of their nodes."""

    def __init__(self, model: ModelProto) -> None:
        typed = _typed(model)
        self._submodels = Submodels(typed)
        self.nodes = self._submodels.nodes
        fed = {value.name for value in typed.graph.input}
        self._defaults = {t.name: to_array(t) for t in typed.graph.initializer if t.name in fed}

    def model(self, positions: Sequence[int]) -> ModelProto:
        """These nodes alone."""
        part = self._submodels.extract([self.nodes[n] for n in positions], self._defaults)
        called = {(node.domain, node.op_type) for node in all_nodes(part)}
        assign(part.functions, [f for f in part.functions if (f.domain, f.name) in called])
        return part


def _typed(model: ModelProto) -> ModelProto:
    """With the types of values; behind an operator that onnx does not know, that of its first input is assumed.

    A part in which that is wrong fails otherwise than the whole, and is not taken.
    """
    try:
        typed = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):  # where that is what fails, or it is above 2 GB
        return model
    graph = typed.graph
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    assumed = [
        onnx.helper.make_value_info(name, types[node.input[0]])
        for node in graph.node
        if not onnx.defs.has(node.op_type, domain=node.domain) and node.input and node.input[0] in types
        for name in node.output
        if name and name not in types
    ]
    if not assumed:
        return typed
    graph.value_info.extend(assumed)
    return _typed(typed)


def _smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool], progress: Callable[[int], None]) -> list[T]:
    """Items all of which the failure needs: ddmin, by complements."""
    kept, count = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // count)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if rest and fails(rest):
                kept, count = rest, max(count - 1, 2)
                progress(len(kept))
                break
        else:
            if size == 1:
                break
            count = min(2 * count, len(kept))
    return kept
