"""Parameters that torch's exporters took out of a file because of their first values, put back.

The optimizer behind `torch.export` keeps one of several equal tensors, and drops a bias of Conv, ConvTranspose and Gemm
that is all zeros; the signature of the program still names each parameter, and the nodes name the modules that they
come from. It also computes what depends on parameters alone, and says from which.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.exporters.operands import Operands, orders
from onnx_backprop.converters.prepare.exporters.origins import (
    BIASED,
    FOLDED,
    FROZEN,
    MISSING,
    NAMED,
    PLACES,
    READ_AS,
    UNREAD,
    Origin,
    arguments_of,
    is_filled,
    is_plain,
    is_rearranged,
    is_repeated,
    is_uniform,
    lost_values,
    module_of,
    operation_of,
    owner,
)
from onnx_backprop.converters.prepare.exporters.torch_metadata import (
    BUFFER,
    CONSTANT,
    PARAMETER,
    TIES,
    signature,
    tied_names,
)
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import uses
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

_STEPS = 4  # nodes behind one that says nothing that are asked for its module
# buffers of integers, and statistics that are folded into a convolution
_NEVER_MERGED = re.compile(r"(^|\.)(running_(mean|var)|num_batches_tracked|\w*(ids|index|indices|idx))$")
_WEIGHT = re.compile(r"weight(?=[^.]*$)")


def restore(proto: ModelProto, origins_by_name: dict[str, Origin]) -> dict[str, Sequence[object]]:
    """Give equal parameters a tensor each and add biases that are zero, in place.

    MISSING: the parameters that are not there; UNREAD: the buffers, if operations are not there either, which the
    exporter may have merged with those of a parameter that begins with the same numbers; READ_AS: the parameters of
    which torch computed what equals them, and its name.
    origins_by_name: of each initializer; what is new is added to it.
    """
    guesses: list[tuple[str, str]] = []
    merged = bool(lost_values(proto)) and all(entry.key != TIES for entry in proto.graph.metadata_props)
    kinds = {
        entry.target: entry.kind
        for entry in signature(proto)
        if entry.kind in (PARAMETER, FROZEN, BUFFER) and entry.target
    }
    present = {origin.name for origin in origins_by_name.values()}.union(
        *(origin.parts for origin in origins_by_name.values())
    )
    tied = tied_names(proto)
    missing = {name: kind for name, kind in kinds.items() if name not in present | tied.keys()}
    if kinds:
        tied |= _unread_names(proto, missing)
        missing = {name: kind for name, kind in missing.items() if name not in tied}
        restorer = _Restorer(proto, origins_by_name, missing, tied)
        restorer.separate()
        restorer.add_zero_biases()
        guesses = restorer.transpose()
        for tensor, origin in origins_by_name.items():
            ties = tuple(name for name, kept in tied.items() if kept in (tensor, origin.name))
            origins_by_name[tensor] = origin._replace(ties=ties)
    lost = {kind: [name for name in missing if missing[name] == kind] for kind in (PARAMETER, BUFFER)}
    unread = [name for name in lost[BUFFER] if merged and not _NEVER_MERGED.search(name)]
    return {MISSING: lost[PARAMETER], UNREAD: unread, READ_AS: guesses}


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
        whole = np.array([]) if original is None else to_array(original)
        lengths = numpy_helper.from_array(np.array(array.shape, np.int64), unique(f"{name}/lengths", names))
        new = once = None
        if origin.parts and origin.moved and not (origin.taken and array.ndim < 3):  # whose rows may be equal
            once = _once(array, name, batches)
        if original is not None and origin.moved and array.ndim == 2 and np.array_equal(whole.T, array):
            nodes = [helper.make_node("Transpose", [original.name], [name], f"{name}/tied", perm=[1, 0])]
        elif original is not None and origin.moved and np.array_equal(whole.ravel(), array.ravel()):
            nodes = [helper.make_node("Reshape", [original.name, lengths.name], [name], f"{name}/tied")]
        elif once is not None and original is None:
            new = stored[origin.name] = numpy_helper.from_array(once, unique(origin.name, names))
            nodes = [helper.make_node("Expand", [new.name, lengths.name], [name], f"{name}/expanded")]
        elif once is not None and original is not None and np.array_equal(whole.ravel(), once.ravel()):
            inner = numpy_helper.from_array(np.array(once.shape, np.int64), unique(f"{name}/inner", names))
            proto.graph.initializer.append(inner)
            once_name = unique(f"{name}/once", names)
            nodes = [
                helper.make_node("Reshape", [original.name, inner.name], [once_name], f"{name}/tied"),
                helper.make_node("Expand", [once_name, lengths.name], [name], f"{name}/expanded"),
            ]
        else:
            alone = original is None and copies[origin.name] == 1
            if not alone:
                origins_by_name[name] = origin._replace(parts=origin.parts or (origin.name,))
            elif len(origin.parts) == 1 and origin.moved and not _repeats(array, origin.repeated):
                origins_by_name[name] = origin._replace(parts=())
            continue
        if nodes[0].op_type != "Transpose":
            proto.graph.initializer.append(lengths)
        _drop(proto, name, large)
        if new is not None:
            proto.graph.initializer.append(new)
            origins_by_name[new.name] = origin._replace(parts=origin.parts if is_uniform(new) else ())
        del origins_by_name[name]
        for node in reversed(nodes):
            proto.graph.node.insert(0, node)


def tie_transposed(
    proto: ModelProto, origins_by_name: dict[str, Origin], large: dict[str, TensorProto]
) -> list[tuple[str, str]]:
    """Put an embedding's Transpose in the place of its transposed copy, in place; the names of both.

    A head that has the weight of an embedding reads it transposed, and exporters write that down as numbers.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer} | large
    read = stored.keys() & {node.input[0] for node in proto.graph.node if is_standard(node, "Gather")}
    tables = [stored[name] for name, origin in origins_by_name.items() if origin.kind == NAMED and name in read]
    pairs: list[tuple[str, str]] = []
    for name, origin in list(origins_by_name.items()):
        tensor = stored.get(name)
        if tensor is None or origin.kind != FOLDED or name in read or len(tensor.dims) != 2 or is_plain(tensor):
            continue
        for table in tables:
            if list(table.dims) == [*reversed(tensor.dims)] and table.data_type == tensor.data_type:
                array, whole = to_array(tensor), to_array(table)
                if np.array_equal(whole[:, 0], array[0]) and np.array_equal(whole.T, array):
                    _drop(proto, name, large)
                    del origins_by_name[name]
                    node = helper.make_node("Transpose", [table.name], [name], f"{name}/tied", perm=[1, 0])
                    proto.graph.node.insert(0, node)
                    pairs.append((table.name, name))
                    break
    return pairs


def _unread_names(proto: ModelProto, missing: Mapping[str, str]) -> dict[str, str]:
    """Each name that a tensor of several names is not read by -> the one that torch's program reads it by.

    The module that has the one reads the other, which is of another module and ends as the one does, or which its
    normalisation reads twice, in the place of the one too.
    """
    targets = {entry.input: entry.target for entry in signature(proto) if entry.target}
    nodes = proto.graph.node
    reads = dict.fromkeys((module_of(node), targets[a]) for node in nodes for a in arguments_of(node) if a in targets)
    unread = missing.keys() - {target for _, target in reads}
    names = {
        name: target
        for module, target in reads
        if module and not target.startswith(f"{module}.")
        for name in unread
        if name.startswith(f"{module}.") and target.endswith(name[len(module) :])
    }
    for node in nodes:
        arguments, places = arguments_of(node), PLACES.get(node.op_type, {})
        for index, place in places.items() if len(arguments) == len(node.input) else ():
            name, argument = f"{module_of(node)}.{place}".lstrip("."), "".join(arguments[index : index + 1])
            if name in unread and argument in targets and arguments.count(argument) > 1:
                names[name] = targets[argument]
    return names


def _drop(proto: ModelProto, name: str, large: dict[str, TensorProto]) -> None:
    large.pop(name, None)
    assign(proto.graph.input, [value for value in proto.graph.input if value.name != name])
    assign(proto.graph.initializer, [one for one in proto.graph.initializer if one.name != name])


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
        repeated = array.ndim > 1 and array.shape[0] in batches and is_repeated(name)
        return np.ascontiguousarray(array[:1]) if repeated else None
    result = array
    for axis in range(array.ndim):
        first = result.take([0], axis=axis)
        if result.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, result.shape), result):
            result = first
    return None if result is array else np.ascontiguousarray(result)


def _repeats(array: np.ndarray, named: bool) -> bool:
    """Whether a tensor has equal numbers as one taken from a table by indices. named: by its name; else of two axes."""
    return (named or sum(length > 1 for length in array.shape) > 1) and len(np.unique(array)) < array.size


class _Restorer:
    """A model, what is known of its initializers, and what its module has that the file has not.

    tied: further names of tensors -> the names that those have here.
    """

    def __init__(
        self, proto: ModelProto, origins_by_name: dict[str, Origin], missing: dict[str, str], tied: Mapping[str, str]
    ) -> None:
        self.graph, self.origins, self.missing, self.tied = proto.graph, origins_by_name, missing, tied
        self.names = used_names(proto.graph)
        self.targets = {e.input: tied.get(e.target, e.target) for e in signature(proto) if e.target}
        self.operands = Operands(self.graph, self.targets, origins_by_name)
        self.uses = uses(self.graph.node)

    def separate(self) -> None:
        """A tensor for each parameter or buffer that the exporter merged with an equal one."""
        for tensor in list(self.graph.initializer):
            origin = self.origins.get(tensor.name, Origin())
            if len(self.uses[tensor.name]) < 2 or not origin.name or origin.kind == CONSTANT:
                continue
            uniform = is_uniform(tensor)
            places: defaultdict[str | None, list[tuple[NodeProto, int]]] = defaultdict(list)
            for node, index in self.uses[tensor.name]:
                places[self._name_at(node, index, tensor.name, uniform=uniform)].append((node, index))
            computed, foreign = places.pop("", []), places.pop(None, [])
            if computed:
                self._copy(tensor, f"{tensor.name}/computed", Origin(FOLDED), computed)
            if foreign and places and uniform:
                self._copy(tensor, f"{tensor.name}/constant", Origin(CONSTANT), foreign)
            folded = bool(origin.parts)  # as 1 + weight: so are the others
            for name, same in places.items():
                if name is not None and name != origin.name:
                    kind = self.missing.pop(name)
                    parts = (name,) if folded else ()
                    self._copy(tensor, tensor.name if folded else name, Origin(kind, name, parts, origin.moved), same)

    def transpose(self) -> list[tuple[str, str]]:
        """A Transpose of a parameter where torch read it transposed, and the exporter dropped it: both were equal.

        The parameters of which torch computed what equals them at first, with its name for that.
        """
        readers, guesses = uses(self.graph.node), []
        for tensor in list(self.graph.initializer):
            origin = self.origins.get(tensor.name, Origin())
            if origin.kind not in (PARAMETER, FROZEN) or not (origin.name == tensor.name or origin.moved):
                continue
            readings = [(node, n, self.operands.reading(node, n)) for node, n in readers[tensor.name]]
            sides = [one.transposed for _, _, one in readings if one.transposed is not None]
            stored = False if origin.name == tensor.name else next(iter(sides), False)
            same = orders(to_array(tensor))
            for node, index, (operand, transposed) in readings:
                if transposed is None and same and not is_uniform(tensor):
                    operand = operand or self.operands.lost(node, origin.name)
                if transposed is (not stored) and len(same) == 1:
                    new = unique(f"{tensor.name}/transposed", self.names)
                    self.graph.node.insert(0, helper.make_node("Transpose", [tensor.name], [new], new, perm=same[0]))
                    node.input[index] = new
                if operand and transposed != stored and (same or (transposed is None and not is_rearranged(operand))):
                    guesses.append((origin.name, operand))
        return guesses

    def _name_at(self, node: NodeProto, index: int, tensor: str, *, uniform: bool) -> str | None:
        """The name of the tensor that a node of the module reads where it reads `tensor` here; None if it has none.

        "" is what torch computes there of other tensors.
        uniform: whether the numbers of the tensor are all equal, as those of other tensors of any name may be.
        """
        if node.op_type == "InstanceNormalization" and "group_norm" in operation_of(node):
            return None  # it has a 1 and a 0 for each group; the module's scale and bias, for each channel, come after
        name, arguments = self.origins[tensor].name, arguments_of(node)
        operand = self.operands.computed(node, index) if uniform else ""
        if operand and not is_rearranged(operand):
            return None if is_filled(operand) else ""
        if uniform and self.operands.is_another(node, index):
            inside = [other for other in self.missing if owner(other) == self._module_of(node)]
            return inside[0] if len(inside) == 1 else name
        read = dict.fromkeys(self.targets[argument] for argument in arguments if argument in self.targets)
        operand = self.operands.at(node, index)
        if self.targets.get(operand) in self.missing:
            return self.targets[operand]
        if name in read:
            return name
        lost = [other for other in read if other in self.missing]
        if len(lost) == 1 and not operand:
            return lost[0]
        module, place = self._module_of(node), PLACES.get(node.op_type, {}).get(index, "")
        leaf = name.rpartition(".")[2]
        for expected in (f"{module}.{place}" if place else "", self._sibling(node, index)):
            expected = self.tied.get(expected, expected)
            if expected == name or expected in self.missing:
                return expected
        if module == owner(name) or self.tied.get(f"{module}.{leaf}") == name:
            return name
        inside = [other for other in self.missing if owner(other) == module]
        alike = [other for other in inside if other.rpartition(".")[2] == leaf]
        candidates = alike or (inside if uniform else [])
        return candidates[0] if len(candidates) == 1 else None

    def _module_of(self, node: NodeProto) -> str:
        """The module of a node; of one that the optimizer has made and says nothing of, that of what reads it."""
        for _ in range(_STEPS):
            readers = self.uses[node.output[0]] if node.output and not node.metadata_props else []
            node = readers[0][0] if readers else node
        return module_of(node)

    def _sibling(self, node: NodeProto, index: int) -> str:
        """The name of the bias beside the weight that a product reads."""
        if not is_standard(node):
            return ""
        if node.op_type == "Add":
            product = self.operands.producers.get(node.input[1 - index])
            return "" if product is None or product.op_type != "MatMul" else self._bias_name(product)
        return self._bias_name(node) if index == 2 and node.op_type in BIASED else ""

    def _bias_name(self, node: NodeProto) -> str:
        weight = self.origins.get(node.input[1], Origin()).name
        return _WEIGHT.sub("bias", weight) if _WEIGHT.search(weight) else ""

    def _lost_bias(self, node: NodeProto, lost: Collection[str]) -> str:
        """The name of the bias of a product that has none; "" if the operation of torch has none.

        lost: the names that it may have. Where the file does not say what torch read, it is the one beside the weight,
        except for a copy of a weight that the file has too, as the transposed one that a decoder shares.
        """
        beside = self.tied.get(self._bias_name(node), self._bias_name(node))
        arguments = arguments_of(node)
        if not arguments:
            weight = self.origins.get(node.input[1], Origin()).name
            return "" if weight != node.input[1] and weight in self.origins else beside
        candidates = [self.targets[argument] for argument in arguments if self.targets.get(argument) in lost]
        return beside if beside in candidates else candidates[0] if len(candidates) == 1 else ""

    def add_zero_biases(self) -> None:
        """A bias of zeros for each product whose module has one and whose node has none.

        It is one tensor for all nodes of a module that is called several times, and that which other nodes read.
        """
        tensors: Mapping[str, tuple[int, list[int]]] = {
            value.name: (value.type.tensor_type.elem_type, [d.dim_value for d in value.type.tensor_type.shape.dim])
            for value in self.graph.input  # which stand for large initializers
        } | {t.name: (t.data_type, list(t.dims)) for t in self.graph.initializer}
        biases = {
            origin.name: tensor
            for tensor in self.graph.initializer
            if (origin := self.origins.get(tensor.name, Origin())).kind in (PARAMETER, FROZEN, BUFFER)
            and not origin.parts
            and len(tensor.dims) == 1
            and not to_array(tensor).any()
        }
        lost = self.missing.keys() | biases.keys()
        for node in self.graph.node:
            if not is_standard(node, *BIASED) or "".join(node.input[2:]) or node.input[1] not in tensors:
                continue
            name = self._lost_bias(node, lost)
            kind, dims = tensors[node.input[1]]
            attributes = attributes_of(node)
            length = dims[0]
            if node.op_type == "ConvTranspose":
                length = dims[1] * int(attributes.get("group", 1))
            elif node.op_type == "Gemm" and not attributes.get("transB"):
                length = dims[1]
            if name in self.missing:
                zeros = np.zeros([length], helper.tensor_dtype_to_np_dtype(kind))
                tensor = numpy_helper.from_array(zeros, unique(name, self.names))
                self.graph.initializer.append(tensor)
                self.origins[tensor.name] = Origin(self.missing.pop(name), name)
                biases[name] = tensor
            if name in biases and list(biases[name].dims) == [length]:
                del node.input[2:]
                node.input.append(biases[name].name)

    def _copy(self, tensor: TensorProto, name: str, origin: Origin, uses: list[tuple[NodeProto, int]]) -> None:
        new = copied(tensor)
        new.name = unique(name, self.names)
        self.graph.initializer.append(new)
        self.origins[new.name] = origin
        for node, index in uses:
            node.input[index] = new.name
