"""Which inputs of a decoder are pasts, states, masks, positions and lengths, and which outputs are these afterwards.

They are recognised by what reads them. A past grows by the new tokens; a state, as of a convolution along time, keeps
its lengths, and is zeros before the first token.

Letters of shapes: batch B, length T of the tokens, P of the pasts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from onnx import GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

from onnx_backprop.converters.prepare.accept import MICROSOFT
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.order import ancestors, producers
from onnx_backprop.opset.graphs.walk import attributes_of, constant_tensor, is_standard, reads

Key = tuple[str, str]

# the inputs of an operator that are pasts, and the axis of P in each, None for a state; the outputs that are presents
_PASTS: dict[Key, dict[int, int | None]] = {
    (MICROSOFT, "Attention"): {4: 3},
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"): {5: 2, 6: 2},
    (MICROSOFT, "GroupQueryAttention"): {3: 2, 4: 2},
    (MICROSOFT, "MultiHeadAttention"): {6: 2, 7: 2},
    (MICROSOFT, "CausalConvWithState"): {3: None},
    (MICROSOFT, "LinearAttention"): {3: None},
    ("", "Attention"): {4: 2, 5: 2},
}
_PRESENTS: dict[Key, tuple[int, ...]] = dict.fromkeys(_PASTS, (1, 2))
_PRESENTS |= {(MICROSOFT, name): (1,) for name in ("Attention", "CausalConvWithState", "LinearAttention")}
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
MOVED = (*_SAME, "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_SPREAD = (*MOVED, "Concat", "Expand", "Mul", "Slice", "Split", "Tile")  # keys and values before they are multiplied
_ANGLES = (*MOVED, "Add", "Concat", "Einsum", "Expand", "MatMul", "Mul", "Slice")  # positions before Cos and Sin
_MULTIPLYING = {("", "MatMul"), ("", "Einsum"), ("", "Gemm"), *_PASTS}
_STORED = "sliding_window_cache"  # an attribute: the buffer of pasts has no room but for a window
GROUPED: Key = (MICROSOFT, "GroupQueryAttention")


class Decoder:
    """The main graph of a model: who reads what, and which inputs are pasts. declared: what a file says of outputs."""

    def __init__(
        self, graph: GraphProto, stored: Collection[str], declared: Mapping[str, TypeProto] | None = None
    ) -> None:
        self.graph, self.declared = graph, declared or {}
        self.inputs = {value.name: value for value in graph.input if value.name not in stored}
        self.makers = producers(graph.node)
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.tensors |= {n.output[0]: t for n in graph.node if (t := constant_tensor(n)) is not None}
        self.readers: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.readers[name].append((node, index))
        self.outputs = dict.fromkeys(value.name for value in graph.output)
        self.states: dict[str, str] = {}  # float inputs that come out again with the same lengths, and as what

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

    def pasts(self) -> dict[str, int | None]:
        """The float inputs that a node takes for pasts, or to which new keys or values are appended; each axis of P.

        Of the latter the result is an output, perhaps less its oldest positions, and the operand of a product. Beside
        such, and beside GroupQueryAttention, also states, whose axis is None.
        """
        pasts = {name: axis for name in self.inputs for axis in self._axis_of(name)}
        joined = [name for name in pasts if not self._in_a_slot(name)]
        if len(joined) == 1 or self._tokens(()) is None:
            pasts = {name: axis for name, axis in pasts.items() if name not in joined}
        if pasts or self.nodes(GROUPED):
            self.states = self._find_states(pasts)
        return pasts | dict.fromkeys(self.states)

    def _axis_of(self, name: str) -> list[int | None]:
        """The axis of P of an input, None for a state; nothing where it is no past."""
        tensor = self.inputs[name].type.tensor_type
        rank = len(tensor.shape.dim)
        if tensor.elem_type not in FLOATS or rank < 3:
            return []
        for _, axes, node, index in self._views(name, list(range(rank))):
            slots = _PASTS.get(_key(node), {})
            slot = slots.get(index)
            if index in slots and (slot is None or slot < len(axes)):
                return [None if slot is None else axes[slot]]
            if is_standard(node, "Concat") and self._appends(node, len(axes)):
                axis = axes[attributes_of(node)["axis"] % len(axes)]
                if axis and (axis < rank - 1 or "past" in name):
                    return [axis]
        return []

    def _find_states(self, pasts: Collection[str]) -> dict[str, str]:
        """Other float inputs that come out again, each with that output.

        All lengths but the batch are declared, of the output too, and equal, and the output is computed of the input.
        Of several such outputs it is the one that the fewest nodes lead to: what a later layer makes is computed of all
        states before. What has as many positions as the tokens, as hidden states of another model, is none.
        """
        free: dict[str, TypeProto.Tensor] = {}
        tokens = self._tokens(())
        ids = [] if tokens is None else self.inputs[tokens].type.tensor_type.shape.dim[1:2]
        for name in self.inputs.keys() - pasts - {tokens}:
            type_ = self.inputs[name].type.tensor_type
            if len(type_.shape.dim) == 3 and type_.shape.dim[1] in ids:
                continue
            unknown = sum(not dim.HasField("dim_value") for dim in type_.shape.dim)
            if type_.elem_type in FLOATS and len(type_.shape.dim) > 1 >= unknown:
                free[name] = type_
        types = {name: self.declared[name].tensor_type for name in self.outputs if name in self.declared}
        nodes, pairs = self.graph.node, dict[str, str]()
        leading = {y: ancestors(nodes, [y]) for y, t in types.items() if any(_alike(t, x) for x in free.values())}
        for y in sorted(leading, key=lambda y: len(leading[y])):
            read = {name for n in leading[y] for name in reads(nodes[n])}
            twins = (n for n in self.inputs if n in free and n in read and _alike(types[y], free[n]) and n not in pairs)
            if (name := next(twins, None)) is not None:
                pairs[name] = y
        return pairs

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
        while (node := self.makers.get(name)) is not None and is_standard(node, *MOVED, "Gather", "Split"):
            name = node.input[0]
        return name in self.inputs

    def _becomes(self, name: str, more: Sequence[str] = ()) -> list[str]:
        """The outputs of the graph that a value is handed on to."""
        handed = self.behind(name, (*MOVED, "Concat", *more))
        return [value for value, node, _ in handed if node is None and value in self.outputs]

    def _in_a_slot(self, name: str) -> bool:
        return any(i in _PASTS.get(_key(n), {}) for _, n, i in self.behind(name, MOVED) if n is not None)

    def presents(self, pasts: Iterable[str]) -> list[str]:
        """The outputs that hold keys or values."""
        candidates = [n.output[i] for n in self.graph.node for i in _PRESENTS.get(_key(n), ()) if i < len(n.output)]
        candidates += self._first_presents()
        for name in pasts:
            rank = len(self.inputs[name].type.tensor_type.shape.dim)
            for _, axes, node, _ in self._views(name, list(range(rank))):
                if is_standard(node, "Concat") and self._appends(node, len(axes)):
                    candidates.append(node.output[0])
            candidates.append(name)
        presents = {y for name in candidates if name for y in self._becomes(name, ("Slice",))}
        presents.update(self.states.values())
        return [name for name in self.outputs if name in presents]

    def _first_presents(self) -> list[str]:
        """The values behind outputs that are called presents, and operands of products: of a decoder without pasts."""
        presents: list[str] = []
        for name in self.outputs:
            value = name
            while (node := self.makers.get(value)) is not None and is_standard(node, *_SAME):
                value = node.input[0]
            multiplied = any(n is not None and _key(n) in _MULTIPLYING for _, n, _ in self.behind(value, _SPREAD))
            presents += [value] if "present" in name and multiplied else []
        return presents

    def empty(self, pasts: Mapping[str, int | None]) -> None:
        """Take the pasts out of slots and from in front of new keys and values; of states only the former."""
        for name in pasts:
            rank = len(self.inputs[name].type.tensor_type.shape.dim)
            for value, _, node, index in list(self._views(name, list(range(rank)))):
                if index in _PASTS.get(_key(node), {}):
                    node.input[index] = ""
                    assign(node.attribute, [a for a in node.attribute if a.name != _STORED])
                elif is_standard(node, "Concat") and pasts[name] is not None:
                    node.input.remove(value)
                    if len(node.input) == 1:
                        node.op_type = "Identity"
                        del node.attribute[:]
                while node.input and not node.input[-1]:
                    node.input.pop()

    # --- what follows from the tokens ---

    def counts(self, given: Collection[str], pasts: Collection[str]) -> tuple[str, dict[str, str]]:
        """The input that holds the tokens, and the integer inputs that follow from it, with what each is."""
        counts: dict[str, str] = {}
        for name, value in self.inputs.items():
            if value.type.tensor_type.elem_type in _WHOLE and name not in pasts:
                what, rank = self._use_of(name), len(value.type.tensor_type.shape.dim)
                if what and rank in _AXES.get(what, (0, 1)):
                    counts[name] = what
        tokens = self._tokens(counts)
        if tokens is None:
            return "", {}
        ids = self.inputs[tokens].type.tensor_type.shape.dim
        for name, value in self.inputs.items():  # rows as those of the tokens, of another length: a mask of P + T
            dims = value.type.tensor_type.shape.dim
            whole = value.type.tensor_type.elem_type in _WHOLE and len(dims) == 2 and name not in (tokens, *counts)
            if whole and len(ids) > 1 and dims[0] == ids[0] and dims[1] != ids[1]:
                counts[name] = "mask"
        return tokens, {name: what for name, what in counts.items() if name not in given}

    def _use_of(self, name: str) -> str | None:
        reached = [(node, index) for _, node, index in self.behind(name, MOVED) if node is not None]
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
                behind = [n.op_type for _, n, i in self.behind(name, MOVED) if n is not None and (i == 1 or n.domain)]
                rows += [name] if {"Gather", "GatherBlockQuantized"} & set(behind) else []
        rows.sort(key=lambda name: "ids" not in name or "type" in name)
        rows += [name for name, v in self.inputs.items() if "embeds" in name and v.type.tensor_type.elem_type in FLOATS]
        return next(iter(rows), None)


def _alike(a: TypeProto.Tensor, b: TypeProto.Tensor) -> bool:
    """Whether two types are the same, and all their lengths but one, the batch."""
    if a.elem_type != b.elem_type or len(a.shape.dim) != len(b.shape.dim):
        return False
    lengths = [(x.dim_value, y.dim_value) for x, y in zip(a.shape.dim, b.shape.dim, strict=True)]
    return all(x == y or 0 in (x, y) for x, y in lengths) and sum(0 in pair for pair in lengths) <= 1


def _key(node: NodeProto) -> Key:
    return ("" if is_standard(node) else node.domain), node.op_type
