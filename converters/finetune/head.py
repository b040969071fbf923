"""`replace_head`: a new last layer for another number of classes."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.converters.finetune.linear import PACKED_PRODUCTS, Layers, Linear
from onnx_backprop.converters.prepare.load import infer_large, unfolded
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError, require_numbers
from onnx_backprop.opset.core.hints import suggest
from onnx_backprop.opset.graphs.facts import ARITHMETIC
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.walk import attributes_of, called

# what keeps the classes apart along an axis, however many there are
_PASSING = ("AveragePool", "Cast", "Dropout", "Elu", "Flatten", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid")
_PASSING += ("HardSwish", "Identity", "LeakyRelu", "LogSoftmax", "MaxPool", "ReduceMean", "Relu", "Sigmoid", "Softmax")
_PASSING += ("Softplus", "Squeeze", "Tanh", "Transpose", "Unsqueeze")
_LENGTHS = {"Reshape": 1, "Resize": 3}  # the input that may hold the number of classes as a length


class NewHead(NamedTuple):
    """model: with a new head. trainable: its tensors, for `training_graph(…, trainable=…)` or `lora(…, also=…)`."""

    model: ModelProto
    trainable: tuple[str, ...]


def replace_head(model: ModelProto | ir.Model | str | Path, output: str, classes: int, *, seed: int = 0) -> NewHead:
    """The model with a new last layer before `output`, for `classes` outputs.

        head = ob.replace_head("imagenet.onnx", "logits", 5)
        graph = ob.training_graph(head.model, loss="softmax_cross_entropy", trainable=head.trainable, optimizer="adamw")

    The layer is the last Gemm, MatMul, MatMulNBits, MatMulBnb4 or Conv on the way to the output; a bias, activations,
    poolings and changes of shape may follow it. Its weight is uniform in ±1/√K, where each output is a sum over K
    numbers, and its bias zero; both are in floats even if they were quantized. The tensors keep their names if nobody
    else reads them. Shapes behind the layer are inferred anew.

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        output: the graph output whose last layer is replaced.
        classes: the number of outputs of the new layer.
        seed: of the weight.

    Errors: InvalidArgumentError for an unknown output or less than one class; UnsupportedError for another operator on
    the way, or a layer whose weight is computed; InvalidModelError if another reader of the layer needs the old number.
    """
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
        raise InvalidArgumentError(f"classes: expected a whole number of 1 or more, got {classes!r}")
    changed = unfolded(model)
    outputs = [value.name for value in changed.graph.output]
    if output not in outputs:
        raise InvalidArgumentError(f"output: expected a graph output, got {output!r}{suggest(output, outputs)}")
    head = _Head(Layers(changed), output, classes)
    trainable = head.replace(seed)
    behind = {*head.layer.node.output, *(name for node in head.behind for name in node.output)}
    return NewHead(_inferred(changed, behind), tuple(trainable))


class _Head:
    """The last layer before an output, and the nodes between them, the last first."""

    def __init__(self, layers: Layers, output: str, classes: int) -> None:
        self.layers, self.classes = layers, classes
        self.behind: list[NodeProto] = []
        self.layer = self._last(output)
        self.old = self.layer.dims[self.layer.output_axis]

    def _last(self, output: str) -> Linear:
        name = output
        while (node := self.layers.makers.get(name)) is not None:
            layer = self.layers.linear(node)
            if layer is not None:
                return layer
            self.behind.append(node)
            known = not node.domain and (node.op_type in _PASSING or node.op_type in _LENGTHS)
            constants = [n for n, given in enumerate(node.input) if self.layers.stored(given) is not None]
            if node in ARITHMETIC and len(constants) == 1:
                name = node.input[1 - constants[0]]
            elif known:
                name = node.input[0]
            else:
                raise self._refused(
                    node,
                    f"it lies between {output!r} and the last Gemm, MatMul or Conv with a weight of the file; expected "
                    "activations, poolings, a bias and changes of shape. Cut the model before it",
                )
        raise InvalidArgumentError(f"output: no layer with a weight leads to {output!r}, only {name!r}")

    def replace(self, seed: int) -> list[str]:
        """Put new tensors there; their names."""
        layers, layer, node = self.layers, self.layer, self.layer.node
        if node.op_type == "Conv" and self.classes % int(attributes_of(node).get("group", 1)):
            raise self._refused(node, f"its groups do not divide {self.classes} classes. Choose another number")
        dims = list(layer.dims)
        dims[layer.output_axis] = self.classes
        bound = 1 / math.sqrt(math.prod(dims) // self.classes)
        require_numbers(0, whole=True, seed=seed)
        weight = np.random.default_rng(seed).uniform(-bound, bound, dims)
        replaced: dict[int, list[NodeProto]] = {}
        biases = [(node, 2)] if node.op_type in ("Conv", "Gemm") and len(node.input) > 2 and node.input[2] else []
        place = layer.place
        if node.op_type in PACKED_PRODUCTS:
            replaced[id(node)], place = self._in_floats(node), 1
            node, *added = replaced[id(node)]
            biases = [(one, 1) for one in added]
        names = [layers.put([(node, place)], weight.astype(helper.tensor_dtype_to_np_dtype(layer.weight.dtype)))]
        for one in self.behind:
            if one.op_type in _LENGTHS:
                self._length(one, _LENGTHS[one.op_type])
            elif one in ARITHMETIC:
                biases += [(one, n) for n, given in enumerate(one.input) if layers.stored(given) is not None]
        for one, n in biases:
            names += self._bias(one, n)
        layers.finish(replaced)
        return names

    def _in_floats(self, node: NodeProto) -> list[NodeProto]:
        """A MatMulNBits or MatMulBnb4 as a MatMul, and the Add of its bias."""
        y, bias = node.output[0], node.input[5] if len(node.input) > 5 else ""
        product = f"{y}/product" if bias else y
        nodes = [helper.make_node("MatMul", node.input[:2], [product], node.name)]
        return [*nodes, helper.make_node("Add", [product, bias], [y], f"{node.name}/bias")] if bias else nodes

    def _bias(self, node: NodeProto, place: int) -> list[str]:
        """Zeros in the place of a bias; nothing for a single number that goes for all classes."""
        bias = self.layers.stored(node.input[place])
        dims = None if bias is None else list(bias.dims)
        if dims is not None and math.prod(dims) == 1 and (self.old > 1 or not dims):
            return []
        adds = node.op_type in ("Add", "Conv", "Gemm")
        if bias is None or dims is None or math.prod(dims) != self.old or not adds:
            raise self._refused(
                node,
                f"expected a bias of {self.old} numbers, or one number, got {dims or 'a computed one'}. Cut the model",
            )
        axis = dims.index(self.old) if self.old > 1 else len(dims) - 1
        if node.op_type == "Conv":
            axis = 0
        dims[axis] = self.classes
        zeros = np.zeros(dims, helper.tensor_dtype_to_np_dtype(bias.dtype))
        return [self.layers.put([(node, place)], zeros)]

    def _length(self, node: NodeProto, place: int) -> None:
        """The number of classes in a shape that a node is given."""
        tensor = self.layers.tensors.get(node.input[place]) if len(node.input) > place else None
        if tensor is None:
            return
        lengths = numpy_helper.to_array(tensor).copy()
        places = [int(n) for n in np.flatnonzero(lengths == self.old)]
        if not places:
            return
        if places != [max(places[0], 1)]:
            raise self._refused(
                node,
                f"its lengths are {lengths.tolist()}; expected the {self.old} classes in one place behind the first. "
                "Write -1 for the batch",
            )
        lengths[places] = self.classes
        self.layers.put([(node, place)], lengths)

    @staticmethod
    def _refused(node: NodeProto, what: str) -> UnsupportedError:
        return UnsupportedError(what, op_type=node.op_type, node=called(node))


def _inferred(model: ModelProto, changed: set[str]) -> ModelProto:
    """The model with the lengths of what is computed from some values inferred anew; declared symbols stay."""
    changed = changed.union(*(node.output for node in descendants(model.graph.node, changed)))
    del model.graph.value_info[:]
    declared: dict[str, list[str]] = {}
    for value in model.graph.output:
        if value.name in changed and value.type.HasField("tensor_type"):
            declared[value.name] = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
            value.type.tensor_type.ClearField("shape")
    result = infer_large(model)
    for value in result.graph.output:
        dims = value.type.tensor_type.shape.dim
        if len(symbols := declared.get(value.name, [])) == len(dims):
            for dim, symbol in zip(dims, symbols, strict=True):
                if symbol and not dim.HasField("dim_value"):
                    dim.dim_param = symbol
    return result
