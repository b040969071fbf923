"""Running statistics that an exporter merged with weights, or with those of other nodes, as tensors of their own."""

import re
from collections import defaultdict
from collections.abc import Iterable

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backprop.converters.prepare.exporters.origins import scope_of
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import all_nodes, is_standard, subgraphs

STATISTICS = (3, 4)  # BatchNormalization's inputs that hold running statistics
_COPY_OF = "onnx_backprop.copy_of"  # a statistic's metadata: the tensor of the file, which nothing but statistics reads
_FURTHER = re.compile(r"_\d+(?=\.|$)")  # behind the scope of a further call, in TorchScript
_Reader = tuple[int, str, str, str]  # which statistic, the scale and bias beside it, and the module if that tells


def split_statistics(proto: ModelProto) -> None:
    """Give BatchNormalization statistics of their own where an exporter found them equal to weights, or to each other.

    Fresh ones are all zeros and ones, as biases and scales are, and exporters keep one tensor of equal numbers, perhaps
    behind Identity nodes: a derivative by the bias would be one by the mean too, and a step would write the renewed
    mean over it. Other numbers that something else reads as well stay one tensor. Nodes with one scale and one bias are
    one module, and share their statistics, unless these are fresh and the nodes' names are of two. See `rejoin`.
    """
    graph = proto.graph
    identities = {node.output[0]: node for node in graph.node if is_standard(node, "Identity")}
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def source(name: str) -> str:
        while name in identities:
            name = identities[name].input[0]
        return name

    readers: defaultdict[str, set[_Reader | None]] = defaultdict(set)  # None: anything but a statistic
    others = {value.name for value in graph.output}  # values that something else reads
    places: list[tuple[NodeProto, int, str, _Reader]] = []
    for node in graph.node:
        statistics = STATISTICS if is_standard(node, "BatchNormalization") else ()
        for n in (n for n in statistics if n < len(node.input)):
            original = source(node.input[n])
            merged = node.name.startswith("/") and original in stored and _is_fresh(stored[original])
            module = _FURTHER.sub("", scope_of(node.name)) if merged else ""
            reader = (n, source(node.input[1]), source(node.input[2]), module)
            readers[original].add(reader)
            places.append((node, n, original, reader))
        inner = [name for graph in subgraphs(node) for other in all_nodes(graph) for name in other.input]
        if not is_standard(node, "Identity"):
            others.update(inner, (name for n, name in enumerate(node.input) if n not in statistics))
    for name in others:
        readers[source(name)].add(None)
    reserved = used_names(graph)
    copies: dict[tuple[str, _Reader], str] = {}
    calls: dict[tuple[str, int, str, str, str], str] = {}  # of one module: a later one may read what the first hands on
    for node, n, original, reader in places:
        name = node.input[n] = calls.setdefault((original, n, node.input[1], node.input[2], reader[3]), node.input[n])
        tensor = stored.get(original)
        if tensor is None or (name in stored and readers[name] == {reader}):
            continue
        if None in readers[original] and not _is_fresh(tensor):
            continue  # one tensor by intention: its derivative is that through all that reads it
        if (name, reader) not in copies:
            free = name in identities and name not in others
            new = copied(tensor)
            assign(new.metadata_props, ())  # which say what the weight is
            if None not in readers[original]:
                new.metadata_props.add(key=_COPY_OF, value=original)
            new.name = name if free else unique(f"{name}/statistic", reserved)
            if free:
                graph.node.remove(identities.pop(name))
            graph.initializer.append(new)
            stored[new.name] = new
            copies[name, reader] = new.name
        node.input[n] = copies[name, reader]


def rejoin(graph: ir.Graph, wanted: Iterable[ir.Value]) -> None:
    """Let each BatchNormalization in inference mode read a wanted tensor itself in the place of a copy, in place.

    Its derivative is that through all of them. In training mode it is zero, and each renews a tensor of its own.
    """
    originals = {str(value.name): value for value in wanted}
    for copy in list(graph.initializers.values()):
        name = "" if copy.const_value is None else copy.const_value.metadata_props.get(_COPY_OF, "")
        for node, index in tuple(copy.uses()) if name in originals else ():
            training = node.attributes.get("training_mode")
            if training is None or not training.as_int():
                node.replace_input_with(index, originals[name])


def _is_fresh(tensor: TensorProto) -> bool:
    numbers = to_array(tensor)
    return bool((numbers == 0).all() or (numbers == 1).all())
