"""A decoder with a cache of keys and values, as it is trained: on whole sequences, from an empty cache.

Generation feeds such a model the keys and values of the positions before (its pasts) and takes them back with the new
ones behind them (its presents). Training reads whole sequences: pasts have the length 0, nobody reads the presents, and
masks, positions and counts follow from the shape of the tokens.

Letters of shapes: batch B, length T of the tokens, P of the pasts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnx_backprop.converters.prepare.accept import MICROSOFT
from onnx_backprop.converters.prepare.from_tokens import derive
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.prepare.selection import Patterns, select
from onnx_backprop.opset.graphs.edit import assign, copied, without_tensors
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, used_names
from onnx_backprop.opset.graphs.order import ancestors, producers
from onnx_backprop.opset.graphs.walk import (
    all_nodes,
    attributes_of,
    called,
    constant_tensor,
    is_standard,
    reads,
    subgraphs,
)

Key = tuple[str, str]

# the inputs of an operator that are pasts, and the axis of P in each; the outputs that are presents
_PASTS: dict[Key, dict[int, int]] = {
    (MICROSOFT, "Attention"): {4: 3},
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"): {5: 2, 6: 2},
    (MICROSOFT, "GroupQueryAttention"): {3: 2, 4: 2},
    (MICROSOFT, "MultiHeadAttention"): {6: 2, 7: 2},
    ("", "Attention"): {4: 2, 5: 2},
}
_PRESENTS: Mapping[Key, tuple[int, ...]] = dict.fromkeys(_PASTS, (1, 2)) | {(MICROSOFT, "Attention"): (1,)}
# what an operator takes an integer input for
_COUNTS: dict[Key, dict[int, str]] = {
    (MICROSOFT, "Attention"): {3: "mask"},
    (MICROSOFT, "GroupQueryAttention"): {5: "lengths", 6: "total", 9: "positions"},
    (MICROSOFT, "MultiHeadAttention"): {4: "mask"},
    (MICROSOFT, "RotaryEmbedding"): {1: "positions"},
    ("", "RotaryEmbedding"): {3: "positions"},
}
# names that exporters give to inputs whose use is spread over many nodes
_NAMED = {"cache_position": "positions", "position_ids": "positions", "attention_mask": "mask"}
_NAMED |= {"num_logits_to_keep": "none", "logits_to_keep": "none"}
_AXES = {"lengths": (1, 2), "mask": (2,), "positions": (1, 2, 3)}  # how many each may have; of others 0 or 1
_WHOLE = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
_SAME = ("Cast", "Identity")
_MOVED = (*_SAME, "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_SPREAD = (*_MOVED, "Concat", "Expand", "Mul", "Slice", "Split", "Tile")  # keys and values before they are multiplied
_ANGLES = (*_MOVED, "Add", "Concat", "Einsum", "Expand", "MatMul", "Mul", "Slice")  # positions before Cos and Sin
_MULTIPLYING = {("", "MatMul"), ("", "Einsum"), ("", "Gemm"), *_PASTS}
_STORED = "sliding_window_cache"  # an attribute: the buffer of pasts has no room but for a window
_SHOWN = 3


@dataclass(frozen=True)
class Cache:
    """What was done to the inputs and outputs of a decoder.

    emptied: pasts, and the switch of a merged decoder. left_out: presents. derived: inputs with a default, by which the
    graph derives them. given: the pasts that stay inputs.
    """

    emptied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.emptied or self.left_out or self.derived)

    def __str__(self) -> str:
        """One sentence, with names."""
        parts = [f"its cache {_listed(self.emptied)} is empty"] if self.emptied else []
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

    def __call__(self, proto: ModelProto, weights: Mapping[str, TensorProto]) -> None:
        """weights: those that are set aside, inputs of their names standing for them."""
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
        switches, presents = _fold_branches(graph, stored, given)
        decoder = _Decoder(graph, stored)
        pasts = decoder.pasts()
        presents = list(dict.fromkeys([*presents, *decoder.presents(pasts)]))
        needed = _needed(graph)
        if not (pasts or presents or decoder.nodes(_GROUPED)):
            return
        read = {name for node in all_nodes(whole) for name in node.input}
        self.whole, self.tensors = whole, {name: tensor for name, tensor in tensors.items() if name in read}
        if len(presents) < len(graph.output):
            assign(graph.output, [value for value in graph.output if value.name not in presents])
        kept = bool(given & pasts.keys())
        gone = {*switches, *([] if kept else pasts)}
        tokens, counts = decoder.counts(given, pasts)
        if not kept:
            decoder.empty(pasts)
        dead = needed - _needed(graph)
        assign(graph.node, [node for n, node in enumerate(graph.node) if n not in dead])
        derive(graph, decoder.inputs, tokens, counts, pasts, kept=kept)
        assign(graph.input, [value for value in graph.input if value.name not in gone])
        emptied = tuple(name for name in inputs if name in gone)
        self.cache = Cache(emptied, tuple(presents), tuple(counts), tuple(pasts) if kept else ())


_GROUPED: Key = (MICROSOFT, "GroupQueryAttention")


class _Decoder:
    """The main graph of a model: who reads what, and which inputs are pasts."""

    def __init__(self, graph: GraphProto, stored: Collection[str]) -> None:
        self.graph = graph
        self.inputs = {value.name: value for value in graph.input if value.name not in stored}
        self.makers = producers(graph.node)
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.tensors |= {n.output[0]: t for n in graph.node if (t := constant_tensor(n)) is not None}
        self.readers: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.readers[name].append((node, index))
        self.outputs = {value.name for value in graph.output}

    def nodes(self, key: Key) -> list[NodeProto]:
        """The nodes of an operator."""
        return [node for node in self.graph.node if _key(node) == key]

    def behind(self, name: str, through: Collection[str]) -> Iterator[tuple[str, NodeProto | None, int]]:
        """Each value that `name` becomes through some standard operators, and who reads it: None for nobody."""
        waiting, seen = [name], {name}
        while waiting:
            value = waiting.pop()
            yield value, None, 0
            for node, index in self.readers[value]:
                yield value, node, index
                if is_standard(node, *through) and not seen.issuperset(node.output):
                    waiting += node.output
                    seen.update(node.output)

    # --- pasts and presents ---

    def pasts(self) -> dict[str, int]:
        """The float inputs that a node takes for pasts, or to which new keys or values are appended; each axis of P.

        Of the latter the result is an output, perhaps less its oldest positions, and the operand of a product.
        """
        found = {name: axis for name in self.inputs if (axis := self._axis_of(name)) is not None}
        joined = [name for name in found if not self._in_a_slot(name)]
        if len(joined) == 1 or self._tokens(()) is None:
            found = {name: axis for name, axis in found.items() if name not in joined}
        return found

    def _axis_of(self, name: str) -> int | None:
        """The axis of P of an input; None where it is no past."""
        tensor = self.inputs[name].type.tensor_type
        rank = len(tensor.shape.dim)
        if tensor.elem_type not in FLOATS or rank < 3:
            return None
        for _, axes, node, index in self._views(name, list(range(rank))):
            slot = _PASTS.get(_key(node), {}).get(index)
            if slot is not None and slot < len(axes):
                return axes[slot]
            if is_standard(node, "Concat") and self._appends(node, len(axes)):
                axis = axes[attributes_of(node)["axis"] % len(axes)]
                if axis and (axis < rank - 1 or "past" in name):
                    return axis
        return None

    def _views(self, name: str, axes: list[int]) -> Iterator[tuple[str, list[int], NodeProto, int]]:
        """Who reads an input or a part of it; axes: which of the input each axis of the value is."""
        for node, index in self.readers[name]:
            yield name, axes, node, index
            if index:
                continue
            left = self._left(node, axes)
            for output in node.output if left is not None else ():
                yield from self._views(output, left or [])

    def _left(self, node: NodeProto, axes: list[int]) -> list[int] | None:
        """The axes of what a node makes of a value that it changes no number of; None for other nodes."""
        given, rank = attributes_of(node), len(axes)
        if is_standard(node, *_SAME, "Split"):
            return axes
        if is_standard(node, "Transpose"):
            return [axes[n] for n in given.get("perm", range(rank)[::-1])]
        constant = self.tensors.get(node.input[1]) if len(node.input) > 1 else None
        if constant is None:
            return None
        numbers = numpy_helper.to_array(constant)
        if is_standard(node, "Gather") and not numbers.ndim:
            gone = {given.get("axis", 0) % rank}
        elif is_standard(node, "Squeeze"):
            gone = {int(n) % rank for n in numbers}
        else:
            return None
        return [axis for n, axis in enumerate(axes) if n not in gone]

    def _appends(self, node: NodeProto, rank: int) -> bool:
        """Whether a Concat appends what is computed, and what it makes is an output and the operand of a product."""
        if sum(self._is_input(name) for name in node.input) != 1:
            return False
        cut = rank > 3  # as sliding windows cut it, and caches of streaming convolutions too
        multiplied = any(n is not None and _key(n) in _MULTIPLYING for _, n, _ in self.behind(node.output[0], _SPREAD))
        return multiplied and bool(self._becomes(node.output[0], ("Slice",) if cut else ()))

    def _is_input(self, name: str) -> bool:
        """Whether a value is an input, perhaps a part of it, or its axes in another order."""
        while (node := self.makers.get(name)) is not None and is_standard(node, *_MOVED, "Gather", "Split"):
            name = node.input[0]
        return name in self.inputs

    def _becomes(self, name: str, more: Sequence[str] = ()) -> list[str]:
        """The outputs of the graph that a value is handed on to."""
        handed = self.behind(name, (*_MOVED, "Concat", *more))
        return [value for value, node, _ in handed if node is None and value in self.outputs]

    def _in_a_slot(self, name: str) -> bool:
        return any(i in _PASTS.get(_key(n), {}) for _, n, i in self.behind(name, _MOVED) if n is not None)

    def presents(self, pasts: Iterable[str]) -> list[str]:
        """The outputs that hold keys or values."""
        made = [n.output[i] for n in self.graph.node for i in _PRESENTS.get(_key(n), ()) if i < len(n.output)]
        for name in pasts:
            rank = len(self.inputs[name].type.tensor_type.shape.dim)
            for _, axes, node, _ in self._views(name, list(range(rank))):
                if is_standard(node, "Concat") and self._appends(node, len(axes)):
                    made.append(node.output[0])
            made.append(name)
        return list(dict.fromkeys(y for name in made if name for y in self._becomes(name, ("Slice",))))

    def empty(self, pasts: Collection[str]) -> None:
        """Take the pasts out of slots and from in front of new keys and values."""
        for name in pasts:
            rank = len(self.inputs[name].type.tensor_type.shape.dim)
            for value, _, node, index in list(self._views(name, list(range(rank)))):
                if index in _PASTS.get(_key(node), {}):
                    node.input[index] = ""
                    assign(node.attribute, [a for a in node.attribute if a.name != _STORED])
                elif is_standard(node, "Concat"):
                    node.input.remove(value)
                    if len(node.input) == 1:
                        node.op_type = "Identity"
                        del node.attribute[:]
                while node.input and not node.input[-1]:
                    node.input.pop()

    # --- what follows from the tokens ---

    def counts(self, given: Collection[str], pasts: Collection[str]) -> tuple[str, dict[str, str]]:
        """The input that holds the tokens, and the integer inputs that follow from it, with what each is."""
        found: dict[str, str] = {}
        for name, value in self.inputs.items():
            if value.type.tensor_type.elem_type in _WHOLE and name not in pasts:
                what, rank = self._use_of(name), len(value.type.tensor_type.shape.dim)
                if what and rank in _AXES.get(what, (0, 1)):
                    found[name] = what
        tokens = self._tokens(found)
        if tokens is None:
            return "", {}
        ids = self.inputs[tokens].type.tensor_type.shape.dim
        for name, value in self.inputs.items():  # rows as those of the tokens, of another length: a mask of P + T
            dims = value.type.tensor_type.shape.dim
            whole = value.type.tensor_type.elem_type in _WHOLE and len(dims) == 2 and name not in (tokens, *found)
            if whole and len(ids) > 1 and dims[0] == ids[0] and dims[1] != ids[1]:
                found[name] = "mask"
        return tokens, {name: what for name, what in found.items() if name not in given}

    def _use_of(self, name: str) -> str | None:
        reached = [(node, index) for _, node, index in self.behind(name, _MOVED) if node is not None]
        direct = [what for node, index in reached if (what := _COUNTS.get(_key(node), {}).get(index))]
        if direct:
            return direct[0]
        named = next((what for known, what in _NAMED.items() if known in name), None)
        if named:
            return named
        angles = (node for _, node, _ in self.behind(name, _ANGLES) if node is not None)
        return "positions" if any(is_standard(node, "Cos", "Sin") for node in angles) else None

    def _tokens(self, others: Collection[str]) -> str | None:
        """The input whose first lengths are B and T: indices of rows of a table, else a float one of three axes."""
        rows: list[str] = []
        for name, value in self.inputs.items():
            whole = value.type.tensor_type.elem_type in _WHOLE and len(value.type.tensor_type.shape.dim) == 2
            if whole and name not in others:
                behind = [n.op_type for _, n, i in self.behind(name, _MOVED) if n is not None and (i == 1 or n.domain)]
                rows += [name] if {"Gather", "GatherBlockQuantized"} & set(behind) else []
        rows.sort(key=lambda name: "ids" not in name or "type" in name)
        rows += [name for name, v in self.inputs.items() if "embeds" in name and v.type.tensor_type.elem_type in FLOATS]
        return next(iter(rows), None)


def _needed(graph: GraphProto) -> set[int]:
    """The positions of the nodes that outputs need."""
    return set(ancestors(graph.node, [value.name for value in graph.output]))


def _fold_branches(graph: GraphProto, stored: Collection[str], given: Collection[str]) -> tuple[list[str], list[str]]:
    """Put the branch without pasts in the place of an If by which one file holds a decoder with and without them.

    The branch with them, where one of them is given. Returns the inputs that are then read no more, and the presents.
    """
    inputs = {value.name: value for value in graph.input if value.name not in stored}
    makers, readers = producers(graph.node), [name for node in graph.node for name in node.input]
    for node in [node for node in graph.node if is_standard(node, "If")]:
        switch = node.input[0]
        while switch in makers and is_standard(makers[switch], *_MOVED):
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
        decoder = _Decoder(whole, stored)
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
                    key = (tensor.data_type, *tensor.dims, numpy_helper.to_array(tensor).tobytes())
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


def _key(node: NodeProto) -> Key:
    return ("" if is_standard(node) else node.domain), node.op_type


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
