"""What torch's exporters write about a model: which tensors the exported module had, of which kind, under which names.

`torch.onnx.export(dynamo=True)` writes the signature of its ExportedProgram into the main graph's metadata, one line
for each input, "p_fc_weight: PARAMETER target='fc.weight'", and keeps it when it folds such tensors away; and the kind
of each initializer that is left into the metadata of its value_info.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from onnx import ModelProto

from onnx_backprop.opset.graphs.lazy import ir

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"  # metadata of the main graph
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"  # metadata of a value: one of the kinds below, or USER_INPUT
PARAMETER, BUFFER, CONSTANT = "PARAMETER", "BUFFER", "CONSTANT_TENSOR"
FROZEN = "FROZEN"  # a parameter that does not require a gradient
REQUIRES_GRAD = "onnx_backprop.requires_grad"  # metadata of a value: "False" for a parameter that is not to be trained
NO_GRADIENT = "onnx_backprop.no_gradient"  # metadata of the main graph: all such parameters, a JSON list
ALIASES = "onnx_backprop.aliases"  # metadata of a value: further names of a tied parameter, a JSON list
TIES = "onnx_backprop.ties"  # metadata of the main graph: "stated" if each tensor of the module is one initializer
STOP = "onnx_backprop.stop"  # metadata of an Identity: passes no gradient
_INPUT = re.compile(r"^(\S+): ([A-Z_]+)(?: target='(.*)')?(?: persistent=(?:True|False))?$")


class Entry(NamedTuple):
    """An input of the exported program.

    kind: PARAMETER, FROZEN, BUFFER, CONSTANT_TENSOR, USER_INPUT, CUSTOM_OBJ or TOKEN.
    target: the name in the module, as of `named_parameters()` and `named_buffers()`; "" for other inputs.
    input: the name in the program.
    shape: of the initializer that has the name of the target; None if the file has none, as for what was folded.
    """

    kind: str
    target: str
    input: str
    shape: tuple[int, ...] | None


def signature(model: ModelProto | ir.Model) -> list[Entry]:
    """The inputs of the program that torch exported, in its order; an empty list if the file does not say."""
    if isinstance(model, ModelProto):
        props = {p.key: p.value for p in reversed(model.graph.metadata_props)}
        shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    else:
        props = model.graph.metadata_props
        stored = {name: value.const_value for name, value in model.graph.initializers.items()}
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in stored.items() if tensor is not None}
    frozen = _names(props.get(NO_GRADIENT, ""))
    entries: list[Entry] = []
    for line in props.get(SIGNATURE, "").partition("# outputs")[0].splitlines():
        if match := _INPUT.match(line.strip()):
            name, kind, target = match.groups(default="")
            kind = FROZEN if kind == PARAMETER and target in frozen else kind
            entries.append(Entry(kind, target, name, shapes.get(target)))
    return entries


def tied_names(model: ModelProto) -> dict[str, str]:
    """Each further name of a tied parameter that is one initializer of the file -> the initializer's."""
    texts = [(v.name, p.value) for v in model.graph.value_info for p in v.metadata_props if p.key == ALIASES]
    return {entry: name for name, text in texts for entry in _names(text)}


def _names(text: str) -> list[str]:
    """The strings of a JSON list; none of what is no such list."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
