"""Parameters that torch's exporters took out of a file because of their first values, put back.

Both keep one of several equal tensors. TorchScript writes an Identity for each of the others, whose output has the
other's name. The optimizer behind `torch.export` also drops a bias of Conv, ConvTranspose and Gemm that is all zeros;
the signature of the program still names each parameter, and the nodes name the modules that they come from. It also
computes what depends on parameters alone, and says from which.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.prepare.exporters.origins import (
    FOLDED,
    NAMED,
    Origin,
    arguments_of,
    is_computed,
    leaf_of,
    module_of,
    operation_of,
    owner,
)
from onnx_backprop.converters.prepare.exporters.torch_metadata import BUFFER, CONSTANT, PARAMETER, signature, tied_names
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import producers, uses
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

_BIASED = ("Conv", "ConvTranspose", "Gemm")
# the names that modules of PyTorch have for inputs of an operator
_PLACES = {
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
    "InstanceNormalization": {1: "weight", 2: "bias"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "RMSNormalization": {1: "weight"},
}
_INDEX = re.compile(r"\d+")
_REPEATED = re.compile(r"(expand|repeat|tile|broadcast_to)(_\d+)*")  # what torch calls what it has repeated
_WEIGHT = re.compile(r"weight(?=[^.]*$)")


def restore(proto: ModelProto, origins_by_name: dict[str, Origin]) -> list[str]:
    """Give equal parameters a tensor each and add biases that are zero, in place; the parameters that are not there.

    origins_by_name: of each initializer; what is new is added to it.
    """
    kinds = {
        entry.target: entry.kind for entry in signature(proto) if entry.kind in (PARAMETER, BUFFER) and entry.target
    }
    present = {origin.name for origin in origins_by_name.values()}.union(
        *(origin.parts for origin in origins_by_name.values())
    )
    present.update(tied_names(proto))
    missing = {name: kind for name, kind in kinds.items() if name not in present}
    if kinds:
        restorer = _Restorer(proto, origins_by_name, missing)
        restorer.separate()
        restorer.add_zero_biases()
    return [name for name, kind in missing.items() if kind == PARAMETER]


def separate_named(
    proto: ModelProto, origins_by_name: dict[str, Origin], large: Mapping[str, TensorProto]
) -> list[tuple[str, str]]:
    """Give tensors that TorchScript merged a tensor each, in place; the name that was kept, and each other.

    Of these are uniform ones, and those of layers that differ by their number alone, which are copies of one layer. Two
    names of other tensors are one parameter, as an embedding and a head.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer} | dict(large)
    outputs = {value.name for value in proto.graph.output}
    pairs: list[tuple[str, str]] = []
    readers: dict[str, tuple[NodeProto, int]] = {}
    for node in proto.graph.node:
        for n, name in enumerate(node.input if node.op_type != "Identity" else ()):
            readers.setdefault(name, (node, n))
    for node in list(proto.graph.node):
        tensor = stored.get(node.input[0]) if is_standard(node, "Identity") else None
        kept = origins_by_name.get(tensor.name, Origin()).kind if tensor is not None else ""
        if tensor is None or kept not in (NAMED, FOLDED) or node.output[0] in outputs or is_stop(node):
            continue
        kind = FOLDED if is_computed(node.output[0]) else kept
        name = node.output[0] if kind == NAMED else _read_as(readers.get(node.output[0]))
        before = tensor.name if kept == NAMED else _read_as(readers.get(tensor.name))
        siblings = name != before and _INDEX.sub("#", name) == _INDEX.sub("#", before)
        if not (siblings or (name != before and _is_uniform(tensor))):
            continue
        new = copied(tensor)
        new.name = node.output[0]
        proto.graph.initializer.append(new)
        proto.graph.node.remove(node)
        origins_by_name[new.name] = Origin(kind, name)
        pairs.append((tensor.name, new.name))
    return pairs + _separate_modules(proto, origins_by_name)


def _separate_modules(proto: ModelProto, origins_by_name: dict[str, Origin]) -> list[tuple[str, str]]:
    """Give the modules a tensor each that read one of equal numbers, which is another's by its name; the pairs.

    A tool that has removed the Identity nodes leaves them so. The names of nodes say which modules they are in.
    """
    pairs: list[tuple[str, str]] = []
    readers, names = uses(proto.graph.node), used_names(proto.graph)
    for tensor in list(proto.graph.initializer):
        origin = origins_by_name.get(tensor.name, Origin())
        if origin.kind != NAMED or len(readers[tensor.name]) < 2 or not _is_uniform(tensor):
            continue
        for node, index in readers[tensor.name]:
            name = _read_elsewhere(node, index, origin.name)
            if name and name not in names:
                new = copied(tensor)
                new.name = name
                names.add(name)
                proto.graph.initializer.append(new)
                origins_by_name[name] = Origin(NAMED, name)
                pairs.append((tensor.name, name))
            if name and (tensor.name, name) in pairs:
                node.input[index] = name
    return pairs


def _read_elsewhere(node: NodeProto, index: int, name: str) -> str:
    """The name of the parameter that a node reads, if it is one of another module than the one that has `name`."""
    module, whole = module_of(node), owner(name)
    if not module or f".{whole}".endswith(f".{module}"):
        return ""
    place = _PLACES.get(node.op_type, {}).get(index, "bias" if index == 2 and is_standard(node, *_BIASED) else "")
    if not place and f".{_INDEX.sub('#', whole)}".endswith(f".{_INDEX.sub('#', module)}"):
        place = name.rpartition(".")[2]  # as of another layer
    return f"{module}.{place}" if place and not place.startswith("running_") else ""


def _read_as(reader: tuple[NodeProto, int] | None) -> str:
    """The name in the module of a tensor of the exporter's, from the first node that reads it; "" if unknown."""
    module = "" if reader is None else module_of(reader[0])
    return f"{module}.{leaf_of(*reader)}" if reader and module else ""


def unfold(proto: ModelProto, origins_by_name: dict[str, Origin], large: dict[str, TensorProto]) -> None:
    """Put the parameter itself in the place of what the exporter computed from it alone, in place.

    A transposed or reshaped copy of a parameter that the file has too becomes its Transpose or Reshape, and what
    repeats a parameter along some axes its Expand. What is one of these or another rearrangement of a parameter that is
    read nowhere else has no parts any more.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer} | large
    names = used_names(proto.graph)
    copies = Counter(
        origin.name for name, origin in origins_by_name.items() if origin.kind == PARAMETER and name in stored
    )
    batches = _batches(proto, stored)
    for name, origin in list(origins_by_name.items()):
        tensor = stored.get(name)
        if tensor is None or origin.kind != PARAMETER or origin.name in ("", name):
            continue
        original, array = stored.get(origin.name), to_array(tensor)
        whole = None if original is None else to_array(original)
        lengths = numpy_helper.from_array(np.array(array.shape, np.int64), unique(f"{name}/lengths", names))
        new = None
        if whole is not None and origin.moved and array.ndim == 2 and np.array_equal(whole.T, array):
            node = helper.make_node("Transpose", [origin.name], [name], f"{name}/tied", perm=[1, 0])
        elif whole is not None and origin.moved and np.array_equal(whole.ravel(), array.ravel()):
            node = helper.make_node("Reshape", [origin.name, lengths.name], [name], f"{name}/tied")
        elif whole is None and origin.parts and origin.moved and (once := _once(array, name, batches)) is not None:
            new = numpy_helper.from_array(once, unique(origin.name, names))
            node = helper.make_node("Expand", [new.name, lengths.name], [name], f"{name}/expanded")
        else:
            alone = whole is None and copies[origin.name] == 1
            if not alone:
                origins_by_name[name] = origin._replace(parts=origin.parts or (origin.name,))
            elif len(origin.parts) == 1 and origin.moved and not _repeats(array):
                origins_by_name[name] = Origin(PARAMETER, origin.name)
            continue
        if node.op_type != "Transpose":
            proto.graph.initializer.append(lengths)
        large.pop(name, None)
        assign(proto.graph.input, [value for value in proto.graph.input if value.name != name])
        assign(proto.graph.initializer, [one for one in proto.graph.initializer if one.name != name])
        if new is not None:
            proto.graph.initializer.append(new)
            origins_by_name[new.name] = Origin(PARAMETER, origin.name, origin.parts if _is_uniform(new) else ())
        del origins_by_name[name]
        proto.graph.node.insert(0, node)


def _batches(proto: ModelProto, stored: Collection[str]) -> set[int]:
    """The lengths above 1 of the first axes of a model's inputs. stored: initializers, which may be inputs too."""
    shapes = [v.type.tensor_type.shape.dim for v in proto.graph.input if v.name not in stored]
    return {shape[0].dim_value for shape in shapes if shape} - {0, 1}


def _once(array: np.ndarray, name: str, batches: Collection[int]) -> np.ndarray | None:
    """What an array repeats along some of its axes; None if it repeats nothing.

    Of equal numbers the name says whether they are repeated: then along the first axis, if that is a batch's.
    """
    if array.size < 2:
        return None
    if (array == array.flat[0]).all():
        repeated = array.ndim > 1 and array.shape[0] in batches and _REPEATED.fullmatch(name)
        return np.ascontiguousarray(array[:1]) if repeated else None
    result = array
    for axis in range(array.ndim):
        first = result.take([0], axis=axis)
        if result.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, result.shape), result):
            result = first
    return None if result is array else np.ascontiguousarray(result)


def _repeats(array: np.ndarray) -> bool:
    """Whether a tensor of several axes has equal numbers, as one that was taken from a table by indices."""
    return sum(length > 1 for length in array.shape) > 1 and len(np.unique(array)) < array.size


class _Restorer:
    """A model, what is known of its initializers, and what its module has that the file has not."""

    def __init__(self, proto: ModelProto, origins_by_name: dict[str, Origin], missing: dict[str, str]) -> None:
        self.graph, self.origins, self.missing = proto.graph, origins_by_name, missing
        self.names = used_names(proto.graph)
        self.targets = {entry.input: entry.target for entry in signature(proto) if entry.target}
        self.producers = producers(self.graph.node)
        self.uses = uses(self.graph.node)

    def separate(self) -> None:
        """A tensor for each parameter or buffer that the exporter merged with an equal one."""
        for tensor in list(self.graph.initializer):
            origin = self.origins.get(tensor.name, Origin())
            if len(self.uses[tensor.name]) < 2 or not origin.name or origin.kind == CONSTANT:
                continue
            uniform = _is_uniform(tensor)
            places: defaultdict[str | None, list[tuple[NodeProto, int]]] = defaultdict(list)
            for node, index in self.uses[tensor.name]:
                places[self._name_at(node, index, tensor.name, uniform=uniform)].append((node, index))
            foreign = places.pop(None, [])
            if foreign and places and uniform:
                self._copy(tensor, f"{tensor.name}/constant", Origin(CONSTANT), foreign)
            folded = bool(origin.parts)  # as 1 + weight: so are the others
            for name, same in places.items():
                if name is not None and name != origin.name:
                    kind = self.missing.pop(name)
                    parts = (name,) if folded else ()
                    self._copy(tensor, tensor.name if folded else name, Origin(kind, name, parts, origin.moved), same)

    def _name_at(self, node: NodeProto, index: int, tensor: str, *, uniform: bool) -> str | None:
        """The name of the tensor that a node of the module reads where it reads `tensor` here; None if it has none.

        uniform: whether the numbers of the tensor are all equal, as those of other tensors of any name may be.
        """
        if node.op_type == "InstanceNormalization" and "group_norm" in operation_of(node):
            return None  # it has a 1 and a 0 for each group; the module's scale and bias, for each channel, come after
        name, arguments = self.origins[tensor].name, arguments_of(node)
        if uniform and self._is_another(node, index, arguments):
            inside = [other for other in self.missing if owner(other) == module_of(node)]
            return inside[0] if len(inside) == 1 else name
        read = [self.targets[argument] for argument in arguments if argument in self.targets]
        if name in read:
            return name
        if len(lost := [other for other in read if other in self.missing]) == 1:
            return lost[0]
        module, place = module_of(node), _PLACES.get(node.op_type, {}).get(index, "")
        for expected in (f"{module}.{place}" if place else "", self._sibling(node, index)):
            if expected == name or expected in self.missing:
                return expected
        if module == owner(name):
            return name
        inside = [other for other in self.missing if owner(other) == module]
        alike = [other for other in inside if other.rpartition(".")[2] == name.rpartition(".")[2]]
        candidates = alike or (inside if uniform else [])
        return candidates[0] if len(candidates) == 1 else None

    def _is_another(self, node: NodeProto, index: int, arguments: Sequence[str]) -> bool:
        """Whether the operation of torch reads another value that it computes where a node reads a tensor twice."""
        if len(arguments) != len(node.input) or node.input[index] not in arguments:
            return False
        return arguments[index] != node.input[index] and arguments[index] not in self.targets

    def _sibling(self, node: NodeProto, index: int) -> str:
        """The name of the bias beside the weight that a product reads."""
        if not is_standard(node):
            return ""
        if node.op_type == "Add":
            product = self.producers.get(node.input[1 - index])
            return "" if product is None or product.op_type != "MatMul" else self._bias_name(product)
        return self._bias_name(node) if index == 2 and node.op_type in _BIASED else ""

    def _bias_name(self, node: NodeProto) -> str:
        weight = self.origins.get(node.input[1], Origin()).name
        return _WEIGHT.sub("bias", weight) if _WEIGHT.search(weight) else ""

    def add_zero_biases(self) -> None:
        """A bias of zeros for each product whose module has one and whose node has none."""
        tensors: Mapping[str, tuple[int, list[int]]] = {
            value.name: (value.type.tensor_type.elem_type, [d.dim_value for d in value.type.tensor_type.shape.dim])
            for value in self.graph.input  # which stand for large initializers
        } | {t.name: (t.data_type, list(t.dims)) for t in self.graph.initializer}
        for node in self.graph.node:
            if not is_standard(node, *_BIASED) or "".join(node.input[2:]):
                continue
            name = self._bias_name(node)
            if name not in self.missing or node.input[1] not in tensors:
                continue
            kind, dims = tensors[node.input[1]]
            attributes = attributes_of(node)
            length = dims[0]
            if node.op_type == "ConvTranspose":
                length = dims[1] * int(attributes.get("group", 1))
            elif node.op_type == "Gemm" and not attributes.get("transB"):
                length = dims[1]
            zeros = np.zeros([length], helper.tensor_dtype_to_np_dtype(kind))
            tensor = numpy_helper.from_array(zeros, unique(name, self.names))
            self.graph.initializer.append(tensor)
            self.origins[tensor.name] = Origin(self.missing.pop(name), name)
            del node.input[2:]
            node.input.append(tensor.name)

    def _copy(self, tensor: TensorProto, name: str, origin: Origin, uses: list[tuple[NodeProto, int]]) -> None:
        new = copied(tensor)
        new.name = unique(name, self.names)
        self.graph.initializer.append(new)
        self.origins[new.name] = origin
        for node, index in uses:
            node.input[index] = new.name


def _is_uniform(tensor: TensorProto) -> bool:
    array = to_array(tensor)
    return bool(array.size and (array == array.flat[0]).all())
