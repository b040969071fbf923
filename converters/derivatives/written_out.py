"""Conv and LSTM in other operators: onnxruntime has no kernels for them in float64, and steps batch better."""

from collections.abc import Sequence
from math import prod

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backprop.converters.prepare.fused.composer import Composer, Expansion
from onnx_backprop.converters.prepare.fused.expand import REFUSED, expand_fused
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_nodes

LONGEST = 64  # steps that an LSTM is written out for; its nodes are 15 times as many


def written_out(model: ModelProto, *, steps: bool) -> ModelProto:
    """The model with Conv and LSTM of float64 in other operators; steps: and LSTM of float32. Itself without any.

    What has a form that is not handled stays: lengths that are unknown, SAME pads, peepholes, other activations.
    """
    standard = next((one.version for one in model.opset_import if not one.domain), 0)
    if standard < 13 or not any(node.op_type in ("Conv", "LSTM") for node in all_nodes(model.graph)):
        return model
    result = copied(model)

    def lstm(op: Composer) -> Sequence[str]:
        if not steps and op.known.element(op.input(0)) != TensorProto.DOUBLE:
            raise op.refuse("left to its kernel")
        return _lstm(op)

    table: dict[tuple[str, str], Expansion] = {("", "Conv"): _conv, ("", "LSTM"): lstm}
    expand_fused(result, {value.name: value.type for value in result.graph.value_info}, table)
    for node in all_nodes(result.graph):
        if node.op_type in ("Conv", "LSTM"):  # they have rules
            assign(node.metadata_props, [entry for entry in node.metadata_props if entry.key != REFUSED])
    same = sum(1 for _ in all_nodes(result.graph)) == sum(1 for _ in all_nodes(model.graph))
    return model if same else result


def _conv(op: Composer) -> str:
    """y = W · patches + b, patches (N, groups, C/groups · taps, places) being gathered of x (N, C, …)."""
    x, w, b = map(op.input, range(3))
    rank = (op.known.rank(w) or 2) - 2
    lengths = [op.known.length(x, axis) for axis in range(1, rank + 2)]
    lengths += [op.known.length(w, axis) for axis in range(rank + 2)]
    strides, dilations = (op.attribute(name, [1] * rank) for name in ("strides", "dilations"))
    pads, group = op.attribute("pads", [0] * 2 * rank), op.attribute("group", 1)
    same = op.attribute("auto_pad", "NOTSET")
    op.attribute("kernel_shape")
    known = [length for length in lengths if length]
    if op.known.element(x) != TensorProto.DOUBLE or len(known) < len(lengths) or same not in ("NOTSET", "VALID"):
        raise op.refuse("float64, known lengths and explicit pads are handled")
    channels, image, (filters, depth, *kernel) = known[0], known[1 : rank + 1], known[rank + 1 :]
    if any(pads):
        x = op.Pad(x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    image = [length + pads[n] + pads[n + rank] for n, length in enumerate(image)]
    taps = np.indices(kernel).reshape(rank, -1, 1) * np.reshape(dilations, (rank, 1, 1))
    output = [
        (length - dilation * (size - 1) - 1) // stride + 1
        for length, dilation, size, stride in zip(image, dilations, kernel, strides, strict=True)
    ]
    places = np.indices(output).reshape(rank, 1, -1) * np.reshape(strides, (rank, 1, 1))
    table = np.ravel_multi_index(tuple(taps + places), image).astype(np.int64)
    patches = op.Gather(op.Reshape(x, [0, channels, -1]), table, axis=2)
    rows = depth * prod(kernel)
    patches = op.Reshape(patches, [0, group, rows, prod(output)])
    y = op.MatMul(op.Reshape(w, [group, filters // group, rows]), patches)
    y = op.Reshape(y, [0, filters, *output])
    return op.Add(y, op.Reshape(b, [filters, *[1] * rank])) if b else y


def _lstm(op: Composer) -> Sequence[str]:
    """i, o, f = σ(a), k = tanh(a), a = W x + R h + b; c' = f c + i k, h' = o tanh(c'), step by step."""
    x, w, r, b = map(op.input, range(4))
    starts = [op.input(5), op.input(6)]
    steps, size = op.known.length(x, 0), op.count("hidden_size")
    orders = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    order = orders.get(op.attribute("direction", "forward"))
    if order is None or not steps or steps > LONGEST:
        raise op.refuse(f"1 to {LONGEST} steps are handled")

    def of(name: str, n: int) -> str:
        """What a direction has of a tensor of both, with its axis."""
        return name if len(order) == 1 or not name else op.Slice(name, [n], [n + 1], [0])

    every, last, cells = [], [], []
    for n, backwards in enumerate(order):
        inputs = op.MatMul(x, op.Transpose(of(w, n), perm=[0, 2, 1]))
        if b:
            biases = op.several("Split", 2, of(b, n), [4 * size, 4 * size], axis=1)
            inputs = op.Add(inputs, op.Add(*biases))
        recurrence = op.Transpose(of(r, n), perm=[0, 2, 1])
        parts = op.several("Split", steps, inputs, [1] * steps, axis=0)
        h, c = (of(start, n) for start in starts)
        hidden = [""] * steps
        for step in reversed(range(steps)) if backwards else range(steps):
            a = op.Add(parts[step], op.MatMul(h, recurrence)) if h else parts[step]
            i, o, f, k = op.several("Split", 4, a, [size] * 4, axis=2)
            new = op.Mul(op.Sigmoid(i), op.Tanh(k))
            c = op.Add(op.Mul(op.Sigmoid(f), c), new) if c else new
            h = hidden[step] = op.Mul(op.Sigmoid(o), op.Tanh(c))
        every.append(op.Unsqueeze(op.Concat(*hidden, axis=0), [1]))
        last.append(h)
        cells.append(c)
    return [op.Concat(*every, axis=1), op.Concat(*last, axis=0), op.Concat(*cells, axis=0)]
