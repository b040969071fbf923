"""Sentences about a choice of parameters: what is doubtful, what the file lacks, and how little of it is trained."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

from onnx_backprop.converters.parameters.alike import equal_weights, parts_of
from onnx_backprop.converters.parameters.choice import Choice
from onnx_backprop.converters.parameters.layout import shown, size
from onnx_backprop.converters.parameters.structure import NEVER_TRAINED, source_of, uses_of
from onnx_backprop.converters.parameters.values import is_uniform
from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.prepare.exporters.origins import (
    BIASED,
    BLOCKS,
    DETACHED,
    FOLDED,
    MERGED,
    MISSING,
    NAMED,
    NO_GRAD,
    READ_AS,
    REMOVED,
    SEPARATED,
    TIED,
    UNREAD,
    called_with,
    module_of,
    origin_of,
    restored,
)
from onnx_backprop.converters.prepare.exporters.torch_metadata import SIGNATURE, TIES
from onnx_backprop.converters.prepare.selection import Patterns, chooses
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.graphs.order import dependencies, descendants
from onnx_backprop.opset.graphs.walk import is_standard

_ENOUGH = 0.9  # the share of a file's numbers below which it is said how many are trained
_SHOWN = 40  # names that a warning lists
_FEW = 4  # nodes of each
_TENSORFLOW = re.compile(r".+/.+:\d+")
_OPERATION = re.compile(r"node_(add|div|mul|sub)(?:_(\d{1,4}))?")
_CALL = re.compile(r"_\d+(?=\.|$)")  # enc.4_1: the second call of enc.4
_OF_TOOL = re.compile(r"_v_\d+")  # onnxsim's
_SMOOTHED = re.compile(
    r"cross_entropy_loss\.default\]\(args = \(%\w+, %\w+, [^,]+, \d, -?\d+, (\d+(?:\.\d+)?(?:e-?\d+)?)\)"
)
_INTEGERS = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8)
HOW = "frozen=[…] leaves a tensor out, trainable=[…] trains it; what ob.torch.export writes says which are parameters"


def warn_of(
    graph: ir.Graph, choice: Choice, trained: Collection[ir.Value], *, frozen: Collection[str] = (), share: bool = True
) -> None:
    """Say what a choice by default has guessed, in one warning for each kind.

    frozen: what the caller has left out. share: whether it is said that a small part of the file is trained.
    """
    known = {*trained, *(value for value in graph.initializers.values() if value.name in frozen)}
    sentences = [
        doubts(choice, frozen),
        missing(graph),
        unread(graph),
        removed(graph),
        detached(graph),
        *ungraded(graph, trained),
        unsmoothed(graph),
        unbiased(graph, trained, known),
        dropped(graph, trained),
        computed(graph),
        read_as(graph),
        separated(graph, trained),
        tied(graph, trained),
        read_twice(trained),
        *parts_of(trained),
        *(equal_weights(trained) if share and TIES not in graph.metadata_props else []),
    ]
    if share:
        sentences.append(share_of(graph, choice.left_out, trained, frozen))
    for sentence in filter(None, sentences):
        warn(sentence)


def doubts(choice: Choice, decided: Collection[str]) -> str:
    """What of the file is doubtful, and how that was decided."""
    open_ = {value: why for value, why in choice.doubtful.items() if value.name not in decided}
    if not open_:
        return ""
    parts: list[str] = []
    how = HOW
    for verb, left_out in (("trained are", False), ("left out are", True)):
        reasons: dict[str, list[str]] = {}
        for value, why in open_.items():
            if (value in choice.left_out) == left_out:
                reasons.setdefault(why, []).append(shown(value))
        if any(len(names) > _SHOWN for names in reasons.values()):
            how = f"explain_gradients lists them all; {HOW}"
        if reasons:
            parts.append(f"{verb} {'; '.join(f'{_listed(names)} ({why})' for why, names in reasons.items())}")
    return f"the file does not say for sure which tensors are parameters: {'; '.join(parts)}. {how}"


def missing(graph: ir.Graph) -> str:
    """The parameters of the exported module that are not in the file."""
    why = (
        "The exporter has folded them into others, as BatchNormalization into a convolution, or nothing reads them. "
        "ob.torch.export keeps them, as does torch.onnx.export(…, optimize=False)"
    )
    return _without_tensor(graph, MISSING, "parameters", why)


def unread(graph: ir.Graph) -> str:
    """The buffers of the exported module that are not in the file, if the exporter may have merged them."""
    why = (
        "Nothing reads them, or the exporter has merged what reads them with what reads a parameter of the same "
        "numbers, which then gets the gradient of both. ob.torch.export keeps them"
    )
    return _without_tensor(graph, UNREAD, "buffers", why)


def _without_tensor(graph: ir.Graph, key: str, kind: str, why: str) -> str:
    names = _listed([repr(str(name)) for name in restored(graph, key)])
    return f"the file has no tensor for these {kind} of the module: {names}. {why}" if names else ""


def removed(graph: ir.Graph) -> str:
    """What onnxsim has taken out of the file, by its own list."""
    entries = restored(graph, REMOVED)
    names = [str(name) for name in entries if not isinstance(name, int)]
    rest = f"values that it does not name ({entries[-1]})" if entries and isinstance(entries[-1], int) else ""
    if not entries:
        return ""
    return (
        f"onnxsim has removed {' and '.join(filter(None, (_listed(map(repr, names)), rest)))}. It takes away "
        "scales that begin as ones and shifts as zeros, which the module trains and this training does not. Simplify "
        "the file after its training"
    )


def detached(graph: ir.Graph) -> str:
    """The nodes where gradients pass that the module stops."""
    stops = (node for node in graph if is_stop(node))  # of an estimator, or of the caller's
    held = {name for stop in stops for node, _ in stop.outputs[0].uses() for name in (node.name, node.outputs[0].name)}
    names = [str(name) for name in restored(graph, DETACHED) if name not in held]
    if not names:
        return ""
    return (
        f"the exporter has left out a detach() in front of {_listed(map(repr, names))}, or has merged that with the "
        "same operation of a detached value, and the file does not say of which input: gradients pass there that the "
        "module may stop. stop=[…] stops them at a value; ob.torch.export keeps detach()"
    )


def ungraded(graph: ir.Graph, trained: Collection[ir.Value]) -> Iterator[str]:
    """Where a module stops gradients by torch.no_grad, and where it may."""
    if stopped := [str(name) for name in restored(graph, NO_GRAD)]:
        yield (
            f"no gradient passes {_listed(map(repr, stopped))}: the metadata of the file say that the module computes "
            "that under torch.no_grad(). What follows a torch.autograd.Function that switches gradients off and on, "
            "and torch.enable_grad() in what is exported under no_grad(), look alike: ob.torch.export tells them apart"
        )
    if merged := [f"{name!r} to {reader!r}" for name, reader in restored(graph, MERGED)]:
        yield (
            f"gradients pass {_listed(merged)}, which by the file's metadata read the same operations outside of "
            "torch.no_grad(): the exporter has merged both, or removed one that changes nothing. ob.torch.export keeps "
            "them apart"
        )
    unsaid = restored(graph, BLOCKS)
    passing = (node for node in graph if not is_stop(node)) if unsaid else ()
    values = [v for node in descendants(passing, trained) for v in node.outputs if v.name in unsaid]
    if reached := dependencies(graph, values).intersection(trained) if values else ():
        names = _listed(repr(value.name) for value in values)
        yield (
            f"the module computes {names} under torch.no_grad() or torch.autocast(), and the file does not say which: "
            f"gradients pass to {_listed(shown(value) for value in trained if value in reached)}. stop=[…] stops them "
            "at a value; ob.torch.export keeps no_grad()"
        )


def unsmoothed(graph: ir.Graph) -> str:
    """The cross entropies without the label_smoothing that the operation of torch has."""
    smoothed = [
        (node, match[1]) for node in graph if (match := _SMOOTHED.search(called_with(node))) and float(match[1])
    ]
    smoothed = [(node, share) for node, share in smoothed if node.op_type == "SoftmaxCrossEntropyLoss"]
    if not smoothed:
        return ""
    return (
        "the exporter has left out label_smoothing of "
        f"{_listed(f'{node.name!r} ({share})' for node, share in smoothed)}: the loss is the one without. "
        "ob.torch.export keeps it, as does loss=ob.losses.SoftmaxCrossEntropy(label_smoothing=…) behind logits"
    )


def unbiased(graph: ir.Graph, trained: Collection[ir.Value], known: Collection[ir.Value]) -> str:
    """What has no bias, or no scale, beside others that have one, in a file of torch that a tool has changed.

    known: what is trained or frozen.
    """
    if SIGNATURE in graph.metadata_props:  # by which they are restored
        return ""
    changed = any(_OF_TOOL.match(name) for name in graph.initializers)  # TorchScript's own files keep them
    lacking: dict[bool, list[str]] = {False: [], True: []}
    for node in graph:
        after = [reader for reader, _ in node.outputs[0].uses()]
        if is_standard(node, "InstanceNormalization") and module_of(node):  # as of GroupNorm, whose scale comes behind
            behind = [reader for reader, _ in uses_of(node.outputs[0]) if is_standard(reader, "Mul")]
            lacks = not behind and node.inputs[1] not in known
            lacking[False] += [f"the normalisation of {module_of(node)!r}"] if lacks else []
            continue
        weight = node.inputs[1] if is_standard(node, *BIASED, "MatMul") else None
        normalised = any(is_standard(reader, "BatchNormalization") for reader in after)
        if weight is None or weight not in trained or origin_of(weight).kind not in (NAMED, FOLDED) or normalised:
            continue
        changed |= not (node.name or "").startswith("/")
        added = [x for reader in after if is_standard(reader, "Add") for x in reader.inputs if x in known]
        lacking[bool(node.inputs[2:] and node.inputs[2] is not None) or bool(added)].append(shown(weight))
    if not (changed and lacking[False] and lacking[True]):
        return ""
    return (
        f"the file has no bias for {_listed(lacking[False])}. The tool that has changed it, or torch's optimizer, "
        "takes away a bias that begins as zeros, and a scale as ones: then the module trains them. ob.torch.export "
        "keeps them"
    )


def dropped(graph: ir.Graph, trained: Collection[ir.Value]) -> str:
    """The products of a file of tf2onnx that have no bias: it takes away what adds zeros or multiplies by ones."""
    if not any(_TENSORFLOW.fullmatch(str(node.outputs[0].name)) for node in graph):
        return ""
    lacking: list[str] = []
    for node in graph:
        product = is_standard(node, *BIASED, "MatMul") and node.inputs[1] in trained
        if not product or (len(node.inputs) > 2 and node.inputs[2] is not None):
            continue
        if not _is_shifted(node.outputs[0]):
            lacking.append(repr(node.name or node.outputs[0].name))
    if not lacking:
        return ""
    return (
        f"the file has no bias for {_listed(lacking)}. tf2onnx, Keras' exporter, leaves out additions of zeros and "
        "products with ones, so biases and scales that still have their initial values are missing, and this training "
        "goes without them. If these layers have some, export after a step of training, or initialise them otherwise"
    )


def _is_shifted(value: ir.Value) -> bool:
    """Whether a tensor of the file is added to a value, at once or behind a scale, as by BatchNormalization."""
    for node, _ in uses_of(value):
        if is_standard(node, "BatchNormalization"):
            return True
        stored = any((x := source_of(given)) is not None and x.is_initializer() for given in node.inputs)
        if stored and (is_standard(node, "Add") or (is_standard(node, "Mul") and _is_shifted(node.outputs[0]))):
            return True
    return False


def computed(graph: ir.Graph) -> str:
    """The operations of torch that a tool has taken out of a file of dynamo, by the numbers that are not there."""
    if SIGNATURE in graph.metadata_props:  # which names the parameters that are missing
        return ""
    numbers = defaultdict[str, set[int]](set)
    for match in (_OPERATION.fullmatch(node.name or "") for node in graph):
        if match:
            numbers[match[1]].add(int(match[2] or 0))
    gaps = [(name, n) for name, present in numbers.items() for n in range(max(present)) if n not in present]
    names = [f"{name}_{n}" if n else name for name, n in gaps]
    lacking = [repr(name) for name in names if name not in graph.initializers]  # of whose results `doubts` tells
    if not lacking:
        return ""
    return (
        f"the file lacks operations of the module: {_listed(lacking)}. The exporter or a tool has computed them, "
        "merged them with others, or removed additions of zeros and products with ones. If only these read a "
        "parameter, such as a scale or a shift with its initial value, it is not trained. ob.torch.export keeps them"
    )


def partly_frozen(graph: ir.Graph, frozen: Collection[str], patterns: Patterns) -> str:
    """The tensors that patterns freeze which name a part of the parameters that the exporter has computed them from."""
    texts: list[str] = []
    for name in frozen:
        parts = origin_of(graph.initializers[name]).parts
        rest = [part for part in parts if not chooses(patterns, part)] if name not in patterns else []
        if rest and len(rest) < len(parts):
            texts.append(f"{', '.join(map(repr, rest))} in {name!r}")
    if not texts:
        return ""
    return (
        f"frozen too, though no pattern names them, are {_listed(texts)}: the exporter has computed one tensor from "
        "several parameters. ob.torch.export keeps them apart, as does torch.onnx.export(…, optimize=False)"
    )


def read_as(graph: ir.Graph) -> str:
    """The parameters that equal at first what torch computed of them."""
    read = [f"{name!r} ({operand})" for name, operand in dict.fromkeys(_pairs(graph, READ_AS))]
    if not read:
        return ""
    return (
        "the file has one tensor for a parameter and for what torch computed of it, which is equal at first: "
        f"{_listed(read)}. A transpose is trained as one, and anything else as the parameter itself. ob.torch.export "
        "writes what torch computes"
    )


def separated(graph: ir.Graph, trained: Collection[ir.Value]) -> str:
    """The parameters that the file has as one tensor, and that are trained apart."""
    names = {str(value.name) for value in trained}
    pairs = [pair for pair in _pairs(graph, SEPARATED) if names.issuperset(pair)]
    if not pairs:
        return ""
    return (
        f"the file has one tensor for each of these pairs, which are equal at first: {_listed(map(_pair, pairs))}. "
        f"They are trained apart. If the module has one parameter for both, tie=[{pairs[0]!r}] keeps them equal"
    )


def tied(graph: ir.Graph, trained: Collection[ir.Value]) -> str:
    """The parameters of several names that are trained as one."""
    names = {str(value.name) for value in trained}
    pairs = [pair for pair in _pairs(graph, TIED) if pair[0] in names]
    if not pairs:
        return ""
    return (
        "the file has one tensor, or one and its transposed copy, for each of these pairs: "
        f"{_listed(map(_pair, pairs))}. It is trained as one. If the module has two parameters that are "
        "equal at first, ob.torch.export keeps them apart"
    )


def read_twice(trained: Collection[ir.Value]) -> str:
    """The tensors that several nodes read, if these are in several modules or the file does not say in which."""
    texts: list[str] = []
    for value in trained:
        uses = value.uses() if origin_of(value).kind in (NAMED, FOLDED) and size(value) > 1 else ()
        readers = [reader for node, _ in uses for reader in _readers(node)]
        readers = [node for node in readers if not (node.name or "").endswith("/tied")]  # of which `tied` tells
        modules = {_CALL.sub("", module_of(node)) for node in readers}
        unknown = len(modules) > 1 or not all(module_of(node) or (node.name or "").startswith("/") for node in readers)
        if len(readers) > 1 and unknown and not (value.const_value and is_uniform(value.const_value.numpy())):
            texts.append(f"{shown(value)} by {', '.join(repr(node.name) for node in readers[:_FEW])}")
    if not texts:
        return ""
    return (
        f"read by several nodes and trained as one are {_listed(texts)}. Exporters and simplifiers keep one of equal "
        "tensors, as of copies of a layer; if these are several, ob.torch.export keeps them apart"
    )


def _readers(node: ir.Node) -> list[ir.Node]:
    """A node; in the place of an Identity, which has a name of the exporter's, what reads it."""
    return [reader for reader, _ in node.outputs[0].uses()] if is_standard(node, "Identity") else [node]


def share_of(
    graph: ir.Graph, left_out: Mapping[ir.Value, str], trained: Collection[ir.Value], frozen: Collection[str]
) -> str:
    """How many of the file's numbers are trained, if these are few; running statistics and what is frozen aside."""
    kept = [v for v in graph.initializers.values() if _counts(v) and v.name not in frozen]
    kept = [v for v in kept if left_out.get(v) not in NEVER_TRAINED]
    total, part = sum(map(size, kept)), sum(map(size, trained))
    if not part or part >= _ENOUGH * total:
        return ""
    rest = sorted((v for v in kept if v not in trained), key=size, reverse=True)
    named = _listed(f"{shown(v)} ({size(v):,}, {left_out.get(v, _untouched(v))})" for v in rest)
    way = " (ob.dequantize(model) makes parameters of integers)" if any(v.dtype in _INTEGERS for v in rest) else ""
    return f"{part:,} of the {total:,} numbers of the file are trained{way}; not trained: {named}"


def _pairs(graph: ir.Graph, key: str) -> list[tuple[str, ...]]:
    return [tuple(map(str, pair)) for pair in restored(graph, key) if isinstance(pair, list) and len(pair) == 2]


def _pair(names: tuple[str, ...]) -> str:
    return " and ".join(map(repr, names))


def _counts(value: ir.Value) -> bool:
    """Whether an initializer holds numbers that a network has learnt, if only as integers."""
    if value.dtype is None:
        return False
    read = bool(value.uses()) or value.is_graph_output()
    return read and (value.dtype.is_floating_point() or (value.dtype in _INTEGERS and size(value) > 1))


def _untouched(value: ir.Value) -> str:
    return "stored as integers" if value.dtype in _INTEGERS else "the loss does not depend on it"


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
