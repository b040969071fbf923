"""The search of `free`: which constants hold a freed length, and the constants that take their place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.opset.core.errors import UnsupportedError, warn
from onnx_backprop.opset.functions.long_vectors import is_nameless
from onnx_backprop.opset.graphs.edit import copied, insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.scope import Scope
from onnx_backprop.opset.graphs.types import Dims, shapes_of
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, called, is_standard, reads, subgraphs

Edit = Callable[[ModelProto], None]
_TIMES = 101  # a prime, which no length of a model has by chance after a multiplication
_TRIALS = 300  # inferences before a search is given up
_SHAPED = ("ConstantOfShape", "Expand", "Reshape", "Resize", "Tile")  # may hold a length in a sub-graph
_RECURRENT = {"RNN": (4, 5), "GRU": (4, 5), "LSTM": (4, 5, 6)}  # inputs with a batch axis beside X
_AWAY = ("NegativeLogLikelihoodLoss", "NonZero", "Shape", "Size", "SoftmaxCrossEntropyLoss")  # may put the batch away
# the axis that operators work along, by default; where the batch must be for others
_ALONG = {"Hardmax": -1, "LogSoftmax": -1, "LpNormalization": -1, "Softmax": -1, "TopK": -1}
_BEHIND = {"LayerNormalization": -1, "RMSNormalization": -1}  # work along an axis and all behind it
_FIRST = (
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "DepthToSpace",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GroupNormalization",
)
_FIRST += ("InstanceNormalization", "LRN", "LpPool", "MaxPool", "SpaceToDepth")


def with_lengths(proto: ModelProto, lengths: Mapping[tuple[str, int], int | str]) -> ModelProto:
    """A copy with these lengths of inputs, in which nothing is said of what follows from them but types."""
    result = copied(proto)
    for value in result.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            length = lengths.get((value.name, axis))
            if isinstance(length, str):
                dim.dim_param = length
            elif length is not None:
                dim.dim_value = length
    for value in (*result.graph.value_info, *result.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for graph in list(all_graphs(result.graph))[1:]:
        for value in (*graph.value_info, *graph.output):
            value.type.tensor_type.ClearField("shape")
    return result


@dataclass
class Search:
    """The rewriting for one symbol."""

    proto: ModelProto
    symbol: str
    places: list[tuple[str, int]]
    trials: int = 0
    guessed: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)

    def solved(self) -> ModelProto:
        """The model in which every length that follows the freed one does."""
        self.before = shapes_of(self.proto.graph)
        name, axis = self.places[0]
        self.old = int(self.before[name][axis] or 0)
        moved = dict.fromkeys(self.places, self.old * _TIMES)
        result = self._solve(with_lengths(self.proto, moved), set())
        if self.unknown:
            names = ", ".join(map(repr, list(self.unknown)[:4]))
            warn(
                f"conversion does not find the shapes of {names}; whether they follow {self.symbol!r} shows in a run "
                f"alone. Compare a run of several rows with runs of {self.old}",
                argument="free",
            )
        if self.guessed:
            warn(
                f"the place of {self.symbol!r} in the shapes of {', '.join(map(repr, self.guessed))} follows from what "
                f"comes after them alone. Compare a run of several rows with runs of {self.old}",
                argument="free",
            )
        return infer(with_lengths(result, dict.fromkeys(self.places, self.old)))

    def _solve(self, proto: ModelProto, decided: set[str]) -> ModelProto:
        while True:
            self.trials += 1
            look = _Look(self, infer(proto), decided)
            self.unknown.clear()
            choice = look.first()
            if choice is None:
                return proto
            node, edits, guess = choice
            if self.trials > _TRIALS:
                raise look.refusal(node, "there are too many shapes that it may be in")
            first: UnsupportedError | None = None
            for n, edit in enumerate(edits):
                trial = copied(proto) if n < len(edits) - 1 else proto
                edit(trial)
                inner = {*decided, node.output[0]}
                before = dict(self.guessed)
                if guess and n < len(guess) and guess[n]:
                    self.guessed[called(node)] = None
                if len(edits) == 1:
                    decided = inner
                    break
                try:
                    return self._solve(trial, inner)
                except UnsupportedError as e:
                    self.guessed = before
                    first = first or e
            if first is not None:
                raise first


class _Look:
    """What follows the freed length in one inference, and the first node that keeps to the old one."""

    def __init__(self, search: Search, inferred: ModelProto, decided: set[str]) -> None:
        self.search, self.graph, self.decided = search, inferred.graph, decided
        self.before, self.after, self.old = search.before, shapes_of(inferred.graph), search.old
        self.scope = Scope(inferred.graph)
        self.inner: dict[str, int] = {}  # how many elements of its axis lie between two rows of the batch

    def refusal(self, node: NodeProto, why: str) -> UnsupportedError:
        places = ", ".join(f"axis {axis} of {name!r}" for name, axis in self.search.places)
        return UnsupportedError(
            f"it keeps to the length {self.old} of {places}: {why}. Export the model with that axis dynamic",
            op_type=node.op_type,
            node=called(node),
            argument="free",
        )

    def axis(self, name: str) -> int | None:
        """The axis of a value that follows the freed length."""
        before, after = self.before.get(name), self.after.get(name)
        if before is None or after is None or len(before) != len(after):
            return None
        axes = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if _follows(a, b)]
        return axes[0] if len(axes) == 1 else None

    def first(self) -> tuple[NodeProto, list[Edit], list[bool]] | None:
        """The first node that needs another constant, with the edits to try, and which of them are guesses."""
        for name, _ in self.search.places:
            self.inner[name] = 1
        for node in self.graph.node:
            rows = {name: axis for name in reads(node) if (axis := self.axis(name)) is not None}
            if not rows:
                continue
            if any(n.op_type in _SHAPED for graph in subgraphs(node) for n in all_nodes(graph.node)):
                raise self.refusal(node, "there are shapes inside its branches or its body, which are not rewritten")
            needed = self._needed(node, rows)
            if needed is not None:
                return node, *needed
            self._check(node, rows)
            inner = max(self.inner.get(name, 1) for name in rows)
            for output in filter(None, node.output):
                if (axis := self.axis(output)) is not None:
                    self.inner[output] = self._inner(node, output, axis, inner)
        return None

    def _needed(self, node: NodeProto, rows: Mapping[str, int]) -> tuple[list[Edit], list[bool]] | None:
        if node.domain:
            return None
        if node.op_type == "Reshape" and node.input[0] in rows and node.output[0] not in self.decided:
            return self._reshape(node, rows[node.input[0]])
        if node.op_type == "Expand" and node.input[0] in rows and self.axis(node.output[0]) is None:
            return self._expand(node, rows[node.input[0]])
        if node.op_type == "Resize" and node.input[0] in rows and self.axis(node.output[0]) is None:
            return self._resize(node, rows[node.input[0]])
        if node.op_type == "Concat" and self.axis(node.output[0]) is None:
            (axis, *more) = set(rows.values())
            rank = len(self.before[next(iter(rows))])
            others = [n for n, name in enumerate(node.input) if name not in rows]
            if not more and others and helper.get_attribute_value(node.attribute[0]) % rank != axis:
                return [self._widened(node, others, axis)], []
        if node.op_type in _RECURRENT and node.input[0] in rows:
            layout = next((a.i for a in node.attribute if a.name == "layout"), 0)
            for n in _RECURRENT[node.op_type]:
                if n < len(node.input) and node.input[n] and node.input[n] not in rows:
                    return [self._widened(node, [n], 0 if n == 4 or layout else 1)], []
        return None

    def _check(self, node: NodeProto, rows: Mapping[str, int]) -> None:
        """Raise where a node contradicts the length, or puts it away."""
        if self._works_along(node, rows):
            raise self.refusal(node, "it works along that axis, and rows would not stay by themselves")
        kept = False
        for name in filter(None, node.output):
            before, after = self.before.get(name), self.after.get(name)
            if before is None or any(map(is_nameless, before)):
                self.search.unknown[name] = None
            if before is None:
                return  # whose lengths only a run finds
            if after is None:
                raise self.refusal(
                    node, f"with another length its inputs, {self._input_shapes(node)}, do not fit together"
                )
            for a, b in zip(before, after, strict=False):
                if isinstance(a, int) and isinstance(b, int) and b not in (a, a * _TIMES):
                    raise self.refusal(node, f"{a} of the shape of {name!r} neither stays nor follows it")
            if sum(_follows(a, b) for a, b in zip(before, after, strict=False)) > 1:
                raise self.refusal(node, f"two axes of {name!r} follow it, each row would meet every other")
            kept = kept or self.axis(name) is not None or None in after or any(isinstance(d, str) for d in after)
        total = node.op_type.startswith("Reduce") and _product(self.before[node.output[0]]) == 1
        if not kept and not total and not is_standard(node, *_AWAY):
            read = ", ".join(map(repr, rows))
            raise self.refusal(node, f"of {read} it gives the same shape for every length")

    def _works_along(self, node: NodeProto, rows: Mapping[str, int]) -> bool:
        """Whether an operator mixes the rows of its first input."""
        at = rows.get(node.input[0])
        if at is None or node.domain:
            return False
        stated = {a.name: a.i for a in node.attribute}
        rank = len(self.before[node.input[0]])
        if node.op_type in _ALONG:
            return at == stated.get("axis", _ALONG[node.op_type]) % rank
        if node.op_type in _BEHIND:
            return at >= stated.get("axis", _BEHIND[node.op_type]) % rank
        if node.op_type in _RECURRENT:
            return at != 1 - stated.get("layout", 0)
        return node.op_type in _FIRST and at != 0

    def _input_shapes(self, node: NodeProto) -> str:
        return ", ".join(f"{name!r} {list(self.before.get(name, ()))}" for name in node.input if name)

    def _inner(self, node: NodeProto, output: str, axis: int, inner: int) -> int:
        source, target = self.before.get(node.input[0]), self.before.get(output)
        if node.op_type not in ("Flatten", "Reshape") or source is None or target is None:
            return inner
        at = self.axis(node.input[0])
        behind, beyond = _product(source[(at or 0) + 1 :]), _product(target[axis + 1 :])
        return inner if at is None or not behind or not beyond else max(behind * inner // beyond, 1)

    def _reshape(self, node: NodeProto, axis: int) -> tuple[list[Edit], list[bool]] | None:
        """Which entry of a constant shape the batch is in: that whose stride fits the stride of the batch."""
        constant = self.scope.constant(node.input[1])
        if constant is None:
            return None
        shape = [int(n) for n in constant.ravel()]
        source, target = self.before[node.input[0]], self.before.get(node.output[0])
        zeros = not any(a.name == "allowzero" and a.i for a in node.attribute)
        stride, inner = _product(source[axis + 1 :]), self.inner.get(node.input[0], 1)
        if target is None or stride is None or _product(target) is None:
            if axis == 0 and shape[:1] == [source[0]] and zeros and self.axis(node.output[0]) is None:
                return [self._with_shape(node, [0, *shape[1:]])], []
            return None
        stride *= inner
        lengths = [int(d or 0) for d in target]
        candidates: list[tuple[int, int]] = []
        for n, length in enumerate(lengths):
            beyond = prod(lengths[n + 1 :])
            if beyond and stride % beyond == 0 and length % (self.old * (stride // beyond)) == 0:
                candidates.append((n, stride // beyond))
        if not candidates:
            raise self.refusal(node, f"no entry of its shape {shape} can hold another length")
        # alone on its axis, or outermost there; else where and as it was; else as far to the left as it can be
        candidates.sort(key=lambda c: (lengths[c[0]] != self.old * c[1], c != (axis, inner), c[1] != 1, c[0]))
        if self.axis(node.output[0]) == candidates[0][0] and _fits(self.after, node):
            return None
        edits: list[Edit] = []
        for n, _ in candidates:
            pairs = enumerate(zip(shape, lengths, strict=True))
            new = [length if entry == -1 or m == axis else entry for m, (entry, length) in pairs]
            new[n] = 0 if n == axis and lengths[n] == source[axis] and zeros else -1
            edits.append(self._with_shape(node, new))
        certain = [c == (axis, inner) or c[0] == axis == 0 or len(candidates) == 1 for c in candidates]
        guesses = [not one for one in certain]
        return edits, guesses

    def _expand(self, node: NodeProto, axis: int) -> tuple[list[Edit], list[bool]] | None:
        constant = self.scope.constant(node.input[1])
        if constant is None:
            return None
        shape = [int(n) for n in constant.ravel()]
        place = axis - len(self.before[node.input[0]]) + len(shape)
        if place < 0 or shape[place] != self.before[node.input[0]][axis]:
            return None
        return [self._with_shape(node, [*shape[:place], 1, *shape[place + 1 :]])], []

    def _resize(self, node: NodeProto, axis: int) -> tuple[list[Edit], list[bool]] | None:
        """Sizes of all axes, the batch's among them: those of the others."""
        sizes = self.scope.constant(node.input[3]) if len(node.input) > 3 else None
        stated = {a.name: a.s for a in node.attribute}
        stretched = stated.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
        if sizes is None or node.input[1] or "axes" in stated or not stretched:
            return None
        others = [n for n in range(sizes.size) if n != axis]

        def edit(proto: ModelProto) -> None:
            twin = _same(proto, node)
            twin.input[3] = _constant(proto, f"{node.output[0]}/sizes", [int(sizes[n]) for n in others])
            twin.attribute.append(helper.make_attribute("axes", others))

        return [edit], []

    def _with_shape(self, node: NodeProto, shape: list[int]) -> Edit:
        def edit(proto: ModelProto) -> None:
            _same(proto, node).input[1] = _constant(proto, f"{node.output[0]}/shape", shape)

        return edit

    def _widened(self, node: NodeProto, inputs: list[int], axis: int) -> Edit:
        """One row of an input, as many times as there are rows: right where they are all alike."""
        for n in inputs:
            shape, array = self.before.get(node.input[n]), self.scope.constant(node.input[n])
            if shape is None or len(shape) <= axis or shape[axis] != self.old:
                raise self.refusal(node, f"its input {node.input[n]!r} has the shape {list(shape or ())}")
            alike = self.old == 1 or (array is not None and bool((array == array.take([0], axis)).all()))
            if not alike:
                raise self.refusal(node, f"its input {node.input[n]!r} holds another row for each of {self.old}")

        def edit(proto: ModelProto) -> None:
            graph, twin = proto.graph, _same(proto, node)
            op = Emitter(twin.output[0], used_names(graph))
            place = list(graph.node).index(twin)
            name, at = self.search.places[0]
            rows = op.Shape(name, start=at, end=at + 1)
            for n in inputs:
                shape = [1 if isinstance(d, str) or d is None else d for d in self.before[node.input[n]]]
                value = op.Gather(node.input[n], op.constant([0]), axis=axis) if self.old > 1 else node.input[n]
                first, last = (op.constant(lengths, np.int64) for lengths in (shape[:axis], shape[axis + 1 :]))
                twin.input[n] = op.Expand(value, op.Concat(first, rows, last, axis=0))
                self.before[twin.input[n]] = self.before[node.input[n]]
            for added in op.nodes:
                self.before.setdefault(added.output[0], ())  # nothing is to be checked
            insert(graph, place, op.nodes)

        return edit


def _follows(before: int | str | None, after: int | str | None) -> bool:
    return isinstance(before, int) and isinstance(after, int) and before > 0 and after == before * _TIMES


def _product(shape: Dims) -> int | None:
    numbers = [d for d in shape if isinstance(d, int)]
    return prod(numbers) if len(numbers) == len(shape) else None


def _fits(shapes: Mapping[str, Dims], node: NodeProto) -> bool:
    """Whether a Reshape keeps the number of elements."""
    return _product(shapes[node.input[0]]) == _product(shapes[node.output[0]])


def _same(proto: ModelProto, node: NodeProto) -> NodeProto:
    """The node of a model that makes what another one does in a copy."""
    return next(one for one in proto.graph.node if one.output[0] == node.output[0])


def _constant(proto: ModelProto, name: str, numbers: list[int]) -> str:
    name = unique(name, used_names(proto.graph))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    return name
