"""Which weights patterns choose for adapters, and what else they name."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from onnx_backprop.converters.finetune.linear import PLACES, Layers, Linear, names_of
from onnx_backprop.converters.prepare.exporters.origins import origin_of
from onnx_backprop.converters.prepare.exporters.torch_metadata import BUFFER, CONSTANT
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.prepare.selection import Patterns, aliases, select
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.walk import all_nodes, attributes_of, called

Place = tuple[int, int]  # a node of the main graph, and one of its inputs
# operators, of any domain, that multiply by matrices or kernels, or read rows of them
_MULTIPLYING = {"Attention", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "DynamicQuantizeLSTM", "Einsum"}
_MULTIPLYING |= {"DynamicQuantizeMatMul", "EmbedLayerNormalization", "FusedConv", "FusedGemm", "FusedMatMul", "GRU"}
_MULTIPLYING |= {"Gather", "GatherBlockQuantized", "Gemm", "GemmFastGelu", "LSTM", "MatMul", "MatMulInteger", "MoE"}
_MULTIPLYING |= {"MatMulBnb4", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QGemm", "QLinearConv", "QMoE"}
_MULTIPLYING |= {"QLinearMatMul", "RNN", "TransposeMatMul"}
_SHOWN = 6
_EXPECTED = (
    "a tensor of the file that a Gemm, MatMul, MatMulNBits, Conv, ConvTranspose, GRU, LSTM, RNN or Attention of the "
    "main graph multiplies by, or a table that a Gather reads along its first axis"
)


class _Other(NamedTuple):
    """What no adapter goes beside: a tensor of the file, "" for none, where a node reads it, or what comes of it.

    weight: whether it is a matrix or a kernel that the node multiplies by.
    """

    tensor: str
    op_type: str
    node: str
    weight: bool

    def __str__(self) -> str:
        node = f"the {self.op_type} {self.node!r}"
        return f"{self.tensor!r} of {node}" if self.tensor else node


def choose(layers: Layers, targets: Patterns, whole: Collection[str]) -> tuple[list[dict[Place, Linear]], str]:
    """The layers that the targets choose, together those that read one weight in one way; and a warning, or "".

    whole: the tensors that are trained whole; the warning leaves them out.
    """
    linears = {(n, layer.place): layer for n, node in enumerate(layers.graph.node) for layer in layers.layers(node)}
    tensors = aliases(layers.tensors.values())
    places: dict[str, list[Place]] = defaultdict(list)
    constants: dict[str, list[Place]] = defaultdict(list)  # which no pattern chooses
    for place, layer in linears.items():
        tensor = layer.weight.tensor
        if origin_of(layers.tensors[tensor]).kind in (BUFFER, CONSTANT):
            constants[tensor].append(place)
            continue
        for name in dict.fromkeys((*layer.names, *tensors.get(tensor, ()))):
            places[name].append(place)
    others = _others(layers, linears)
    exact = {*others, *constants}
    pool = list(dict.fromkeys((*places, *(name for name, some in others.items() if any(o.tensor for o in some)))))
    select("targets", targets, pool, exact=exact)
    chosen: set[Place] = set()
    missed: dict[_Other, None] = {}
    for target in targets:
        matched = select("targets", [target], pool, exact=exact)
        beside = dict.fromkeys(other for name in matched for other in others.get(name, ()))
        if not (matches := {p for name in matched for p in (*places.get(name, ()), *constants.get(name, ()))}):
            raise _refused(layers, target, beside)
        chosen |= matches
        missed |= {other: None for other in beside if other.weight and other.tensor not in whole}
    together: dict[object, dict[Place, Linear]] = defaultdict(dict)
    for place in sorted(chosen):
        together[_reading(linears[place])][place] = linears[place]
    instead = _instead(layers, missed, ". To train them whole: ")
    warning = f"lora: targets names weights that no adapter goes beside and that stay frozen: {_shown(missed)}{instead}"
    return list(together.values()), warning if missed else ""


def _others(layers: Layers, places: Collection[Place]) -> dict[str, list[_Other]]:
    """What no adapter goes beside, by the names of tensors, nodes and modules."""
    result: dict[str, list[_Other]] = defaultdict(list)
    for n, outer in enumerate(layers.graph.node):
        for node in all_nodes([outer]):
            every = range(len(node.input)) if node.op_type in _MULTIPLYING else ()
            weights = PLACES.get((node.domain, node.op_type), every)
            read: dict[str, bool] = {}  # tensor -> whether it is a weight
            for k, name in enumerate(node.input):
                if node is outer and (n, k) in places:
                    continue
                if k in weights:
                    for tensor in sorted(layers.sources(name)):
                        read[tensor] = sum(length > 1 for length in layers.tensors[tensor].dims) > 1  # no bias
                elif name in layers.tensors:
                    read.setdefault(name, False)
            for tensor, weight in (read or {"": False}).items():
                for name in dict.fromkeys((tensor, *names_of(node))):
                    result[name].append(_Other(tensor, node.op_type, called(node), weight))
    result.pop("", None)
    return result


def _refused(layers: Layers, target: str | re.Pattern[str], beside: Iterable[_Other]) -> InvalidArgumentError:
    text = target if isinstance(target, str) else target.pattern
    named = sorted(beside, key=lambda other: not other.weight)
    return InvalidArgumentError(
        f"targets: {text!r} names {_shown(named)}, where no adapter goes; expected {_EXPECTED}. Leave it out"
        f"{_instead(layers, named, ', or train it whole: ')}"
    )


def _shown(others: Iterable[_Other]) -> str:
    """Each tensor once."""
    distinct: dict[str, _Other] = {}
    for other in others:
        distinct.setdefault(other.tensor or other.node, other)
    text = ", ".join(map(str, list(distinct.values())[:_SHOWN]))
    return f"{text} and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else text


def _instead(layers: Layers, others: Iterable[_Other], words: str) -> str:
    """What to write to train the tensors whole; nothing if none of them can be."""
    initializers = {tensor.name for tensor in layers.graph.initializer if tensor.data_type in FLOATS}
    names = list(dict.fromkeys(other.tensor for other in others if other.tensor in initializers))
    return f"{words}also={names}" if names else ""


def _reading(layer: Linear) -> tuple[object, ...]:
    """What two nodes that read a weight in one way have in common."""
    links = tuple(
        (link.op_type, *link.input[1:], *(a.SerializeToString() for a in link.attribute)) for link in layer.weight.chain
    )
    groups = attributes_of(layer.node).get("group", 1)
    return layer.weight.tensor, layer.node.op_type, layer.place, layer.dims, layer.output_axis, links, groups
