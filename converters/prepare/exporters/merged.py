"""Tensors that TorchScript's exporter or a tool behind it found equal and merged, apart again.

TorchScript keeps one of them and writes an Identity for each of the others, whose output has the other's name. Tools,
as onnxsim and onnxruntime's optimizer, remove the Identity; then the names of the nodes say which modules they are in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.prepare.exporters.origins import (
    BIASED,
    FOLDED,
    NAMED,
    PLACES,
    Origin,
    is_computed,
    is_filled,
    is_operation,
    is_rearranged,
    is_uniform,
    leaf_of,
    module_of,
    normed_by,
    owner,
    paths,
    scope_of,
)
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import producers, uses
from onnx_backprop.opset.graphs.walk import is_standard

_REMOVED = "onnxsim.removed_"  # a model's metadata: values and nodes, 20 of each, as "Mul (/l/Mul), ... (+6 more)"
_MORE, _NODE = re.compile(r"\.\.\. \(\+(\d+) more\)"), re.compile(r"\w+ \(node_(.+)\)")
_NO_PARAMETER = re.compile(r".*/.*|_v_\d+|(.*\.)?(running_mean|running_var|num_batches_tracked)")
_INDEX, _CALL = re.compile(r"\d+"), re.compile(r"_\d+$")
_STEPS = 4  # nodes behind one without a name that are asked for its module
Pairs = list[tuple[str, str]]
_Readers = Mapping[str, Sequence[tuple[NodeProto, int]]]


def separate_named(
    proto: ModelProto, origins_by_name: dict[str, Origin], large: Mapping[str, TensorProto]
) -> tuple[Pairs, Pairs]:
    """Give tensors that were merged a tensor each, in place; the name that was kept, and each other; what stays one.

    Apart are uniform ones, and those of layers that differ by their number alone, which are copies of one layer. Two
    names of other tensors stay one parameter, as an embedding and a head.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer} | dict(large)
    outputs = {value.name for value in proto.graph.output}
    pairs, tied = Pairs(), Pairs()
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
        if not (siblings or (name != before and is_uniform(tensor))):
            tied += [(tensor.name, node.output[0])] if name != before else []
            continue
        new = copied(tensor)
        new.name = node.output[0]
        proto.graph.initializer.append(new)
        proto.graph.node.remove(node)
        origins_by_name[new.name] = Origin(kind, name)
        pairs.append((tensor.name, new.name))
    return pairs + _separate_modules(proto, origins_by_name, stored), tied


def tie_reshaped(proto: ModelProto, origins_by_name: dict[str, Origin], large: dict[str, TensorProto]) -> Pairs:
    """Put a Transpose and a Reshape of a kernel in the place of its copy as a matrix, in place; the names of both.

    TorchScript writes down as numbers the matrix that spectral_norm makes of a kernel and multiplies by a vector. Other
    equal parameters are apart: a module may begin with the identity, or with copies.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer} | large
    names, pairs = used_names(proto.graph), Pairs()
    for node in [node for node in proto.graph.node if is_standard(node, "MatMul")]:
        copy, kernel = stored.get(node.input[0]), stored.get(normed_by(node.input[1]))
        if copy is None or kernel is None or origins_by_name.get(copy.name, Origin()).kind != FOLDED:
            continue
        for axis in range(len(kernel.dims)):
            if not np.array_equal(np.moveaxis(to_array(kernel), axis, 0).ravel(), to_array(copy).ravel()):
                continue
            name, moved = copy.name, unique(f"{copy.name}/moved", names)
            large.pop(name, None)
            del origins_by_name[name]
            assign(proto.graph.input, [value for value in proto.graph.input if value.name != name])
            assign(proto.graph.initializer, [other for other in proto.graph.initializer if other.name != name])
            lengths = numpy_helper.from_array(np.array(copy.dims, np.int64), unique(f"{name}/lengths", names))
            proto.graph.initializer.append(lengths)
            perm = [axis, *(other for other in range(len(kernel.dims)) if other != axis)]
            reshape = helper.make_node("Reshape", [moved, lengths.name], [name], f"{name}/tied")
            transpose = helper.make_node("Transpose", [kernel.name], [moved], f"{moved}/tied", perm=perm)
            assign(proto.graph.node, [transpose, reshape, *proto.graph.node])
            pairs.append((kernel.name, name))
            break
    return pairs


def _read_as(reader: tuple[NodeProto, int] | None) -> str:
    """The name in the module of a tensor of the exporter's, from the first node that reads it; "" if unknown."""
    module = "" if reader is None else module_of(reader[0])
    return f"{module}.{leaf_of(*reader)}" if reader and module else ""


def _separate_modules(
    proto: ModelProto, origins_by_name: dict[str, Origin], stored: Mapping[str, TensorProto]
) -> Pairs:
    """Give the modules a tensor each that read one of another module, by the names of the nodes; the pairs."""
    pairs = Pairs()
    readers, names, makers = uses(proto.graph.node), used_names(proto.graph), producers(proto.graph.node)
    path = paths(proto.graph.node, {name for name, origin in origins_by_name.items() if origin.kind == NAMED})
    for tensor in list(stored.values()):
        origin = origins_by_name.get(tensor.name, Origin())
        if origin.kind not in (NAMED, FOLDED) or len(readers[tensor.name]) < 2:
            continue
        known = origin.name or _beside_bias(*readers[tensor.name][0], origins_by_name)
        scopes = [_scope(node, readers) for node, _ in readers[tensor.name]]
        copies = any(scope and f".{known}.".find(f".{scope}.") >= 0 for scope in scopes)  # whose module reads it too
        uniform = origin.kind == NAMED and is_uniform(tensor)
        modules = [_called(module_of(node), stored) for node, _ in readers[tensor.name]]
        modules = [path.get(module, module) for module in modules]
        # attention itself reads what its part has: /attn/Gemm attn.out_proj.bias
        owners = [module for module in modules if module and f".{owner(known)}".endswith(f".{module}")] or [
            module for module in modules if module and f".{owner(known)}.".find(f".{module}.") >= 0
        ]
        weights = [_weight_of(node, index, makers) if uniform else "" for node, index in readers[tensor.name]]
        separate: dict[str, str] = {}
        for (node, index), scope, module, weight in zip(readers[tensor.name], scopes, modules, weights, strict=True):
            name = _of_copy(known, scope) if copies else ""
            beside = owner(known) and owner(origins_by_name.get(weight, Origin()).name)
            if not name and uniform and not beside and module not in owners:
                name = _of_module(module, node, index)
            if not name and weight:
                name = _beside_weight(known, weight, origins_by_name, first=weight == next(filter(None, weights)))
            if name and name not in separate and (origin.kind == FOLDED or name not in names):
                new = copied(tensor)
                new.name = separate[name] = unique(tensor.name if origin.kind == FOLDED else name, names)
                proto.graph.initializer.append(new)
                origins_by_name[new.name] = Origin(origin.kind, name)
                pairs.append((tensor.name, new.name))
            node.input[index] = separate.get(name, tensor.name)
    return pairs


def _scope(node: NodeProto, readers: _Readers) -> str:
    """The module that a node is in; of one without a name of TorchScript's, what is said of what reads it alone."""
    for _ in range(_STEPS):
        name = next((name for name in (node.name, *node.output) if name.startswith("/")), "")
        after = readers.get(node.output[0], ())
        if name or len(after) != 1:
            return scope_of(name)
        node = after[0][0]
    return ""


def _beside_bias(node: NodeProto, index: int, origins_by_name: Mapping[str, Origin]) -> str:
    """The name of a product's weight, from that of its bias; "" if that is unknown."""
    bias = node.input[2] if is_standard(node, *BIASED) and index == 1 and len(node.input) > 2 else ""
    origin = origins_by_name.get(bias, Origin())
    return f"{owner(origin.name)}.weight" if origin.kind == NAMED and owner(origin.name) else ""


def _weight_of(node: NodeProto, index: int, makers: Mapping[str, NodeProto]) -> str:
    """The weight of the product that a node has a bias for, or adds one to; "" for another node."""
    if is_standard(node, *BIASED):
        return node.input[1] if index == 2 else ""
    product = makers.get(node.input[1 - index]) if is_standard(node, "Add") else None
    return product.input[1] if product is not None and is_standard(product, "MatMul") else ""


def _beside_weight(known: str, weight: str, origins_by_name: Mapping[str, Origin], *, first: bool) -> str:
    """The name of the bias beside a weight, if that is of another module than the bias that stands there; else "".

    first: whether its reader is the first of that bias, whose own it is where no name tells.
    """
    module, origin = owner(known), origins_by_name.get(weight, Origin())
    other = owner(origin.name)
    if other or not module:
        return f"{other}.bias" if module and other != module else ""
    has_weight = origins_by_name.get(f"{module}.weight", Origin()).kind == NAMED  # which another product or norm reads
    return f"{module}.bias/{weight}" if origin.kind and (has_weight or not first) else ""


def _of_copy(name: str, scope: str) -> str:
    """The name of a parameter in the copy of its layer, with other numbers, that a scope is in; "" if it is in none."""
    parts, path = name.split("."), scope.split(".")
    for start in range(len(parts) - len(path)):
        inside = parts[start : start + len(path)]
        if inside == path:
            return ""
        if [_INDEX.sub("#", part) for part in inside] == [_INDEX.sub("#", part) for part in path]:
            return ".".join([*parts[:start], *path, *parts[start + len(path) :]])
    return ""


def _called(module: str, names: Collection[str]) -> str:
    """The module itself, of a further call of one: enc.4 of enc.4_1, if that has tensors and enc.4_1 has none."""
    once = ".".join(_CALL.sub("", part) for part in module.split("."))
    has = [any(f".{name}".find(f".{each}.") >= 0 for name in names) for each in (module, once)]
    return once if has == [False, True] else module


def _of_module(module: str, node: NodeProto, index: int) -> str:
    """The name of the parameter that a node of another module reads; "" if it is unknown."""
    place = PLACES.get(node.op_type, {}).get(index, "bias" if index == 2 and is_standard(node, *BIASED) else "")
    return f"{module}.{place}" if module and place and not place.startswith("running_") else ""


def removed(proto: ModelProto, origins_by_name: Mapping[str, Origin]) -> list[str | int]:
    """The names of the module that onnxsim has removed, by what it says, and the number of values it does not name."""
    stated = {entry.key: entry.value.split(", ") for entry in proto.metadata_props if entry.key.startswith(_REMOVED)}
    values, nodes = stated.get(f"{_REMOVED}values", []), stated.get(f"{_REMOVED}nodes", [])
    if not origins_by_name or not any(values):
        return []
    present = set(origins_by_name) | {origin.name for origin in origins_by_name.values()}
    exported = not any(name.startswith("/") for node in proto.graph.node for name in (node.name, *node.output))
    known = present | {match[1] for match in map(_NODE.fullmatch, nodes) if match}
    names: list[str | int] = [
        name
        for name in values
        if name not in known
        and not (_MORE.fullmatch(name) or _NO_PARAMETER.fullmatch(name) or is_computed(name))
        and not (exported and (is_operation(name) or is_rearranged(name) or is_filled(name)))
        and not (exported and "." not in name and _MORE.fullmatch(nodes[-1]))  # perhaps of a node that is not named
    ]
    return names + [int(match[1]) for match in map(_MORE.fullmatch, values[-1:]) if match]
