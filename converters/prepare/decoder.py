"""A decoder with a cache of keys and values, as it is trained: on whole sequences, from an empty cache.

Generation feeds such a model the keys and values of the positions before (its pasts) and takes them back with the new
ones behind them (its presents). Training reads whole sequences: pasts have the length 0, nobody reads the presents, and
masks, positions and counts follow from the shape of the tokens.

Letters of shapes: batch B, length T of the tokens, P of the pasts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, TensorProto, TypeProto

from onnx_backprop.converters.prepare.cache.from_tokens import derive
from onnx_backprop.converters.prepare.cache.inputs import GROUPED, MOVED, Decoder
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.prepare.selection import Patterns, select
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign, copied, without_tensors
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, used_names
from onnx_backprop.opset.graphs.order import ancestors, producers
from onnx_backprop.opset.graphs.walk import all_nodes, called, is_standard, reads, subgraphs

_SHOWN = 3


@dataclass(frozen=True)
class Cache:
    """What was done to the inputs and outputs of a decoder.

    emptied: pasts, the switch of a merged decoder, and inputs that nobody reads. left_out: presents. derived: inputs
    with a default, for which the graph computes what follows from the tokens. given: the pasts that stay inputs.
    """

    emptied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.emptied or self.left_out or self.derived)

    def __str__(self) -> str:
        """One sentence, with names."""
        parts = [f"its cache is empty, so that {_listed(self.emptied)} are no inputs"] if self.emptied else []
        parts += [f"its outputs {_listed(self.left_out)} are left out"] if self.left_out else []
        parts += [f"{_listed(self.derived)} follow from the tokens unless a batch has them"] if self.derived else []
        return f"the model is a decoder, which is trained on whole sequences: {'; '.join(parts)}"


class CacheEditor:
    """Takes the cache out of a model, in place, when it is called; `cache` says what was done.

    whole, tensors: the model before, without its initializers, and these.

    given: patterns of inputs that each batch gives, and further names: these stay as they are. If a past is among them,
    all pasts stay.
    """

    def __init__(self, given: Patterns = (), further: Iterable[str] = ()) -> None:
        self.given, self.further = given, further
        self.whole = ModelProto()
        self.tensors: dict[str, TensorProto] = {}
        self.cache = Cache()

    def __call__(
        self, proto: ModelProto, weights: Mapping[str, TensorProto], declared: Mapping[str, TypeProto]
    ) -> None:
        """weights: those that are set aside, inputs of their names standing for them. declared: types of outputs."""
        graph = proto.graph
        tensors = {**weights, **{tensor.name: tensor for tensor in graph.initializer}}
        stored = set(tensors)
        inputs = [value.name for value in graph.input if value.name not in stored]
        if len(inputs) < 2:
            return
        _share_weights(graph, tensors)
        whole = without_tensors(proto, tensors)
        given = set(select("given", self.given, inputs, what="an input")) if self.given else set[str]()
        given |= set(inputs).intersection(self.further)
        switches, presents = _fold_branches(graph, stored, given, declared)
        decoder = Decoder(graph, stored, declared)
        pasts = decoder.pasts()
        presents = list(dict.fromkeys([*presents, *decoder.presents(pasts)]))
        needed = _needed(graph)
        if not (pasts or presents or decoder.nodes(GROUPED)):
            return
        read = {name for node in all_nodes(whole) for name in node.input}
        self.whole, self.tensors = whole, {name: tensor for name, tensor in tensors.items() if name in read}
        if len(presents) < len(graph.output):
            assign(graph.output, [value for value in graph.output if value.name not in presents])
        kept = bool(given & pasts.keys())
        unread = set(inputs) - {name for node in graph.node for name in reads(node)}
        gone = {*switches, *([] if kept else pasts), *(unread - given)}
        tokens, counts = decoder.counts(given, pasts)
        if not kept:
            decoder.empty(pasts)
        dead = needed - _needed(graph)
        assign(graph.node, [node for n, node in enumerate(graph.node) if n not in dead])
        derive(graph, decoder.inputs, tokens, counts, pasts, kept=kept)
        assign(graph.input, [value for value in graph.input if value.name not in gone])
        emptied = tuple(name for name in inputs if name in gone)
        self.cache = Cache(emptied, tuple(presents), tuple(counts), tuple(pasts) if kept else ())


def with_cache_alone(proto: ModelProto) -> bool:
    """Put the branch with a cache in the place of the If of a merged decoder, in place; whether there is one.

    From an empty cache it computes what the other does. Inputs and outputs stay, the switch too, which nobody reads.
    """
    graph = proto.graph
    stored = {tensor.name for tensor in graph.initializer}
    names = {value.name for value in graph.input} - stored
    switches, _ = _fold_branches(graph, stored, names)
    return bool(switches)


def _needed(graph: GraphProto) -> set[int]:
    """The positions of the nodes that outputs need."""
    return set(ancestors(graph.node, [value.name for value in graph.output]))


def _fold_branches(
    graph: GraphProto, stored: Collection[str], given: Collection[str], declared: Mapping[str, TypeProto] | None = None
) -> tuple[list[str], list[str]]:
    """Put the branch without pasts in the place of an If by which one file holds a decoder with and without them.

    The branch with them, where one of them is given. Returns the inputs that are then read no more, and the presents.
    """
    inputs = {value.name: value for value in graph.input if value.name not in stored}
    makers, readers = producers(graph.node), [name for node in graph.node for name in node.input]
    for node in [node for node in graph.node if is_standard(node, "If")]:
        switch = node.input[0]
        while switch in makers and is_standard(makers[switch], *MOVED):
            switch = makers[switch].input[0]
        if switch not in inputs:
            continue
        branches = subgraphs(node)
        floats = {name for name, v in inputs.items() if v.type.tensor_type.elem_type in FLOATS}
        reading = [floats & {name for inner in branch.node for name in reads(inner)} for branch in branches]
        cached = next((n for n in (0, 1) if reading[n] > reading[1 - n]), None)
        if cached is None:
            continue
        whole = copied(graph)
        _unfold(whole, called(node), branches[cached])
        decoder = Decoder(whole, stored, declared)
        pasts = decoder.pasts()
        if not pasts:
            continue
        presents = decoder.presents([*pasts, *(reading[cached] - reading[1 - cached])])
        _unfold(graph, called(node), branches[cached if given & pasts.keys() else 1 - cached])
        live = {name for one in graph.node for name in reads(one)}
        unread = [name for name in inputs if name not in live and (name == switch or name in reading[cached])]
        return [name for name in unread if readers.count(switch) == 1 or name != switch], presents
    return [], []


def _share_weights(graph: GraphProto, tensors: Mapping[str, TensorProto]) -> None:
    """Let the branches of an If read one tensor where each has a copy of its own, as exporters write them.

    Of several with the same numbers, the first of one branch is the first of the other.
    """
    for node in graph.node:
        branches = subgraphs(node) if is_standard(node, "If") else []
        read = [dict.fromkeys(name for inner in branch.node for name in inner.input) for branch in branches]
        if len(read) != 2:
            continue
        groups: list[dict[object, list[str]]] = [defaultdict(list), defaultdict(list)]
        for group, names, others in zip(groups, read, read[::-1], strict=True):
            for tensor in (tensors[name] for name in names if name in tensors and name not in others):
                if tensor.data_type in FLOATS and tensor.dims:
                    key = (tensor.data_type, *tensor.dims, to_array(tensor).tobytes())
                    group[key].append(tensor.name)
        new: dict[str, str] = {}
        for key, names in groups[0].items():
            if len(names) == len(groups[1].get(key, ())):
                new.update(zip(groups[1][key], names, strict=True))
        for inner in branches[1].node:
            rename(inner, new)


def _unfold(graph: GraphProto, label: str, branch: GraphProto) -> None:
    """Put the nodes of a branch in the place of its If."""
    at, node = next((n, node) for n, node in enumerate(graph.node) if called(node) == label and node.op_type == "If")
    outputs = dict(zip(node.output, (value.name for value in branch.output), strict=True))
    op = Emitter(label, used_names(graph))
    op.nodes = [copied(inner) for inner in branch.node]
    nodes = op.finish({output: value for output, value in outputs.items() if output})
    assign(graph.node, [*graph.node[:at], *nodes, *graph.node[at + 1 :]])
    graph.initializer.extend(branch.initializer)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
