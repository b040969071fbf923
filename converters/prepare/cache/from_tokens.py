"""What a decoder reads beside its tokens, where a batch leaves it out: masks, positions, lengths, empty pasts.

Letters of shapes: batch B, length T of the tokens, P of the pasts. Each of these inputs has a default that stands for
"left out": a mask is 1 everywhere then, of the others a number below 0 is replaced.
"""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.edit import insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, used_names
from onnx_backprop.opset.graphs.walk import constant_tensor, is_standard, reads

Inputs = Mapping[str, ValueInfoProto]
Axes = Mapping[str, int | None]


def derive(
    graph: GraphProto, inputs: Inputs, tokens: str, counts: Mapping[str, str], pasts: Axes, *, kept: bool
) -> None:
    """Put in front of the graph what is read in the place of inputs that follow from the tokens, and of empty pasts.

    tokens: the input that says B and T, "" for none. counts: inputs, and what each is. pasts: with the axis of P of
    each, None for a state; kept: whether they are fed.
    """
    live = {name for node in graph.node for name in reads(node)}
    read = [name for name in pasts if name in live and not kept]
    if not counts and not read:
        return
    writer = _Writer(graph, inputs, tokens, pasts, kept=kept)
    masks = [name for name, what in counts.items() if what == "mask"]
    new = {name: writer.derived(name, counts[name]) for name in sorted(counts, key=lambda name: name not in masks)}
    new |= {name: writer.empty(name) for name in read}
    for node in graph.node:
        rename(node, new)
    insert(graph, 0, writer.op.nodes)


class _Writer:
    """Emits what follows from the tokens; an input that a batch leaves out has a default, which says so."""

    def __init__(self, graph: GraphProto, inputs: Inputs, tokens: str, axes: Axes, *, kept: bool) -> None:
        self.graph, self.inputs = graph, inputs
        self.kept, self.axes = kept, axes
        self.op = op = Emitter("decoder", used_names(self.graph))
        if not tokens:
            raise UnsupportedError(
                "the lengths of its empty cache follow from the tokens, and no integer input chooses rows of a table; "
                "expected one of two axes. Name the pasts in `given` and feed them"
            )
        self.tokens = list(self.inputs[tokens].type.tensor_type.shape.dim)
        self.batch, self.length = (op.Shape(tokens, start=axis, end=axis + 1) for axis in (0, 1))
        self.zero, self.one = op.constant([0], np.int64), op.constant([1], np.int64)
        self.past, self.total, self.mask = self.zero, self.length, ""
        growing = [(name, axis) for name, axis in axes.items() if axis is not None]
        for name, axis in growing[:1] if kept else ():
            self.past = op.Shape(name, start=axis, end=axis + 1)
            self.total = op.Add(self.past, self.length)

    def derived(self, name: str, what: str) -> str:
        """What is read in the place of an integer input, which gets a default."""
        op, type_ = self.op, self.inputs[name].type.tensor_type
        rank = len(type_.shape.dim)
        for axis, dim in enumerate(type_.shape.dim):
            if not self.kept and rank == 2 and what in ("mask", "positions"):
                dim.CopyFrom(self.tokens[axis])
            if not dim.HasField("dim_value"):  # 1 in the default: equal symbols are equal lengths to onnxruntime
                dim.dim_param = f"{name}.{axis}"
        shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in type_.shape.dim]
        start = {"mask": 1, "none": 0}.get(what, -1)
        dtype = helper.tensor_dtype_to_np_dtype(type_.elem_type)
        self.graph.initializer.append(numpy_helper.from_array(np.full(shape, start, dtype), name))
        if what == "none":
            return name
        if what == "mask":
            lengths = op.Concat(self.batch, self.total, axis=0)
            result = op.Reshape(op.Expand(name, lengths), lengths)  # of a shape that inference finds
            self.mask = self.mask or op.Cast(result, to=TensorProto.INT64)
            return result
        if what == "positions":
            value = self._positions(rank, fixed=rank == 1 and type_.shape.dim[0].dim_value == 1)
        elif what == "lengths":
            value = self._lengths(rank)
        else:
            value = op.Reshape(self.total, op.constant(shape, np.int64))
        chosen = op.Where(op.Less(name, op.constant(0, dtype.type)), op.Cast(value, to=type_.elem_type), name)
        if what == "positions" and rank == 2:
            return op.Reshape(chosen, op.Concat(self.batch, self.length, axis=0))
        return chosen

    def _positions(self, rank: int, *, fixed: bool) -> str:
        """Those of the tokens that count, one after the other, as transformers has them; P … P + T - 1 without a mask.

        fixed: one number for all rows, which is the first position.
        """
        op = self.op
        if fixed:
            return self.past
        if rank == 1 or not self.mask:
            first, end = (op.Squeeze(x, self.zero) for x in (self.past, self.total))
            numbers = op.Range(first, end, op.constant(1, np.int64))
            return numbers if rank == 1 else op.Expand(numbers, op.Concat(self.batch, self.length, axis=0))
        counted = op.Sub(op.CumSum(self.mask, op.constant(1, np.int64)), self.one)
        counted = op.Where(op.Equal(self.mask, self.zero), self.one, counted)
        return op.Slice(counted, self.past, op.constant([2**62], np.int64), self.one) if self.kept else counted

    def _lengths(self, rank: int) -> str:
        """The last position of each row that counts, as GroupQueryAttention has it: how many count, less one."""
        op = self.op
        counted = op.ReduceSum(self.mask, self.one, keepdims=0) if self.mask else op.Expand(self.total, self.batch)
        last = op.Sub(counted, self.one)
        return last if rank == 1 else op.Unsqueeze(last, self.one)

    def empty(self, name: str) -> str:
        """A past of length 0, for what reads its shape; a state of zeros."""
        type_ = self.inputs[name].type.tensor_type
        lengths: list[str] = []
        for axis, dim in enumerate(type_.shape.dim):
            if axis == self.axes[name]:
                lengths.append(self.zero)
            elif dim.HasField("dim_value"):
                lengths.append(self.op.constant([dim.dim_value], np.int64))
            elif dim == self.tokens[0] or axis == 0:
                lengths.append(self.batch)
            elif self.axes[name] is not None and not self._reads_length(name, axis, len(type_.shape.dim)):
                lengths.append(self.one)
            else:
                raise UnsupportedError(
                    f"the past {name!r} cannot be empty: nodes read the length of its axis {axis}, which is not known. "
                    "Declare it, or name the past in `given` and feed it"
                )
        zero = helper.make_tensor("", type_.elem_type, [1], [0])
        return self.op.ConstantOfShape(self.op.Concat(*lengths, axis=0), value=zero)

    def _reads_length(self, name: str, axis: int, rank: int) -> bool:
        """Whether the graph may read the length of an axis: all but the other entries of the shape."""
        tensors = {t.name: t for t in self.graph.initializer}
        tensors |= {n.output[0]: t for n in self.graph.node if (t := constant_tensor(n)) is not None}
        reading = [node for node in self.graph.node if name in reads(node)]
        shapes = {node.output[0] for node in reading if is_standard(node, "Shape") and not node.attribute}
        if len(shapes) < len(reading):
            return True
        for node in self.graph.node:
            if shapes.isdisjoint(reads(node)):
                continue
            index = tensors.get(node.input[1]) if is_standard(node, "Gather") else None
            if index is None or axis in np.ravel(numpy_helper.to_array(index)) % rank:
                return True
        return False
