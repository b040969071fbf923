"""Attention between products, forward and backward, as AttentionForwardTraining and AttentionBackward.

    Y = softmax(scale · Q·Kᵀ + mask) · V   and its gradients by Q, Kᵀ and V

The kernels of these compute scores in blocks: no matrix of probabilities is written, or kept for the backward pass.
What is recognised is what gradient rules emit, node by node, so that nothing changes but who computes it. A guard that
puts 0 in the place of NaN, for queries that see no key, does what the operator does anyway. Left alone: ranks other
than 4; probabilities that anything else reads, as Dropout does; a mask that has a gradient itself; masks that put any
other number than -inf in the place of a score; heads of the keys that are spread behind the product.

A mask of constants that hides from each query the keys behind it, and nothing else, as exporters of static lengths
write it, is not read: the operators are causal instead.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.functions.use_kernels import MIN_BODY_OPSET
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import ancestors, consumers, producers
from onnx_backprop.opset.graphs.types import shapes_of
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, attributes_of, constant_tensor, is_standard

PAIR = ("AttentionForwardTraining", "AttentionBackward")
_TURNED = [0, 1, 3, 2]
_BIAS = {"AttentionForwardTraining": 3, "AttentionBackward": 6}  # which input it is
_OF_MASKS = "And", "Cast", "Constant", "Expand", "Not", "Or", "Trilu", "Unsqueeze", "Where"
_HIDDEN = -1e38  # and below: what the kernels take for -inf
_LEAST = 64  # keys, where their number is known: of fewer, products take less time (17 % at 16 keys, 1 % at 32)


class _Mask(NamedTuple):
    """A step from scores to what softmax reads: a tensor that is added, or where -inf takes the place of scores."""

    name: str
    where: bool
    hidden: bool  # the value of the condition there


class _Match(NamedTuple):
    """What is replaced: values by their names, "" for gradients that nobody asks for."""

    query: str
    key: str  # turned
    value: str
    out: str
    diff_out: str
    diff_query: str
    diff_key: str
    diff_value: str
    scale: float
    masks: list[_Mask]


def fuse_attention(model: ModelProto) -> ModelProto:
    """Put the pair of operators in the place of what computes the same, in a training graph; returns the model."""
    if any(o.domain in DEFAULT_DOMAINS and o.version < MIN_BODY_OPSET for o in model.opset_import):
        return model
    graph = _Graph(model)
    matches = [match for node in model.graph.node if (match := graph.match(node))]
    for match in matches:
        graph.replace(match)
    shared = [graph.share(node) for node in model.graph.node if is_standard(node, "Attention")]
    if any([graph.tell_causal(), matches, *shared]):
        alive = ancestors(graph.nodes, graph.outputs)
        assign(model.graph.node, [copied(graph.nodes[n]) for n in alive])
    return model


class _Graph:
    """The main graph: who makes and who reads each value."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.opsets = model.opset_import
        self.nodes = list(graph.node)
        self.outputs = {value.name for value in graph.output}
        self.makers = producers(self.nodes)
        self.readers = consumers(self.nodes)
        self.shapes: dict[str, Dims] = shapes_of(graph)
        inputs = {value.name for value in graph.input}
        self.numbers = {t.name: t for t in graph.initializer if t.name not in inputs}
        self.taken = used_names(graph)

    def match(self, node: NodeProto) -> _Match | None:
        """What a SoftMaxBackward is part of, None where it is not attention as it is known here."""
        if (node.domain, node.op_type) != (DOMAIN, "SoftMaxBackward"):
            return None
        softmax = self.makers.get(node.input[1])
        p, dp = self._guarded(node.input[1], node.input[0]) or (node.input[1], node.input[0])
        product = self.makers.get(dp)
        last = {attributes_of(n).get("axis", default) for n, default in ((node, 1), (softmax, -1)) if n}
        if not (softmax and product and is_standard(softmax, "Softmax") and is_standard(product, "MatMul")):
            return None
        if not last <= {-1, 3} or len(self.shapes.get(softmax.output[0], ())) != 4:
            return None
        readers = [n for n in self.readers[p] if n is not node]
        forward = [n for n in readers if is_standard(n, "MatMul") and n.input[0] == p]
        turned = [n for n in readers if self._turns(n)]
        if len(forward) != 1 or len(turned) > 1 or len(readers) != 1 + len(turned) or p in self.outputs:
            return None
        value, diff = forward[0].input[1], product.input[0]
        if not self._is_turned(product.input[1], value) or dp in self.outputs or len(self.readers[dp]) != 1:
            return None
        diff_value = ""
        if turned:
            behind = self.readers[turned[0].output[0]]
            if len(behind) != 1 or not is_standard(behind[0], "MatMul") or behind[0].input[1] != diff:
                return None
            diff_value = behind[0].output[0]
        core = self._scores(softmax.input[0], node.output[0])
        if core is None:
            return None
        query, key, diff_query, diff_key, scale, masks = core
        if not np.float32(scale):  # which the attribute takes for its default
            return None
        same = [self.shapes.get(name, ()) for name in (query, key, value)]
        keys = same[1][-1] if len(same[1]) == 4 else None
        if any(len(dims) != 4 for dims in same) or (isinstance(keys, int) and keys < _LEAST) or not self._fit(*same):
            return None
        return _Match(
            query, key, value, forward[0].output[0], diff, diff_query, diff_key, diff_value, scale, masks
        )  # fmt: skip

    def _guarded(self, p: str, dp: str) -> tuple[str, str] | None:
        """Where(IsNaN(p), 0, p), and what makes dp of its gradient, as torch's exporter has it; None without it.

        It is for queries that see no key, of which the operator makes 0 itself.
        """
        back = self.makers.get(dp)
        test = self.makers.get(back.input[0]) if back is not None and is_standard(back, "Where") else None
        if back is None or test is None or not is_standard(test, "IsNaN") or test.input[0] != p:
            return None
        guards = [n for n in self.readers[test.output[0]] if n is not back]
        if len(guards) != 1 or not is_standard(guards[0], "Where") or guards[0].input[2] != p:
            return None
        if len(self.readers[p]) != 3 or len(self.readers[dp]) != 1 or not self.outputs.isdisjoint((p, dp)):
            return None
        zeros = all(self._value(n.input[1]) == 0 for n in (guards[0], back))
        return (guards[0].output[0], back.input[2]) if zeros and test.output[0] not in self.outputs else None

    def _fit(self, query: Dims, key: Dims, value: Dims) -> bool:
        """Whether batches and heads are known to agree: products spread lengths of 1, and attention refuses that."""
        return all(None is not d and d == key[n] == value[n] for n, d in enumerate(query[:2]))

    def _scores(self, x: str, dx: str) -> tuple[str, str, str, str, float, list[_Mask]] | None:
        """From what softmax reads, and its gradient, to the product that they come from."""
        scale, masks, count = 1.0, list[_Mask](), 1  # how many nodes may read x
        while (node := self.makers.get(x)) is not None:
            following = self.readers[dx]
            if not following or len(self.readers[x]) != count or not self.outputs.isdisjoint((x, dx)):
                return None
            count = 1
            if self._rounded(node):
                x, count = node.input[0], 2
            elif is_standard(node, "MatMul"):
                return self._product(node, dx, scale, masks)
            elif is_standard(node, "Mul", "Div") and (number := self._number(node)):
                back, (x, factor) = following[0], number
                same = len(following) == 1 and is_standard(back, node.op_type) and self._number(back) == (dx, factor)
                if not same or not factor:
                    return None
                scale, dx = scale * factor, back.output[0]
            elif is_standard(node, "Add", "Where") and scale == 1.0 and (step := self._mask(node, dx, following)):
                mask, x, dx = step
                masks.append(mask)
            else:
                return None
        return None

    def _product(
        self, node: NodeProto, ds: str, scale: float, masks: list[_Mask]
    ) -> tuple[str, str, str, str, float, list[_Mask]] | None:
        """The product of queries and keys, and those that make their gradients."""
        query, key = node.input
        diff_query = diff_key = ""
        for back in self.readers[ds]:
            if not is_standard(back, "MatMul"):
                return None
            if back.input[0] == ds and self._is_turned(back.input[1], key) and not diff_query:
                diff_query = back.output[0]
            elif back.input[1] == ds and self._is_turned(back.input[0], query) and not diff_key:
                diff_key = back.output[0]
            else:
                return None
        return (query, key, diff_query, diff_key, scale, masks) if diff_query or diff_key else None

    def _mask(self, node: NodeProto, dx: str, following: list[NodeProto]) -> tuple[_Mask, str, str] | None:
        """A step and the values before it; None for one that is not known."""
        if node.op_type == "Add":
            paths = [n for n, name in enumerate(node.input) if self._leads_to_product(name)]
            if len(paths) != 1:
                return None
            x, mask = node.input[paths[0]], node.input[1 - paths[0]]
            known, whole = self.shapes.get(mask), self.shapes.get(node.output[0])
            if known is None or whole is None or self.shapes.get(x) != whole or None in whole:
                return None
            return _Mask(mask, where=False, hidden=False), x, dx
        condition, yes, no = node.input
        (back,) = following if len(following) == 1 else (None,)
        if back is None or not is_standard(back, "Where") or back.input[0] != condition:
            return None
        for hidden, number, x, flows in ((True, yes, no, 2), (False, no, yes, 1)):
            if self._value(number) == -np.inf and back.input[flows] == dx and self._value(back.input[3 - flows]) == 0:
                whole = self.shapes.get(node.output[0])
                if self.shapes.get(condition) is None or whole is None or self.shapes.get(x) != whole or None in whole:
                    return None
                return _Mask(condition, where=True, hidden=hidden), x, back.output[0]
        return None

    def _leads_to_product(self, name: str) -> bool:
        """Whether a value is a product, scaled, masked or neither."""
        for _ in range(16):
            node = self.makers.get(name)
            if node is None:
                return False
            if is_standard(node, "MatMul"):
                return True
            if self._rounded(node):
                name = node.input[0]
            elif is_standard(node, "Mul", "Div") and (number := self._number(node)):
                name = number[0]
            elif is_standard(node, "Add", "Where"):
                return any(self._leads_to_product(part) for part in node.input[-2:])
            else:
                return False
        return False

    def _rounded(self, node: NodeProto) -> bool:
        """Whether it is Reshape(x, Shape(x)), put where shapes are taken early; the shape is read here alone."""
        shape = self.makers.get(node.input[1]) if is_standard(node, "Reshape") else None
        if shape is None or not is_standard(shape, "Shape") or shape.attribute:
            return False
        return len(self.readers[shape.output[0]]) == 1 and shape.input[0] == node.input[0]

    def _value(self, name: str) -> float | None:
        """The one number that a constant holds."""
        maker = self.makers.get(name)
        tensor = self.numbers.get(name) if maker is None else constant_tensor(maker)
        if tensor is None or prod(tensor.dims) != 1 or len(tensor.dims) > 4:
            return None
        return float(numpy_helper.to_array(tensor).reshape(()))

    def _number(self, node: NodeProto) -> tuple[str, float] | None:
        """(x, c) of c·x; None where no factor is a constant."""
        left, right = (self._value(name) for name in node.input)
        if node.op_type == "Div":
            return None if right in (None, 0.0) else (node.input[0], 1 / right)
        return (node.input[0], right) if right is not None else None if left is None else (node.input[1], left)

    def _turns(self, node: NodeProto) -> bool:
        return is_standard(node, "Transpose") and attributes_of(node).get("perm") == _TURNED

    def _is_turned(self, name: str, source: str) -> bool:
        node = self.makers.get(name)
        return node is not None and self._turns(node) and node.input[0] == source

    def replace(self, m: _Match) -> None:
        """Put the two nodes where the last product of the forward pass and the first gradient were."""
        inside, behind = Emitter(m.out, self.taken), Emitter(m.diff_query or m.diff_key, self.taken)
        key, bias = inside.Transpose(m.key, perm=_TURNED), self._bias(inside, m.masks)
        logarithm = unique(f"{m.out}/log_sum_exp", self.taken)
        attributes = {"scale": m.scale, "domain": DOMAIN}
        inside.emit(PAIR[0], [m.query, key, m.value, bias], attributes)
        inside.nodes[-1].output[:] = m.out, logarithm
        given = [m.diff_out, m.query, key, m.value, m.out, logarithm, bias]
        (diff_query,) = behind.emit(PAIR[1], given, attributes)
        outputs = [m.diff_query or diff_query]
        if m.diff_key or m.diff_value:
            outputs.append(unique(f"{diff_query}/key", self.taken) if m.diff_key else "")
        outputs += [m.diff_value] if m.diff_value else []
        behind.nodes[-1].output[:] = outputs
        if m.diff_key:
            behind.Transpose(outputs[1], perm=_TURNED)
            behind.nodes[-1].output[:] = [m.diff_key]
        self._put(inside.nodes, [m.out])
        self._put(behind.nodes, [name for name in (m.diff_query, m.diff_key, m.diff_value) if name])

    def tell_causal(self) -> bool:
        """Exchange masks for `is_causal` where they say just that; whether any did."""
        exchanged, known = False, dict[str, bool]()
        for node in self.nodes:
            at = _BIAS.get(node.op_type, 0) if node.domain == DOMAIN else 0
            if not at or not any(node.input[at : at + 1]) or any([*node.input[at + 1 :], *node.output[3:]]):
                continue
            if attributes_of(node).get("is_causal"):
                continue
            name = node.input[at]
            if name not in known:
                known[name] = self._is_causal_mask(name)
            if known[name]:
                exchanged = True
                del node.input[at:]
                causal = next((a for a in node.attribute if a.name == "is_causal"), None) or node.attribute.add()
                causal.CopyFrom(helper.make_attribute("is_causal", 1))
        return exchanged

    def _is_causal_mask(self, name: str) -> bool:
        """Whether a mask is computed from constants, is 0 up to the diagonal of a square, and hides all above it."""
        nodes = [self.nodes[n] for n in ancestors(self.nodes, [name])]
        outputs = {output for node in nodes for output in node.output}
        read = {name, *(given for node in nodes for given in node.input)} - outputs
        if not (read <= self.numbers.keys() and all(is_standard(node, *_OF_MASKS) for node in nodes)):
            return False
        tensors = [numpy_helper.from_array(to_array(self.numbers[given]), given) for given in read]
        graph = helper.make_graph(
            nodes or [helper.make_node("Identity", [name], ["mask"])], "mask", [],
            [helper.make_empty_tensor_value_info(name if nodes else "mask")], tensors,
        )  # fmt: skip
        from onnx.reference import ReferenceEvaluator

        evaluator: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=self.opsets))
        mask = evaluator.run(None, {})[0]
        length = mask.shape[-1] if mask.ndim == 4 else 0
        if mask.dtype != np.float32 or length < 2 or mask.shape[-2] != length:
            return False
        seen = np.tri(length, dtype=bool)
        return not mask[..., seen].any() and bool((mask[..., ~seen] <= _HIDDEN).all())

    def share(self, node: NodeProto) -> bool:
        """Whether an Attention, of which the gradient computes the forward pass again, became that one, moved there."""
        numbers = {"is_causal": 0, "scale": 0.0} | attributes_of(node)
        again = next((n for n in self.nodes if n.op_type == PAIR[0] and self._is_again(n, node, numbers)), None)
        if again is None or any(node.output[1:]):
            return False
        moved = set(ancestors(self.nodes, again.output))
        at = next(n for n, other in enumerate(self.nodes) if other is node)
        if at in moved:
            return False
        op = Emitter(node.output[0], self.taken)
        if again.input[0] == node.input[0]:
            op.Identity(again.output[0])
        else:
            op.Reshape(op.Transpose(again.output[0], perm=[0, 2, 1, 3]), op.constant(np.array([0, 0, -1])))
        op.nodes[-1].output[:] = node.output[:1]
        behind = [n for n in range(at + 1, len(self.nodes)) if n not in moved]
        earlier = [self.nodes[n] for n in sorted(moved) if n > at]
        self.nodes = [*self.nodes[:at], *earlier, *op.nodes, *(self.nodes[n] for n in behind)]
        return True

    def _is_again(self, again: NodeProto, node: NodeProto, numbers: dict[str, Any]) -> bool:
        attributes = attributes_of(again)
        if any(attributes.get(name, 0) != numbers[name] for name in ("is_causal", "scale")):
            return False
        given, mine = [*node.input[:4], ""], [self._root(name, node) for name in again.input[:4]]
        return mine == given[: len(mine)] and (len(mine) == 4) == bool(given[3])

    def _root(self, name: str, reader: NodeProto) -> str:
        """What the node reads of which a value is another form: by heads, or as numbers that are added."""
        forms = "Transpose", "Reshape", "Unsqueeze", "Where"
        while name not in reader.input and (node := self.makers.get(name)) is not None and is_standard(node, *forms):
            name = node.input[0]
        return name

    def _bias(self, op: Emitter, masks: list[_Mask]) -> str:
        """What is added to the scores, of rank 4; "" for nothing."""
        bias, rank = "", 0
        for mask in reversed(masks):
            mask_rank = len(self.shapes[mask.name])
            if mask.where:
                never, before = op.constant(np.float32(-np.inf)), bias or op.constant(np.float32(0))
                bias = op.Where(mask.name, *((never, before) if mask.hidden else (before, never)))
            else:
                bias = op.Add(bias, mask.name) if bias else mask.name
            rank = max(rank, mask_rank)
        return op.Unsqueeze(bias, op.constant(np.arange(4 - rank))) if bias and rank < 4 else bias

    def _put(self, nodes: list[NodeProto], instead: list[str]) -> None:
        """Nodes at the place of the first of those that made the values `instead`, which go."""
        gone = {id(self.makers[name]) for name in instead}
        at = next(n for n, node in enumerate(self.nodes) if id(node) in gone)
        self.nodes[at:at] = nodes
        self.nodes = [node for node in self.nodes if id(node) not in gone]
