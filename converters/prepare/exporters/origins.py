"""Where each tensor of a file comes from: a parameter, a buffer or a constant of a module, and its name there.

`torch.onnx.export(dynamo=True)` says it in metadata. TorchScript files say a part of it in names: what keeps a name of
the module is a parameter or a buffer, a Constant is a constant, and the rest was computed by the exporter. Other files
say nothing.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backprop.converters.prepare.exporters.torch_metadata import (
    BUFFER,
    CONSTANT,
    FROZEN,
    KIND,
    PARAMETER,
    REQUIRES_GRAD,
    signature,
)
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.order import uses
from onnx_backprop.opset.graphs.walk import is_standard

NAMED = "NAMED"  # a parameter or a buffer: the file has its name in the module, and does not say which it is
FOLDED = "FOLDED"  # computed by the exporter, of parameters, buffers or constants
# a tensor's metadata
_ORIGIN, _MODULE, _PARTS, _TIES = (f"onnx_backprop.{key}" for key in ("kind", "module", "folded_from", "names_of_ties"))
MISSING = "onnx_backprop.missing"  # a graph's metadata: the parameters of the module that the file has not
DETACHED = "onnx_backprop.detached"  # a graph's metadata: nodes behind a detach() that is not in the file
NO_GRAD = "onnx_backprop.no_grad"  # a graph's metadata: values that the module computes under torch.no_grad
BLOCKS = "onnx_backprop.blocks"  # a graph's metadata: values of blocks that may be under torch.no_grad or autocast
MERGED = "onnx_backprop.merged"  # a graph's metadata: values of NO_GRAD, each with a reader that it passes gradients
REMOVED = "onnx_backprop.removed"  # a graph's metadata: what a tool says it has removed, and how much it does not name
READ_AS = "onnx_backprop.read_as"  # a graph's metadata: parameters, each with torch's name for what equals it at first
SEPARATED = "onnx_backprop.separated"  # a graph's metadata: pairs of equal parameters that the file had as one tensor
UNREAD = "onnx_backprop.unread"  # a graph's metadata: buffers that the file has not, and that may have been read
TIED = "onnx_backprop.tied"  # a graph's metadata: pairs of names that are one tensor of the file and stay one
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"  # a value's metadata: what torch's optimizer computed it from
FX = "pkg.torch.onnx.fx_node"  # a node's metadata: the operation of torch that it comes from, with its arguments
_ARGUMENTS, _VALUES = re.compile(r"\(args = \((.*)\), kwargs = "), re.compile(r"%(\w+)")
_NUMBER = re.compile(r"_\d+$")
_OPERATION = re.compile(r"\[target=([\w.]+)\]\(args = ")
_SCOPES = "pkg.torch.onnx.name_scopes"  # a node's metadata: the modules that it comes from, then its own name
_LITERAL = re.compile(r"_inlfunc_.*|(.*/)?Constant(_\d+)?(_output_\d+)?")
_COMPUTED = re.compile(r"onnx::\w+_\d+|val_\d+|.*_output_\d+|\d+")
# what torch calls what it gets by moving numbers alone; val_12 is a step inside an operator, as a product's transpose
_REARRANGED = re.compile(
    r"(val|t|transpose|permute|view|unsafe_view|reshape|flatten|unsqueeze|squeeze|expand|clone|slice|select|split"
    r"|unbind|chunk|embedding|index|index_select|narrow|repeat|tile|alias|contiguous|lift_fresh_copy)(_\d+)*"
)
_STEP = re.compile(r"val(_\d+)*")
# the operations that move the numbers of what they read before they compute; another, as sdpa or sub, may scale them
_MOVES_FIRST = re.compile(
    r"linear|matmul|mm|bmm|mv|bilinear|einsum|tensordot|\w*conv\w*|prelu|\w*(group|instance|layer)_norm|lstm|gru|rnn_\w+"
    r"|embedding\w*|index\w*|gather"
)
_FILLED = re.compile(
    r"(new_)?(ones|zeros|full|scalar_tensor|eye|fill)(_like)?(_default)?(_\d+)*"
)  # of one number, or of two
_OPERATIONS = re.compile(  # what it calls what it computes otherwise
    r"(abs|add|bmm|cat|clamp(_max|_min)?|cos|cumsum|div|einsum|exp|expm1|flip|gelu|linalg_\w+|linear|log|log1p|log_softmax"
    r"|masked_fill|matmul|maximum|mean|minimum|mm|mul|neg|norm|pow|reciprocal|relu|roll|rsqrt|rsub|sigmoid|sign|silu|sin"
    r"|softmax|softplus|sqrt|square|stack|std|sub|sum|tanh|tril|triu|var|where)(_\d+)*"
)
_EMBEDDING, _TAKEN = re.compile(r"embedding(_\d+)*"), re.compile(r"(embedding|index|index_select|gather)(_\d+)*")
_REPEATED = re.compile(r"(expand|repeat|tile|broadcast_to)(_\d+)*")  # what torch calls what it has repeated
_POSITIONS = re.compile(r"(arange|add|sub)(_\d+)*")  # what torch computes the positions with that an embedding looks up
_INDEX = re.compile(
    r"(ids|index|indices|idx)$"
)  # names of buffers of integers: what is taken by them is no other number
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
NOTHING: Mapping[str, Sequence[Any]] = {}
_OUTPUT = re.compile(r"/.*_output_\d+")
BIASED = ("Conv", "ConvTranspose", "Gemm")
# the names that modules of PyTorch have for inputs of an operator
PLACES = {
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
    "InstanceNormalization": {1: "weight", 2: "bias"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "RMSNormalization": {1: "weight"},
}
_SLIMMED = re.compile(r"(/.*_output_\d+)_weight")  # how onnxslim calls the weight of a product
# vectors of spectral_norm, the newer and the older one
_ITERATED = re.compile(r"(?:(.+\.parametrizations\.\w+\.)\d+\._|(.+_))[uv]")
_LEAVES = {1: "weight", 2: "bias"}  # of products and normalisations, by the input


class Origin(NamedTuple):
    """What a file says of a tensor.

    kind: PARAMETER, BUFFER, CONSTANT_TENSOR, FROZEN, NAMED, FOLDED, or "" if it says nothing.
    name: in the module's `state_dict()`; "" if it is unknown.
    parts: the parameters and buffers that the exporter computed it from, if it is no parameter as it stands.
    ties: its further names in the `state_dict()`, if it is tied.
    """

    kind: str = ""
    name: str = ""
    parts: tuple[str, ...] = ()
    moved: bool = False  # whether the exporter has moved numbers alone; not written down
    taken: bool = False  # whether by indices from a table; not written down
    repeated: bool = False  # whether the exporter may have repeated numbers; not written down
    ties: tuple[str, ...] = ()


def origins(proto: ModelProto, large: Mapping[str, TensorProto]) -> dict[str, Origin]:
    """What a model says of the initializers and the Constants of its main graph, by their names.

    large: initializers that are set aside.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer} | dict(large)
    names = list(tensors)
    constants = [node.output[0] for node in proto.graph.node if node.op_type == "Constant" and node.output]
    known = {name: origin for name, tensor in tensors.items() if (origin := origin_of(tensor)).kind}
    stated = _exported(proto, names)
    if stated:
        return {name: Origin(CONSTANT) for name in constants} | stated | known
    entries = signature(proto)
    targets = {entry.target for entry in entries if entry.target}
    if entries and not targets:  # the module has no tensors
        return dict.fromkeys([*names, *constants], Origin(CONSTANT)) | known
    if not _is_of_torch(proto) or (targets and targets.isdisjoint(names)):  # whose tensors have been renamed
        return known
    exported = any(node.name.startswith("node_") for node in proto.graph.node)  # by torch.export, before another tool
    # that may have written what it computed of a node as a Constant, under the name of the node's output
    # a file without a float tensor has Constants in their place, of another tool
    stored = any(tensor.dims and tensor.data_type in _FLOATS for tensor in tensors.values())
    literal = {
        name: _by_name(name) if not stored or _OUTPUT.fullmatch(name) else Origin(CONSTANT) for name in constants
    }
    scripted = literal | {name: _by_name(name, exported=exported) for name in names}
    return scripted | _names_of_folded(proto, scripted) | known


def attach(
    proto: ModelProto, origins_by_name: Mapping[str, Origin], changes: Mapping[str, Sequence[Any]] = NOTHING
) -> None:
    """Write what is known of initializers into their metadata, and what was restored into the graph's."""
    for key, entries in changes.items():
        if entries or key == MISSING:
            assign(proto.graph.metadata_props, [entry for entry in proto.graph.metadata_props if entry.key != key])
        if entries:
            proto.graph.metadata_props.add(key=key, value=json.dumps(entries))
    # then parameters are in the main graph, unless they have been renamed
    exported = bool(origins_by_name) and (bool(signature(proto)) or _is_of_torch(proto))
    for tensor in proto.graph.initializer:
        origin = origins_by_name.get(tensor.name, Origin(CONSTANT) if exported and not origin_of(tensor).kind else None)
        if origin is None and not origin_of(tensor).kind:
            continue
        stated = {} if origin is None else {_ORIGIN: origin.kind, _MODULE: origin.name}
        if origin is not None:
            stated |= {_PARTS: "\n".join(origin.parts), _TIES: "\n".join(origin.ties)}
        before = {entry.key: entry.value for entry in tensor.metadata_props}  # once each
        assign(tensor.metadata_props, ())
        for key, value in (before | stated).items():
            if value:
                tensor.metadata_props.add(key=key, value=value)


def origin_of(tensor: TensorProto | ir.Value) -> Origin:
    """What the metadata of an initializer says."""
    if isinstance(tensor, TensorProto):
        props: Mapping[str, str] = {entry.key: entry.value for entry in reversed(tensor.metadata_props)}
    else:
        props = {} if tensor.const_value is None else tensor.const_value.metadata_props
    parts, ties = (tuple(filter(None, props.get(key, "").split("\n"))) for key in (_PARTS, _TIES))
    return Origin(props.get(_ORIGIN, ""), props.get(_MODULE, ""), parts, ties=ties)


def inherit(new: ir.TensorProtocol, old: ir.TensorProtocol, name: str) -> None:
    """Let a copy of a tensor be what that is, under another name in the module."""
    new.metadata_props.update(old.metadata_props)
    if old.metadata_props.get(_MODULE):
        new.metadata_props[_MODULE] = name
        new.metadata_props.pop(_TIES, None)


def restored(graph: ir.Graph, key: str) -> list[Any]:
    """What a prepared graph says under MISSING, DETACHED, NO_GRAD, BLOCKS and REMOVED, names, else pairs."""
    try:
        entries = json.loads(graph.metadata_props.get(key, "[]"))
    except ValueError:
        return []
    return entries if isinstance(entries, list) else []


def is_uniform(tensor: TensorProto) -> bool:
    """Whether all numbers of a tensor are equal."""
    array = to_array(tensor)
    return bool(array.size and (array == array.flat[0]).all())


def is_plain(tensor: TensorProto) -> bool:
    """Whether a tensor has two different numbers at most, as the identity, which several parameters may begin with."""
    array = to_array(tensor).ravel()
    others = array[array != array[:1]]
    return bool((others == others[:1]).all())


def lost_values(proto: ModelProto) -> list[str]:
    """The results of operations of torch, by its names, that nodes and outputs refer to, and that the file has not."""
    texts = [called_with(node) for node in proto.graph.node]
    infos = (*proto.graph.input, *proto.graph.value_info)
    folded = {step for v in infos for p in v.metadata_props if p.key == _FOLDED_FROM for step in _listed(p.value)}
    present = {text[1:].partition(" ")[0] for text in texts} | {t.name for t in proto.graph.initializer} | folded
    present |= {v.name for v in proto.graph.input}
    read = (name for node in proto.graph.node for name in arguments_of(node))
    wanted = dict.fromkeys((*read, *(value.name for value in proto.graph.output)))
    return [name for name in wanted if is_operation(name) and name not in present]


def module_of(node: NodeProto | ir.Node) -> str:
    """The module of PyTorch that a node comes from, as `encoder.layer.0`; "" for the outermost one, or if unknown."""
    if isinstance(node, NodeProto):
        text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    else:
        text = node.metadata_props.get(_SCOPES, "")
    if text:
        scopes = _listed(text)
        return scopes[-2] if len(scopes) > 1 else ""
    return scope_of(node.name or "")


def scope_of(name: str) -> str:
    """The module that TorchScript's name of a node or its output is in: /layer1/layer1.0/conv1/Conv."""
    path, parts = "", name.split("/")[1:-1]
    for part in parts[:-1] if name.endswith("Fusion") else parts:  # which onnxruntime writes behind a node's name
        last = path.rpartition(".")[2] if path else ""
        whole = next((end for end in (path, last) if end and part.startswith(f"{end}.")), None)
        path = f"{path.removesuffix(whole)}{part}" if whole else f"{path}.{part}" if path else part
    return path


def paths(nodes: Sequence[NodeProto], names: Collection[str]) -> dict[str, str]:
    """TorchScript's scopes -> the paths of the modules, where those leave out what is not called, as a ModuleDict.

    names: tensors of the module. /fc/Gemm reads m.fc.weight.
    """
    scopes = {module_of(node) for node in nodes}
    nearest: dict[str, str] = {}  # the scope that has most of a path: others may read what a tool has merged
    for node in nodes:
        scope = module_of(node)
        for path in {owner(name) for name in node.input if scope and name in names}:
            *outer, last = scope.split(".")
            *parts, end = path.split(".")
            rest = iter(parts)
            inside = last == end and all(part in rest for part in outer)
            if inside and (path == scope or path not in scopes):
                nearest[path] = max(scope, nearest.get(path, ""), key=len)
    counts = Counter(nearest.values())
    return {scope: path for path, scope in nearest.items() if counts[scope] == 1}


def arguments_of(node: NodeProto) -> list[str]:
    """The values that the operation of torch read that a node comes from, as `detach_1` and `p_fc_weight`, in order."""
    match = _ARGUMENTS.search(called_with(node))
    return _VALUES.findall(match[1]) if match else []


def merged_arguments(node: NodeProto, name: str, present: Collection[str]) -> list[str]:
    """What torch's operation read that the file lacks and that is called like a value: `tanh_1` where it has `tanh`."""
    kind = _NUMBER.sub("", name)
    return [other for other in arguments_of(node) if other not in present and _NUMBER.sub("", other) == kind]


def operation_of(node: NodeProto | ir.Node) -> str:
    """The operation of torch that a node comes from, as `torch.ops.aten.group_norm.default`; "" if unknown."""
    match = _OPERATION.search(called_with(node))
    return match[1] if match else ""


def called_with(node: NodeProto | ir.Node) -> str:
    """The operation of torch that a node comes from with its arguments, as torch writes it; "" if unknown."""
    if isinstance(node, NodeProto):
        return next((entry.value for entry in node.metadata_props if entry.key == FX), "")
    return node.metadata_props.get(FX, "")


def is_rearranged(name: str) -> bool:
    """Whether torch's optimizer has moved the numbers of a tensor alone, by the name that it has given it."""
    return _REARRANGED.fullmatch(name) is not None


def is_computed(name: str) -> bool:
    """Whether a name is one that TorchScript's exporter gives to what it has computed."""
    return _COMPUTED.fullmatch(name) is not None


def normed_by(name: str) -> str:
    """The name of the weight whose norm spectral_norm estimates by a vector, if the name is that of one; "" if not."""
    match = _ITERATED.fullmatch(name)
    return "" if match is None else f"{match[1]}original" if match[1] else f"{match[2]}orig"


def leaf_of(node: NodeProto, index: int) -> str:
    """What a module calls the parameter that a node of it reads: `weight` or `bias`."""
    return {"Add": "bias", "Mul": "weight"}.get(node.op_type) or _LEAVES.get(index, "weight")


def is_operation(name: str) -> bool:
    """Whether torch has computed a tensor by more than moving numbers, by the name that it has given it."""
    return _OPERATIONS.fullmatch(name) is not None


def is_repeated(name: str) -> bool:
    """Whether torch has repeated the numbers of a tensor, by the name that it has given it."""
    return _REPEATED.fullmatch(name) is not None


def is_filled(name: str) -> bool:
    """Whether torch has filled a tensor with a number, by the name that it has given it, as `zeros_like`."""
    return _FILLED.fullmatch(name) is not None


def owner(name: str) -> str:
    """The module that has a parameter, from the parameter's name."""
    return name.rpartition(".")[0]


def _is_of_torch(proto: ModelProto) -> bool:
    """Whether torch wrote a model, by what a tool has left of it: its name, or those that TorchScript gives outputs."""
    named = (node for node in proto.graph.node if node.output and node.name.startswith("/"))
    return proto.producer_name == "pytorch" or any(node.output[0] == f"{node.name}_output_0" for node in named)


def _exported(proto: ModelProto, names: Collection[str]) -> dict[str, Origin]:
    """What metadata of `torch.export` says; nothing for a file without it."""
    targets = {entry.target: entry.kind for entry in signature(proto) if entry.target}
    infos = (*proto.graph.input, *proto.graph.value_info)
    values = {v.name: {p.key: p.value for p in v.metadata_props} for v in infos}
    marks = {name: values.get(name, {}).keys() & {KIND, _FOLDED_FROM} for name in names}
    if not targets and not any(KIND in mark for mark in marks.values()):
        return {}  # another tool has dropped what says which are parameters
    if not any(name in targets or mark for name, mark in marks.items()):
        return {}  # there were none, or another tool has renamed all
    if not any(KIND in props for props in values.values()):
        values |= {name: {KIND: targets[name], **values.get(name, {})} for name in targets}
    readers = uses(proto.graph.node)
    operations = {name: {operation_of(node) for node, _ in readers[name]} for name in names}
    return {name: _stated(name, values.get(name, {}), targets, operations[name]) for name in names}


def _stated(
    name: str, props: Mapping[str, str], targets: Mapping[str, str], operations: Collection[str] = ()
) -> Origin:
    """What is said of a tensor. One that was computed from more than a parameter has parts, until they are known.

    operations: of torch, that read it.
    """
    kind = props.get(KIND, "")
    if kind in (PARAMETER, FROZEN):
        frozen = FROZEN in (kind, targets.get(name)) or props.get(REQUIRES_GRAD) == "False"
        return Origin(FROZEN if frozen else PARAMETER, name)
    if kind:
        return Origin(kind if kind == BUFFER else CONSTANT, name)
    before = next((source for source in (name, name.removesuffix("_bias")) if source in targets), "")
    if before:  # the optimizer has put another tensor in its place, as of a convolution and a BatchNormalization
        return Origin(PARAMETER if targets[before] in (PARAMETER, FROZEN) else BUFFER, name, (before,))
    computed_from = _listed(props.get(_FOLDED_FROM, ""))
    sources = {t: targets[t] for t in computed_from if t in targets and not (targets[t] == BUFFER and _INDEX.search(t))}
    parameters = [target for target, kind in sources.items() if kind in (PARAMETER, FROZEN)]
    if parameters:
        if name.partition("_")[0] == "detach":
            return Origin(CONSTANT)
        steps = [step for step in computed_from if step not in targets]
        if _EMBEDDING.fullmatch(name) and any(step.partition("_")[0] == "arange" for step in steps):
            steps = [step for step in steps if not _POSITIONS.fullmatch(step)]
        moved = all(map(is_rearranged, (name, *steps)))
        if _STEP.fullmatch(name):  # a step of what reads it
            moved &= all(_MOVES_FIRST.fullmatch(one.split(".")[3]) for one in operations if one.count(".") > 2)
        whole = parameters[0] if len(parameters) == 1 else ""
        taken = any(map(_TAKEN.fullmatch, (name, *steps)))
        trained = PARAMETER if PARAMETER in sources.values() else FROZEN
        repeated = taken or any(map(_REPEATED.fullmatch, (name, *steps)))
        only = len(computed_from) == 1 and moved and not repeated
        return Origin(trained, whole, () if only else tuple(sources), moved, taken, repeated)
    buffers = [target for target, kind in sources.items() if kind == BUFFER]
    return Origin(BUFFER, buffers[0]) if len(buffers) == 1 else Origin(BUFFER if buffers else CONSTANT)


def _by_name(name: str, *, exported: bool = False) -> Origin:
    """What a name in a file of TorchScript says, or in one of `torch.export` that has lost its metadata."""
    if _LITERAL.fullmatch(name) or (exported and is_filled(name)):
        return Origin(CONSTANT)
    if (slimmed := _SLIMMED.fullmatch(name)) and (scope := scope_of(slimmed[1])):
        return Origin(NAMED, f"{scope}.weight")
    computed = is_computed(name) or (exported and (is_rearranged(name) or is_operation(name)))
    return Origin(FOLDED) if computed else Origin(NAMED, name)


def _names_of_folded(proto: ModelProto, scripted: Mapping[str, Origin]) -> dict[str, Origin]:
    """The names in the module of tensors that TorchScript transposed or reshaped, from the node that reads each."""
    readers = uses(sorted(proto.graph.node, key=lambda node: node.op_type == "Identity"))  # which reads for another
    taken = {origin.name for origin in scripted.values()}
    others = {node.output[0] for node in proto.graph.node if is_standard(node, "Identity")}  # of merged tensors
    path = paths(proto.graph.node, {name for name, origin in scripted.items() if origin.kind == NAMED} | others)
    folded: dict[str, Origin] = {}
    for name, origin in scripted.items():
        if origin.kind != FOLDED or not readers[name]:
            continue
        node, index = readers[name][0]
        module = path.get(module_of(node), module_of(node))
        leaf = leaf_of(node, index)
        bias = _bias_behind(node, readers, scripted) if node.op_type == "MatMul" else ""
        guess = bias[: -len("bias")] + "weight" if owner(bias) and bias.endswith("bias") else f"{module}.{leaf}"
        if guess.startswith("."):
            continue
        if guess in taken:
            guess = f"{module}.{name}"
        taken.add(guess)
        folded[name] = Origin(FOLDED, guess)
    return folded


def _bias_behind(
    node: NodeProto, readers: Mapping[str, list[tuple[NodeProto, int]]], scripted: Mapping[str, Origin]
) -> str:
    """The name of what alone is added to a product, where that has a name of the module."""
    after = readers[node.output[0]]
    if len(after) != 1 or not is_standard(after[0][0], "Add"):
        return ""
    add, index = after[0]
    other = scripted.get(add.input[1 - index], Origin())
    fits = owner(other.name) == module_of(node) or not module_of(node)
    return other.name if other.kind == NAMED and fits else ""


def _listed(text: str) -> list[str]:
    """The strings of a list that is written as Python writes one."""
    try:
        entries = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(entry) for entry in entries] if isinstance(entries, list) else []
