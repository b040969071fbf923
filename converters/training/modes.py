"""Dropout and BatchNormalization in training and in inference, and what they carry from one step to the next."""

import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.statistics import STATISTICS
from onnx_backprop.converters.prepare.exporters.torch_metadata import BUFFER, signature
from onnx_backprop.converters.recompute.marks import DROPPED, VIEW, originals
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import label, unsupported
from onnx_backprop.converters.reverse.known import constant_value
from onnx_backprop.converters.rules.common import as_shaped
from onnx_backprop.converters.training.names import RANDOM_STATE
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.graphs.names import RENEWED, used_names
from onnx_backprop.opset.graphs.walk import is_standard

_SHOWN = 4  # modules that a warning lists


def train(graph: ir.Graph) -> bool:
    """Put every Dropout and BatchNormalization of the main graph into training mode; whether there are any.

    A BatchNormalization whose statistics are computed in the graph stays as it is, see `renew_statistics`.
    """
    nodes = [node for node in graph if node.domain == "" and node.op_type in ("BatchNormalization", "Dropout")]
    nodes = [node for node in nodes if node.op_type == "Dropout" or not _computes_statistics(node)]
    if inside := _inside(graph, "BatchNormalization", "Dropout"):
        warn(f"training_mode leaves {_listed(inside)} as they are, which are in a branch or a loop")
    yes: ir.Value | None = None
    for node in nodes:
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            continue
        if yes is None:
            yes = _constant(graph, np.array(True), "training_mode")
        node.resize_inputs(3)
        node.replace_input_with(2, yes)
    return bool(nodes)


def nothing_to_switch(model: ir.Model) -> str:
    """What to say if there is nothing to put into training mode: what the exporter folded, and how to keep it."""
    stored = model.graph.initializers
    gone = [entry.target for entry in signature(model) if entry.kind == BUFFER and entry.target not in stored]
    modules = [name.rpartition(".")[0] for name in gone if name.endswith("running_mean")]
    shown = ", ".join(map(repr, modules[:_SHOWN])) + (f" and {len(modules) - _SHOWN} more" if modules[_SHOWN:] else "")
    folded = f"The exporter folded {shown} into other layers" if modules else "torch's exporters fold and drop them"
    return (
        "training_mode=True: the model has no BatchNormalization with running statistics and no Dropout outside of "
        f"branches and loops, so that there is nothing to switch. {folded}, for inference. Export the module by "
        "onnx_backprop.torch.export, or by torch.onnx.export with dynamo=True, optimize=False, or with dynamo=False, "
        "training=TrainingMode.TRAINING, do_constant_folding=False"
    )


def keep_statistics(
    graph: ir.Graph, frozen: Collection[str], left_out: Collection[str], held: Collection[str]
) -> list[str]:
    """Put each BatchNormalization into inference mode whose scale and bias are frozen; the labels of those nodes.

    frozen: parameters that no step changes. left_out: initializers that are none. held: all that the caller wants left
    as they are. A node whose scale and bias are no parameters is judged by its statistics.
    """
    kept: list[str] = []
    for node in graph:
        if (node.domain, node.op_type) != ("", "BatchNormalization") or not _trains(node) or _computes_statistics(node):
            continue
        scale, bias, mean, var = (_source(value) for value in node.inputs[1:5])
        affine = [name for name in (scale, bias) if name in graph.initializers and name not in left_out]
        if not all(name in held and name in frozen for name in affine) or not (affine or {mean, var} & set(held)):
            continue
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
        _hold_statistics(graph, node)
        kept.append(label(node))
    return kept


def infer_mode(graph: ir.Graph) -> None:
    """Put every Dropout and BatchNormalization into inference mode, the Dropouts that `draw_masks` rewrote too."""
    for node, value in originals(graph, DROPPED, RENEWED, VIEW):
        _replace(graph, node.outputs[0], value)
    for node in list(graph):
        if node.domain == "" and node.op_type == "Dropout" and len(node.inputs) > 2:
            node.resize_inputs(2)
        elif node.domain == "" and node.op_type == "BatchNormalization" and _renews(node):
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
            for place in STATISTICS:
                node.replace_input_with(place, _first_statistic(node, place))
    for node in list(graph):
        if node.domain == "" and node.op_type == "BatchNormalization" and not _trains(node):
            _hold_statistics(graph, node)


def _hold_statistics(graph: ir.Graph, node: ir.Node) -> None:
    """What reads the statistics that a BatchNormalization gives reads those that it takes: no run renews them."""
    for old, place in zip(node.outputs[1:], STATISTICS, strict=False):
        statistic = node.inputs[place]
        if statistic is not None:
            _replace(graph, old, statistic)
    node.resize_outputs(1)


def renew_statistics(graph: ir.Graph, op: Builder) -> dict[ir.Value, ir.Value]:
    """Each running statistic of a BatchNormalization in training mode -> its value after the step.

    Nodes that share statistics renew them one after the other. What is renewed must become an output of the graph
    itself: onnxruntime overwrites the statistics where it is the input of an Identity. Statistics that are computed in
    the graph, as those of weights that are standardised in both modes, are no state: nothing carries them on. Errors:
    UnsupportedError for statistics that are inputs of the graph.
    """
    current: dict[ir.Value, ir.Value] = {}
    for node in [n for n in graph if n.domain == "" and n.op_type == "BatchNormalization" and _renews(n)]:
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        for index, (place, what) in enumerate(zip(STATISTICS, ("mean", "variance"), strict=True), start=1):
            statistic = _as_initializer(graph, node, place)
            new = node.outputs[index]
            if not new.name:
                new.name = op.unique(f"{label(node)}_{what}")
            op.typed(new, statistic)
            if statistic in current:
                node.replace_input_with(place, current[statistic])
            current[statistic] = new
    if inside := [node for node in _inside(graph, "BatchNormalization") if _trains(node)]:
        warn(f"no step renews the running statistics of BatchNormalization {_listed(inside)} in a branch or a loop")
    return current


def _inside(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """The nodes of some operators in branches and in bodies of loops."""
    return [node for body in graph.subgraphs() for node in body if is_standard(node, *op_types)]


def _listed(nodes: list[ir.Node]) -> str:
    shown = ", ".join(repr(label(node)) for node in nodes[:_SHOWN])
    return f"{shown} and {len(nodes) - _SHOWN} more" if nodes[_SHOWN:] else shown


def is_statistic(value: ir.Value) -> bool:
    """Whether a value is a running statistic that a BatchNormalization has renewed."""
    node = value.producer()
    return node is not None and node.domain == "" and node.op_type == "BatchNormalization" and value.index() in (1, 2)


def draw_masks(graph: ir.Graph, op: Builder) -> ir.Value | None:
    """Let every Dropout in training mode draw from numbers that are a function of a seed and the run; the state.

    onnxruntime's own Dropout draws from a generator inside the session, which cannot be saved and put back. Here
    the mask of element i is hash(i, key) < ratio · 2³², with a key from the seed, the number of the run and the node,
    so that a training can be resumed bit for bit. A ratio of 0 draws nothing: such nodes are put into inference mode.
    None when there is no other node.
    """
    dropping = [node for node in graph if node.domain == "" and node.op_type == "Dropout" and _drops(node)]
    for node in dropping:
        if _ratio(node) == 0:
            node.resize_inputs(2)
    nodes = [node for node in dropping if len(node.inputs) > 2]
    if not nodes:
        return None
    state = random_state(op)
    for salt, node in enumerate(nodes):
        start = len(op.nodes)
        op.prefix = label(node)
        x = node.inputs[0]
        assert x is not None
        ratio = _ratio(node)
        dropped = _hash_below(op, x, state, salt, ratio)
        scaled = op.typed(op.Mul(x, 1 / (1 - ratio) if ratio < 1 else 0.0), x)
        y = op.typed(op.Where(dropped, 0.0, scaled), x)
        last = op.nodes[-1]
        last.metadata_props[DROPPED] = str(x.name)
        old = node.outputs[0]
        graph.insert_before(node, op.nodes[start:])
        del op.nodes[start:]
        name = old.name
        _replace(graph, old, y)
        graph.remove(node, safe=True)
        y.name = name
    op.prefix = "grad"
    return state


def random_state(op: Builder) -> ir.Value:
    """A new input for the state of random numbers: a seed, and the number of the run."""
    return ir.Value(name=op.unique(RANDOM_STATE), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([2]))


def _hash_below(op: Builder, x: ir.Value, state: ir.Value, salt: int, ratio: float) -> ir.Value:
    """Whether hash(i, key) < ratio · 2³², for each element i of x, in its shape."""
    limit = min(round(ratio * 2**32), 2**32 - 1)
    ordered = op.Cast(op.BitwiseXor(hashed(op, x, state, salt), 2**31), to=ir.DataType.INT32)  # in the order of int32
    below = as_shaped(op, op.Less(ordered, limit - 2**31), x)
    below.shape = x.shape
    return below


def hashed(op: Builder, x: ir.Value, state: ir.Value, salt: int) -> ir.Value:
    """hash(i, key) for each element i of x, 1-D uint32; key: of the state, a seed and the run, and of a salt.

    Shifts are those of uint32. Sums and products are of int32, whose bits are the same: onnxruntime before 1.22 has
    none of uint32.
    """

    def signed(value: ir.Value | int) -> ir.Value | int:
        if isinstance(value, int):
            return (value + 2**31) % 2**32 - 2**31
        return value if value.dtype == ir.DataType.INT32 else op.Cast(value, to=ir.DataType.INT32)

    def unsigned(value: ir.Value) -> ir.Value:
        return op.Cast(value, to=ir.DataType.UINT32)

    def times(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
        return unsigned(op.Mul(signed(a), signed(b)))

    def plus(a: ir.Value, b: ir.Value | int) -> ir.Value:
        return unsigned(op.Add(signed(a), signed(b)))

    def shifted(h: ir.Value, bits: int) -> ir.Value:
        return op.BitwiseXor(h, op.BitShift(h, bits, direction="RIGHT"))

    def mixed(h: ir.Value) -> ir.Value:
        """The finalizer of MurmurHash3, which changes half of the bits when one of h changes."""
        return shifted(times(shifted(times(shifted(h, 16), 0x85EBCA6B), 13), 0xC2B2AE35), 16)

    words = op.Cast(state, to=ir.DataType.UINT32)
    seed, run = op.Gather(words, 0), op.Gather(words, 1)
    key = mixed(plus(mixed(plus(mixed(plus(seed, 0x9E3779B9)), run)), salt * 0x632BE5AB + 1))
    odd = op.BitwiseOr(mixed(plus(key, 0x7F4A7C15)), 1)
    index = signed(op.Range(0, op.Size(x), 1))
    h = op.BitwiseXor(times(index, 0x9E3779B1), key)
    h = times(shifted(h, 16), odd)  # a multiplier of its own, or two keys would give one sequence, shifted
    return shifted(times(shifted(h, 13), 0xC2B2AE35), 16)


def _trains(node: ir.Node) -> bool:
    return "training_mode" in node.attributes and node.attributes["training_mode"].as_int() == 1


def _renews(node: ir.Node) -> bool:
    """Whether a BatchNormalization is in training mode, with statistics that a training carries on."""
    return _trains(node) and not _computes_statistics(node)


def _computes_statistics(node: ir.Node) -> bool:
    """Whether the statistics that a BatchNormalization reads are results of other nodes than such a one."""
    values = [value for place in STATISTICS if (value := _first_statistic(node, place)) is not None]
    return any(value.producer() is not None and constant_value(value) is None for value in values)


def _first_statistic(node: ir.Node, place: int) -> ir.Value | None:
    """What the first BatchNormalization reads of those that renew a statistic in turn, through Identity nodes too."""
    value = node.inputs[place]
    while value is not None and (earlier := value.producer()) is not None and constant_value(value) is None:
        if is_statistic(value):
            value = earlier.inputs[place]
        elif is_standard(earlier, "Identity"):
            value = earlier.inputs[0]
        else:
            break
    return value


def _source(value: ir.Value | None) -> str:
    """The name of the tensor that Identity nodes hand on."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return "" if value is None else str(value.name)


def _drops(node: ir.Node) -> bool:
    """Whether a Dropout is always in training mode, with a ratio that no run changes and a mask that nobody reads."""
    mode = constant_value(node.inputs[2]) if len(node.inputs) > 2 else None
    if mode is None or not mode.any():
        return False
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise unsupported(
            node,
            "its mask is read by another node or an output, which a training step that can be resumed does not have. "
            "Leave the mask out",
        )
    if len(node.inputs) > 1 and node.inputs[1] is not None and constant_value(node.inputs[1]) is None:
        raise unsupported(
            node, "its ratio is computed in the graph; expected a constant in a training step. Make it an initializer"
        )
    return True


def _ratio(node: ir.Node) -> float:
    value = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    ratio = 0.5 if value is None else float(value.reshape(()))
    if not (math.isfinite(ratio) and 0 <= ratio <= 1):
        raise unsupported(node, f"ratio: expected 0 … 1, got {ratio}")
    return ratio


def _as_initializer(graph: ir.Graph, node: ir.Node, place: int) -> ir.Value:
    """The running statistic that a node reads, as an initializer."""
    value = _first_statistic(node, place)
    array = None if value is None else ir.convenience.get_const_tensor(value)
    if value is None or array is None:
        raise unsupported(
            node, "its running statistics are inputs of the graph; expected initializers, which training can renew"
        )
    if value.is_initializer():
        return value
    values = array.numpy()
    tensor = ir.tensor(values, name=f"{value.name}_initial")
    dtype = ir.TensorType(tensor.dtype)
    lifted = ir.Value(name=tensor.name, type=dtype, shape=ir.Shape(values.shape), const_value=tensor)
    graph.register_initializer(lifted)
    node.replace_input_with(place, lifted)
    return lifted


def _constant(graph: ir.Graph, array: np.ndarray, name: str) -> ir.Value:
    """A Constant node at the start of the graph."""
    op = Builder(used_names(graph))
    value = op.constant(array)
    value.name = op.unique(name)
    graph.insert_before(graph[0], op.nodes)
    return value


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let everything that reads `old` read `new`, outputs of the graph included."""
    if old.is_graph_output():
        name = old.name
        if new.is_graph_input() or new.is_initializer() or new.is_graph_output():
            node = ir.node("Identity", [new], name=f"{name}_kept")
            graph.append(node)
            new = node.outputs[0]
        new.type, new.shape = old.type, old.shape
        for index, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[index] = new
        old.name = f"{name}_before"
        new.name = name
    for user, index in list(old.uses()):
        user.replace_input_with(index, new)
