"""Conv, GRU, LSTM and RNN in other operators: onnxruntime has no kernels for float64, and steps batch better."""

from collections.abc import Sequence
from math import prod

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backprop.converters.prepare.fused.composer import Composer, Expansion
from onnx_backprop.converters.prepare.fused.expand import REFUSED, expand_fused
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_nodes

MOST_CELLS = 2**10  # of the patches of a float32 image
LONGEST = 64  # steps that are written out; an LSTM's nodes are 15 times as many
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def written_out(model: ModelProto, *, steps: bool) -> ModelProto:
    """The model with these of float64 in other operators; steps: and of float32, but large Conv. Itself without any.

    What has a form that is not handled stays: lengths that are unknown, SAME pads, peepholes, other activations.
    """
    standard = next((one.version for one in model.opset_import if not one.domain), 0)
    if standard < 13 or not any(node.op_type in ("Conv", *GATES) for node in all_nodes(model.graph)):
        return model
    result = copied(model)

    def handled(expand: Expansion) -> Expansion:
        def chosen(op: Composer) -> str | Sequence[str | None] | None:
            if not steps and op.known.element(op.input(0)) != TensorProto.DOUBLE:
                raise op.refuse("left to its kernel")
            return expand(op)

        return chosen

    table = {("", "Conv"): handled(_conv), **{("", kind): handled(_recurrent) for kind in GATES}}
    expand_fused(result, {value.name: value.type for value in result.graph.value_info}, table)
    for node in all_nodes(result.graph):
        if node.op_type in ("Conv", *GATES):  # they have rules
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
    if len(known) < len(lengths) or same not in ("NOTSET", "VALID"):
        raise op.refuse("known lengths and explicit pads are handled")
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
    if table.size * channels > MOST_CELLS and op.known.element(x) != TensorProto.DOUBLE:
        raise op.refuse("left to its kernel, which large images do better with")
    patches = op.Gather(op.Reshape(x, [0, channels, -1]), table, axis=2)
    rows = depth * prod(kernel)
    patches = op.Reshape(patches, [0, group, rows, prod(output)])
    y = op.MatMul(op.Reshape(w, [group, filters // group, rows]), patches)
    y = op.Reshape(y, [0, filters, *output])
    return op.Add(y, op.Reshape(b, [filters, *[1] * rank])) if b else y


def _recurrent(op: Composer) -> Sequence[str]:
    """Step by step, with a = W x + R h + b of each gate:
    LSTM: i, o, f = σ(a), k = tanh(a), c' = f c + i k, h' = o tanh(c'); RNN: h' = tanh(a);
    GRU: z, r = σ(a), h' = z h + (1 - z) k with k = tanh(W x + b + R (r h)), or W x + b + r (R h + b) in it.
    """
    kind, (x, w, r, b) = op.node.op_type, map(op.input, range(4))
    starts = [op.input(5), op.input(6) if kind == "LSTM" else ""]
    steps, size = op.known.length(x, 0), op.count("hidden_size")
    orders = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    order = orders.get(op.attribute("direction", "forward"))
    if order is None or not steps or steps > LONGEST:
        raise op.refuse(f"1 to {LONGEST} steps are handled")
    late, gates = kind == "GRU" and op.attribute("linear_before_reset", 0), GATES[kind]

    def of(name: str, n: int) -> str:
        """What a direction has of a tensor of both, with its axis."""
        return name if len(order) == 1 or not name else op.Slice(name, [n], [n + 1], [0])

    every, last, cells = [], [], []
    for n, backwards in enumerate(order):
        inputs, inner = op.MatMul(x, op.Transpose(of(w, n), perm=[0, 2, 1])), ""
        if b:
            outside, inside = op.several("Split", 2, of(b, n), [gates * size] * 2, axis=1)
            if late:
                rest, inner = op.several("Split", 2, inside, [2 * size, size], axis=1)
                inside = op.Concat(rest, op.Sub(inner, inner), axis=1)
            inputs = op.Add(inputs, op.Add(outside, inside))
        recurrence, candidate = op.Transpose(of(r, n), perm=[0, 2, 1]), ""
        parts = op.several("Split", steps, inputs, [1] * steps, axis=0)
        h, c = (of(start, n) for start in starts)
        if kind == "GRU":
            recurrence, candidate = op.several("Split", 2, recurrence, [2 * size, size], axis=2)
        hidden = [""] * steps
        for step in reversed(range(steps)) if backwards else range(steps):
            a, k = parts[step], ""
            if kind == "GRU":
                a, k = op.several("Split", 2, a, [2 * size, size], axis=2)
            if h:
                a = op.Add(a, op.MatMul(h, recurrence))
            if kind == "LSTM":
                i, o, f, k = op.several("Split", 4, a, [size] * 4, axis=2)
                new = op.Mul(op.Sigmoid(i), op.Tanh(k))
                c = op.Add(op.Mul(op.Sigmoid(f), c), new) if c else new
                h = op.Mul(op.Sigmoid(o), op.Tanh(c))
            elif kind == "RNN":
                h = op.Tanh(a)
            else:
                z, reset = op.several("Split", 2, op.Sigmoid(a), [size] * 2, axis=2)
                if late:
                    more = op.MatMul(h, candidate) if h else inner
                    more = op.Add(more, inner) if h and inner else more
                    k = op.Add(k, op.Mul(reset, more)) if more else k
                elif h:
                    k = op.Add(k, op.MatMul(op.Mul(reset, h), candidate))
                k = op.Tanh(k)
                h = op.Add(k, op.Mul(z, op.Sub(h, k))) if h else op.Sub(k, op.Mul(z, k))
            hidden[step] = h
        every.append(op.Unsqueeze(op.Concat(*hidden, axis=0), [1]))
        last.append(h)
        cells.append(c)
    results = [every, last, cells] if kind == "LSTM" else [every, last]
    return [op.Concat(*parts, axis=1 if parts is every else 0) for parts in results]
