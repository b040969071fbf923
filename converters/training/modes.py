"""Dropout and BatchNormalization in training and in inference, and what they carry from one step to the next."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import constant_value, label
from onnx_backprop.opset.core.errors import UnsupportedError

RANDOM_STATE = "random_state"  # int64: the seed, and the number of runs so far
DROPOUT_OF = "onnx_backprop.dropout_of"  # on a node that drops: the name of what it drops from
_RUNNING = (3, 4)  # BatchNormalization's inputs that hold running statistics


def train(graph: ir.Graph) -> None:
    """Put every Dropout and BatchNormalization of the main graph into training mode."""
    nodes = [node for node in graph if node.domain == "" and node.op_type in ("BatchNormalization", "Dropout")]
    yes: ir.Value | None = None
    for node in nodes:
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            continue
        if yes is None:
            yes = _constant(graph, np.array(True), "training_mode")
        node.resize_inputs(3)
        node.replace_input_with(2, yes)


def infer_mode(graph: ir.Graph) -> None:
    """Put every Dropout and BatchNormalization into inference mode, the Dropouts that `draw_masks` rewrote too."""
    for node in list(graph):
        origin = node.metadata_props.get(DROPOUT_OF)
        if origin is not None:
            source = next(v for n in graph for v in (*n.inputs, *n.outputs) if v is not None and v.name == origin)
            _replace(graph, node.outputs[0], source)
        elif node.domain == "" and node.op_type == "Dropout" and len(node.inputs) > 2:
            node.resize_inputs(2)
        elif node.domain == "" and node.op_type == "BatchNormalization" and _trains(node):
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
            for place in _RUNNING:
                statistic = node.inputs[place]
                while statistic is not None and statistic.producer() is not None:
                    earlier = statistic.producer()
                    assert earlier is not None
                    if earlier.op_type != "BatchNormalization":
                        break
                    statistic = earlier.inputs[place]
                node.replace_input_with(place, statistic)
    for node in graph:
        if node.domain == "" and node.op_type == "BatchNormalization":
            node.resize_outputs(1)


def no_parameters(graph: ir.Graph) -> set[ir.Value]:
    """The initializers that are no parameters by nature, in either mode: running statistics, ratios of Dropout."""
    places = {"BatchNormalization": _RUNNING, "Dropout": (1,)}
    return {
        value
        for node in graph
        if node.domain == ""
        for place in places.get(node.op_type, ())
        if place < len(node.inputs) and (value := node.inputs[place]) is not None and value.is_initializer()
    }


def renew_statistics(graph: ir.Graph, op: Builder) -> dict[ir.Value, ir.Value]:
    """Each running statistic of a BatchNormalization in training mode -> its value after the step.

    Nodes that share statistics renew them one after the other. Errors: UnsupportedError for statistics that are
    computed in the graph.
    """
    current: dict[ir.Value, ir.Value] = {}
    for node in [n for n in graph if n.domain == "" and n.op_type == "BatchNormalization" and _trains(n)]:
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        for index, (place, what) in enumerate(zip(_RUNNING, ("mean", "variance"), strict=True), start=1):
            statistic = _as_initializer(graph, node, place)
            new = node.outputs[index]
            if not new.name:
                new.name = op.unique(f"{label(node)}_{what}")
            new.type, new.shape = statistic.type, statistic.shape
            if statistic in current:
                node.replace_input_with(place, current[statistic])
            current[statistic] = new
    return current


def draw_masks(graph: ir.Graph, op: Builder) -> ir.Value | None:
    """Let every Dropout in training mode draw from numbers that are a function of a seed and the run; the state.

    onnxruntime's own Dropout draws from a generator inside the session, which cannot be saved and put back. Here
    the mask of element i is hash(i, key) < ratio · 2³², with a key from the seed, the number of the run and the node,
    so that a training can be resumed bit for bit. None, and nothing changed, when there is no such node.
    """
    nodes = [node for node in graph if node.domain == "" and node.op_type == "Dropout" and _drops(node)]
    if not nodes:
        return None
    state = ir.Value(name=op.unique(RANDOM_STATE), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([2]))
    for salt, node in enumerate(nodes):
        start = len(op.nodes)
        op.prefix = label(node)
        x = node.inputs[0]
        assert x is not None
        ratio = _ratio(node)
        dropped = _hash_below(op, x, state, salt, ratio)
        scaled = op.Mul(x, op.scalar(1 / (1 - ratio) if ratio < 1 else 0.0, x))
        scaled.type, scaled.shape = x.type, x.shape
        y = op.Where(dropped, op.scalar(0.0, x), scaled)
        y.type, y.shape = x.type, x.shape
        assert y.producer() is not None
        last = op.nodes[-1]
        last.metadata_props[DROPOUT_OF] = str(x.name)
        old = node.outputs[0]
        graph.insert_before(node, op.nodes[start:])
        del op.nodes[start:]
        name = old.name
        _replace(graph, old, y)
        graph.remove(node, safe=True)
        y.name = name
    op.prefix = "grad"
    return state


def _hash_below(op: Builder, x: ir.Value, state: ir.Value, salt: int, ratio: float) -> ir.Value:
    """Whether hash(i, key) < ratio · 2³², for each element i of x, in its shape."""
    unsigned = ir.DataType.UINT32.value

    def number(value: int) -> ir.Value:
        return op.constant(np.array(value % 2**32, np.uint32))

    def shifted(h: ir.Value, bits: int) -> ir.Value:
        return op.BitwiseXor(h, op.BitShift(h, number(bits), direction="RIGHT"))

    def mixed(h: ir.Value) -> ir.Value:
        """The finalizer of MurmurHash3, which changes half of the bits when one of h changes."""
        h = op.Mul(shifted(h, 16), number(0x85EBCA6B))
        return shifted(op.Mul(shifted(h, 13), number(0xC2B2AE35)), 16)

    words = op.Cast(state, to=unsigned)
    seed, run = (op.Gather(words, op.constant(np.array(index))) for index in (0, 1))
    key = mixed(op.Add(mixed(op.Add(mixed(op.Add(seed, number(0x9E3779B9))), run)), number(salt * 0x632BE5AB + 1)))
    odd = op.BitwiseOr(mixed(op.Add(key, number(0x7F4A7C15))), number(1))
    zero, one = (op.constant(np.array(n, np.int64)) for n in (0, 1))
    index = op.Cast(op.Range(zero, op.Size(x), one), to=unsigned)
    h = op.BitwiseXor(op.Mul(index, number(0x9E3779B1)), key)
    h = op.Mul(shifted(h, 16), odd)  # a multiplier of its own, or two keys would give one sequence, shifted
    h = shifted(op.Mul(shifted(h, 13), number(0xC2B2AE35)), 16)
    below = op.Less(h, number(min(round(ratio * 2**32), 2**32 - 1)))
    result = op.Reshape(below, op.shape(x), allowzero=1)
    result.type, result.shape = ir.TensorType(ir.DataType.BOOL), x.shape
    return result


def _trains(node: ir.Node) -> bool:
    return "training_mode" in node.attributes and node.attributes["training_mode"].as_int() == 1


def _drops(node: ir.Node) -> bool:
    """Whether a Dropout is always in training mode, with a ratio that no run changes and a mask that nobody reads."""
    mode = constant_value(node.inputs[2]) if len(node.inputs) > 2 else None
    if mode is None or not mode.any():
        return False
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise UnsupportedError(
            "its mask is read by another node or an output, which a training step that can be resumed does not have. "
            "Leave the mask out",
            op_type="Dropout",
            node=label(node),
        )
    if len(node.inputs) > 1 and node.inputs[1] is not None and constant_value(node.inputs[1]) is None:
        raise UnsupportedError(
            "its ratio is computed in the graph; expected a constant in a training step. Make it an initializer",
            op_type="Dropout",
            node=label(node),
        )
    return True


def _ratio(node: ir.Node) -> float:
    value = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    ratio = 0.5 if value is None else float(value.reshape(()))
    if not (math.isfinite(ratio) and 0 <= ratio <= 1):
        raise UnsupportedError(f"ratio: expected 0 … 1, got {ratio}", op_type="Dropout", node=label(node))
    return ratio


def _as_initializer(graph: ir.Graph, node: ir.Node, place: int) -> ir.Value:
    """The running statistic that a node reads, as an initializer."""
    value = node.inputs[place]
    array = None if value is None else ir.convenience.get_const_tensor(value)
    if value is None or array is None:
        raise UnsupportedError(
            "its running statistics are computed in the graph; expected initializers, which training can renew",
            op_type="BatchNormalization",
            node=label(node),
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
    taken = {str(v.name) for n in graph.all_nodes() for v in n.outputs} | {str(v.name) for v in graph.inputs}
    taken |= set(graph.initializers)
    while name in taken:
        name += "_"
    node = ir.node("Constant", [], {"value": ir.tensor(array)}, name=name)
    value = node.outputs[0]
    value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(())
    first = next(iter(graph), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)
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
