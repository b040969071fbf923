"""What files look like: a plain model as another file of the same function, in ways that onnxruntime takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper, shape_inference

from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, reads
from tests.search.generate import Feeds, run_stock
from tests.support.renamed import STYLES, renamed

CORRUPTED = "wrong value_info"  # the producer of such a file
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)


def copy(model: ModelProto) -> ModelProto:
    result = ModelProto()
    result.CopyFrom(model)
    return result


def _symbols(model: ModelProto, feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """Lengths of inputs and outputs become symbols: axis 0 of inputs of as many rows one, other axes one each.

    The last axis of an Attention's values keeps its length: onnxruntime infers 0 of a symbol there, and folds it.
    """
    attended = {node.input[2] for node in all_nodes(model.graph) if node.op_type == "Attention"}
    rows = Counter(v.shape[0] for v in feeds.values() if v.ndim)
    most = rows.most_common(1)[0][0] if rows else 0
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if axis == 0 and dim.dim_value == most:
                dim.dim_param = "N"
            elif axis and rng.random() < 0.4 and (axis != 2 or value.name not in attended):
                dim.dim_param = f"{value.name}_{axis}"
    _undeclared_outputs(model, feeds, rng)
    return feeds


def _undeclared_outputs(model: ModelProto, feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """Outputs with symbols or no shape; those of branches and bodies too."""
    for graph in all_graphs(model):
        for value in graph.output:
            if rng.random() < 0.5:
                value.type.tensor_type.ClearField("shape")
            else:
                for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                    dim.dim_param = f"{value.name}_out_{axis}"
    return feeds


def _constants(model: ModelProto, _: Feeds, rng: np.random.Generator) -> Feeds | None:
    """Initializers as Constant nodes."""
    for graph in all_graphs(model.graph):
        chosen = [t for t in graph.initializer if rng.random() < 0.5]
        for tensor in chosen:
            graph.initializer.remove(tensor)
            node = helper.make_node("Constant", [], [tensor.name], value=tensor)
            graph.node.insert(0, node)
    return None


def _fed_initializers(model: ModelProto, _: Feeds, rng: np.random.Generator) -> Feeds | None:
    """Initializers that are graph inputs, too."""
    for t in model.graph.initializer:
        if rng.random() < 0.4:
            model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
    return None


def _value_info(model: ModelProto, _: Feeds, rng: np.random.Generator) -> Feeds | None:
    """What onnx infers, some of it left out, in one of four files some with other lengths."""
    corrupt = rng.random() < 0.25
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    for value in inferred.graph.value_info:
        if rng.random() < 0.2:
            continue
        model.graph.value_info.add().CopyFrom(value)
        if corrupt and rng.random() < 0.2:
            model.producer_name = CORRUPTED
            for dim in model.graph.value_info[-1].type.tensor_type.shape.dim:
                dim.dim_value = int(rng.integers(1, 5))
    return None


def _names(model: ModelProto, feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """Names of a hostile style."""
    values = [v.name for v in model.graph.input] + [t.name for t in model.graph.initializer]
    ours = (
        [f"{n}{end}" for n in values for end in ("_grad", "_tangent", "_new", "_hvp", "_rows")]
        if rng.random() < 0.5
        else []
    )
    style = str(rng.choice(STYLES))
    other, names = renamed(model, style, *([ours] if style == "ours" and ours else []))
    model.CopyFrom(other)
    return {names[k]: v for k, v in feeds.items()}


def _node_names(model: ModelProto, _: Feeds, rng: np.random.Generator) -> Feeds | None:
    """Nodes of the names of values, or of none."""
    nodes = list(all_nodes(model.graph))
    for node, other in zip(nodes, rng.permutation(len(nodes)), strict=True):
        node.name = next(iter(nodes[other].output), "") if rng.random() < 0.8 else ""
    return None


def renewed_statistics(model: ModelProto) -> bool:
    """Whether a BatchNormalization is in training mode: onnxruntime overwrites the statistics that it is given."""
    return any(a.name == "training_mode" and a.i for node in all_nodes(model) for a in node.attribute)


def _more_outputs(model: ModelProto, feeds: Feeds, rng: np.random.Generator) -> Feeds | None:
    """Outputs that are inputs or initializers."""
    graph = model.graph
    value = graph.input[int(rng.integers(len(graph.input)))]
    if renewed_statistics(model):
        raise ValueError("onnxruntime overwrites statistics that are outputs, too")
    if rng.random() < 0.5 and graph.initializer:
        t = graph.initializer[int(rng.integers(len(graph.initializer)))]
        value = helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
    graph.output.insert(int(rng.integers(len(graph.output) + 1)), value)
    return None


def _unused(model: ModelProto, feeds: Feeds, _: np.random.Generator) -> Feeds:
    """An input, an initializer and nodes that nothing reads."""
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("spare", TensorProto.FLOAT, [2]))
    graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.float32), "spare_w"))
    graph.node.append(helper.make_node("MatMul", ["spare", "spare_w"], ["spare_y"], name="spare_y"))
    return feeds | {"spare": np.ones(2, np.float32)}


def _function(model: ModelProto, _: Feeds, rng: np.random.Generator) -> Feeds | None:
    """Some nodes in a row as a function of the model, a number of theirs as its attribute."""
    nodes = list(model.graph.node)
    if model.opset_import[0].version < 17 and any(n.op_type == "LayerNormalization" for n in all_nodes(model.graph)):
        raise ValueError("onnxruntime, which has it in every opset, ends the process where a function has it")
    start = int(rng.integers(len(nodes)))
    inside = nodes[start : start + int(rng.integers(2, 6))]
    produced = {n for node in inside for n in node.output if n}
    before = [n for node in inside for n in sorted(reads(node)) if n not in produced]
    outside = {n for node in nodes if node not in inside for n in reads(node)} | {v.name for v in model.graph.output}
    after = [n for n in produced if n in outside]
    defaults: dict[str, object] = {}
    body = [copy_node(node) for node in inside]
    for node in body:
        for a in node.attribute:
            if a.name in ("axis", "alpha", "epsilon") and not defaults:
                defaults[a.name] = helper.get_attribute_value(a)
                kind = a.type
                a.Clear()
                a.name = a.ref_attr_name = next(iter(defaults))
                a.type = kind
    inputs, outputs = list(dict.fromkeys(before)), sorted(after)
    if not outputs:
        raise ValueError("nothing is read of it")
    model.functions.append(
        helper.make_function("own", "part", inputs, outputs, body, list(model.opset_import)[:1], list(defaults))
    )
    model.opset_import.append(helper.make_opsetid("own", 1))
    del model.graph.node[:]
    call = helper.make_node("part", inputs, outputs, domain="own", name="part", **defaults)
    model.graph.node.extend([*nodes[:start], call, *nodes[start + len(inside) :]])
    return None


def copy_node(node):
    result = type(node)()
    result.CopyFrom(node)
    return result


Change = Callable[[ModelProto, Feeds, np.random.Generator], "Feeds | None"]
CHANGES: list[tuple[float, Change]] = [
    (0.3, _constants),
    (0.25, _function),
    (0.25, _unused),
    (0.6, _symbols),
    (0.15, _undeclared_outputs),
    (0.2, _more_outputs),
    (0.4, _value_info),
    (0.25, _fed_initializers),
    (0.4, _names),
    (0.15, _node_names),
]


def dress(model: ModelProto, feeds: Feeds, rng: np.random.Generator) -> tuple[ModelProto, Feeds]:
    """The model with changes drawn, each of which leaves what onnxruntime makes of it."""
    want = run_stock(model, feeds)
    for often, change in CHANGES:
        if rng.random() >= often:
            continue
        other = copy(model)
        try:
            fed = change(other, feeds, rng) or feeds
            got = run_stock(other, fed)
        except Exception:  # noqa: BLE001 - what onnxruntime refuses is no model
            continue
        if change is _more_outputs or all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
            model, feeds, want = other, fed, got
    return model, feeds


def in_float64(model: ModelProto, feeds: Feeds) -> tuple[ModelProto, Feeds]:
    """The model and what it is fed with every float32 as float64, also inside layers; but for the scales of a Resize."""
    result = copy(model)
    kept = _scales(model)
    for graph in all_graphs(result.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            types = value.type.sequence_type.elem_type if value.type.HasField("sequence_type") else value.type
            if types.tensor_type.elem_type == TensorProto.FLOAT:
                types.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            _widen(tensor, kept)
    stashing = {"LayerNormalization": 17, "RMSNormalization": 23, "GroupNormalization": 21}
    for node in all_nodes(result):
        if stashing.get(node.op_type, 99) <= model.opset_import[0].version:
            others = [a for a in node.attribute if a.name != "stash_type"]
            del node.attribute[:]
            node.attribute.extend([*others, helper.make_attribute("stash_type", TensorProto.DOUBLE)])
        for a in node.attribute:
            if a.name in ("to", "dtype") and a.i == TensorProto.FLOAT:
                a.i = TensorProto.DOUBLE
            if a.HasField("t") and not kept.intersection(node.output):
                _widen(a.t, kept)
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    return result, wide


def _scales(model: ModelProto) -> set[str]:
    """Numbers in float32 that are no values to differentiate by."""
    return {n for node in _inlined(model) if node.op_type == "Resize" for n in node.input[1:3]}


def _boxes(model: ModelProto) -> set[str]:
    """The boxes of RoiAlign, which get no gradient from it, and may get one as outputs of the model."""
    return {node.input[1] for node in _inlined(model) if node.op_type == "RoiAlign"}


def _inlined(model: ModelProto) -> list[NodeProto]:
    """The nodes of a model, of its functions too, with the names of their calls."""
    return [*all_nodes(model), *(all_nodes(without_functions(model)) if model.functions else ())]


def _widen(tensor: TensorProto, kept: set[str]) -> None:
    if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def floats_of(model: ModelProto) -> tuple[list[str], list[str]]:
    """The float inputs and initializers of a model, and its float outputs, each once."""
    graph = model.graph
    inputs = [v.name for v in graph.input if v.type.tensor_type.elem_type in FLOATS]
    wrt = dict.fromkeys([*inputs, *(t.name for t in graph.initializer if t.data_type in FLOATS)])
    outputs = dict.fromkeys(v.name for v in graph.output if v.type.tensor_type.elem_type in FLOATS)
    undifferentiated = _scales(model) | _boxes(model)
    return [n for n in wrt if n not in undifferentiated], list(outputs)


def without_functions(model: ModelProto) -> ModelProto:
    return inliner.inline_local_functions(model)
