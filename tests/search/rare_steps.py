"""Steps of less usual operators, and of usual ones with attributes and inputs that few files have."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.search.generate import Graph, RejectedError, info_of, run_stock, step, wrapped

SMALL = {"Acos": 0.9, "Asin": 0.9, "Atanh": 0.9, "Tan": 1.2}  # operators, and how large their input may be
ALPHAS = "LeakyRelu Elu Celu Selu ThresholdedRelu HardSigmoid Swish"
COORDINATES = "half_pixel pytorch_half_pixel align_corners asymmetric half_pixel_symmetric"


@step(3)
def bounded(g: Graph) -> None:
    op = str(g.pick([*SMALL, "Acosh", "Cosh", "Shrink", "Gelu", "Clip", *ALPHAS.split()]))
    most = SMALL.get(op, 50)
    x = g.value(lambda v: np.abs(v).max(initial=0) < most and (op != "Acosh" or v.min(initial=2) > 1.1))
    if op == "Shrink":
        if g.seen[x].dtype == np.float64:
            raise RejectedError  # onnxruntime computes it in float32
        g.emit(op, [x], bias=0.25, lambd=0.3)
    elif op == "Gelu":
        g.emit(op, [x], approximate="tanh")
    elif op == "Clip":
        form = int(g.rng.integers(3))
        g.emit(op, [x, ["", g.weight(())][form > 0], *([g.weight(())] if form != 1 else [])])
    else:
        g.emit(op, [x], **({"alpha": float(g.pick([0.3, 1.5]))} if op in ALPHAS.split() else {}))


def _reshaped(g: Graph, *shape: int) -> str:
    """A value that has the shape, or a whole number of such for an axis of -1."""
    each = -int(np.prod(shape)) if -1 in shape else int(np.prod(shape))
    x = g.value(lambda v: v.size > 0 and (v.size % each == 0 if -1 in shape else v.size == each))
    return g.emit("Reshape", [x, g.constant(list(shape))])


@step(2)
def moved(g: Graph) -> None:
    op = str(
        g.pick(
            ["DepthToSpace", "SpaceToDepth", "CenterCropPad", "Col2Im", "ReverseSequence", "Unique", "MaxUnpool", "Pad"]
        )
    )
    if op == "DepthToSpace":
        g.emit(op, [_reshaped(g, 1, 4, -1, 1)], blocksize=2, mode=str(g.pick(["DCR", "CRD"])))
    elif op == "SpaceToDepth":
        g.emit(op, [_reshaped(g, 1, 1, 2, -1) if g.chance(0.5) else _reshaped(g, -1, 1, 2, 2)], blocksize=2)
    elif op == "Col2Im":
        g.emit(op, [_reshaped(g, -1, 2, 2), g.constant([2, 2]), g.constant([2, 1])])
    elif op == "MaxUnpool":
        top = g.emit("MaxPool", [_reshaped(g, 1, -1, 2, 2)], 2, kernel_shape=[2, 1], strides=[2, 1])
        g.emit(op, [g.emit("Tanh", [top]), f"{top}_1"], kernel_shape=[2, 1], strides=[2, 1])
    elif op == "ReverseSequence":
        x = g.value(lambda v: v.ndim > 1 and v.size > 0)
        time, batch = g.seen[x].shape[:2]
        g.emit(op, [x, g.constant(g.rng.integers(1, time + 1, batch))], time_axis=0, batch_axis=1)
    else:
        x = g.value(lambda v: v.ndim > 0 and v.size > 0)
        axis = int(g.rng.integers(-g.seen[x].ndim, g.seen[x].ndim))
        if op == "Unique":
            g.emit(op, [x], 4, sorted=int(g.chance(0.7)), **({"axis": axis} if g.chance(0.5) else {}))
        elif op == "Pad":
            g.emit(op, [x, g.constant(g.rng.integers(-1, 3, 2)), g.weight(()), g.constant([axis])])
        else:
            g.emit(op, [x, g.constant([int(g.rng.integers(1, 5))])], axes=[axis])


@step(2.5)
def products(g: Graph) -> None:
    form = int(g.rng.integers(6))
    if form == 0:
        g.emit("Det", [_reshaped(g, -1, 2, 2)])
    elif form == 1:
        x = g.value(lambda v: v.ndim == 2 and v.shape[0] == v.shape[1])
        g.emit("Einsum", [x], equation=str(g.pick(["ii->i", "ii", "ij->ji"])))
    elif form == 2:
        x = g.value(lambda v: v.ndim >= 2 and v.size > 0)
        g.emit("Einsum", [x, g.weight((g.seen[x].shape[-1], 2))], equation="...i,ij->...j")
    elif form == 3:
        x = g.value(lambda v: v.ndim == 2 and v.size > 0)
        n, m = g.seen[x].shape
        g.emit(
            "Einsum",
            [x, g.weight((m, 2)), g.weight((n,))],
            equation=str(g.pick(["ij,jk,i->k", "ij,jk,i", "ij,jk,i->ijk"])),
        )
    elif form == 4:
        x = g.value(lambda v: v.ndim > 0 and v.size > 0)
        g.emit("CumProd", [x, g.constant(-1)], exclusive=int(g.chance(0.3)), reverse=int(g.chance(0.3)))
    else:
        x = g.value(lambda v: v.ndim > 0 and v.size > 0)
        row = g.emit("Reshape", [x, g.constant([1, -1, 1])])
        if g.opset >= 20:
            g.emit("DFT", [row, "", g.constant(1)], onesided=int(g.chance(0.4)))
        else:
            g.emit("DFT", [row], axis=1, inverse=int(g.chance(0.4)))


@step(2)
def attention(g: Graph) -> None:
    """Heads of a 4-D value, or those that attributes cut of a 3-D one; masks, past keys, grouped queries."""
    x = g.value(lambda v: v.ndim in (3, 4) and v.size > 0)
    shape, last = g.seen[x].shape, int(g.rng.integers(1, 4))
    length = int(g.rng.integers(1, 4))
    attributes: dict[str, object] = {"scale": 0.5} if g.chance(0.3) else {}
    attributes |= {"is_causal": 1} if g.chance(0.3) else {}
    attributes |= {"softcap": 2.0} if g.chance(0.2) else {}
    if len(shape) == 3:
        heads = int(g.pick([n for n in (1, 2, 3) if shape[2] % n == 0]))
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads}
        others = [g.weight((shape[0], length, shape[2])), g.weight((shape[0], length, heads * last))]
    else:
        heads = int(g.pick([n for n in (1, 2, 3, 4) if shape[1] % n == 0]))
        others = [g.weight((shape[0], heads, length, shape[3])), g.weight((shape[0], heads, length, last))]
    if g.chance(0.4):
        mask = (
            g.constant(g.rng.random((shape[-2], length)) < 0.7, np.bool_)
            if g.chance(0.4)
            else g.weight((shape[-2], length))
        )
        others.append(mask)
    g.emit("Attention", [x, *others], **attributes)


@step(2.5)
def sampled(g: Graph) -> None:
    x = g.value(lambda v: v.ndim == 4 and v.size > 0)
    n, c, *space = g.seen[x].shape
    form = int(g.rng.integers(5))
    if form == 0:
        names = ("linear", "nearest", "cubic") if g.opset >= 20 else ("bilinear", "nearest", "bicubic")
        grid = g.weight((n, 2, 2, 2))
        if g.opset >= 20 and g.chance(0.4):
            grid = g.emit(
                "AffineGrid", [g.weight((n, 2, 3)), g.constant([n, c, 2, 2])], align_corners=int(g.chance(0.5))
            )
        padding = str(g.pick(["zeros", "border", "reflection"]))
        g.emit("GridSample", [x, grid], mode=str(g.pick(names)), padding_mode=padding, align_corners=int(g.chance(0.5)))
    elif form == 1:
        rois = g.constant([[0.1, 0.2, 1.3, 1.7], [0, 0.4, 1.1, 0.9]], g.seen[x].dtype.type)
        g.unread.add(rois)  # which get no gradient
        batch = g.constant(g.rng.integers(0, n, 2))
        g.emit("RoiAlign", [x, rois, batch], output_height=2, output_width=2, mode=str(g.pick(["avg", "max"])))
    elif form == 2:
        if min(space) < 2:
            raise RejectedError  # no cells
        offsets = g.weight((n, 8, *(s - 1 for s in space)))
        g.emit("DeformConv", [x, g.weight((2, c, 2, 2)), offsets], kernel_shape=[2, 2])
    elif form == 3:
        kinds = {
            "mode": str(g.pick(["linear", "cubic"])),
            "coordinate_transformation_mode": str(g.pick(COORDINATES.split())),
        }
        kinds |= {"antialias": 1} if g.opset >= 18 and g.chance(0.4) else {}
        g.emit("Resize", [x, "", "", g.constant([n, c, *g.rng.integers(1, 4, 2)])], **kinds)
    else:
        g.emit("LpPool", [x], kernel_shape=[min(2, s) for s in space], p=int(g.pick([1, 2, 3])))


@step(2.5)
def layered(g: Graph) -> None:
    """Layers with the attributes and inputs that `layers` leaves out."""
    x = g.value(lambda v: 3 <= v.ndim <= 4 and v.size > 0)
    _, c, *space = g.seen[x].shape
    kernel, form = [min(2, s) for s in space], int(g.rng.integers(7))
    if form == 0:
        pads = (
            {"auto_pad": str(g.pick(["SAME_UPPER", "SAME_LOWER", "VALID"]))}
            if g.chance(0.5)
            else {"dilations": [2] * len(space), "pads": [1] * 2 * len(space)}
        )
        g.emit("Conv", [x, g.weight((2, c, *kernel))], **pads)
    elif form == 1:
        forms = {"output_padding": [1] * len(space), "pads": [1, 0] * len(space), "auto_pad": "SAME_UPPER"}
        name = str(g.pick([*forms]))
        g.emit("ConvTranspose", [x, g.weight((c, 2, *kernel))], strides=[2] * len(space), **{name: forms[name]})
    elif form == 2:
        g.emit("AveragePool", [x], kernel_shape=kernel, pads=[k - 1 for k in kernel * 2], count_include_pad=1)
    elif form == 3:
        g.emit("MaxPool", [x], 2, kernel_shape=kernel, strides=[2] * len(space), ceil_mode=int(g.chance(0.5)))
    elif form == 4:
        axis = int(g.rng.integers(1, g.seen[x].ndim))
        w = [g.weight(g.seen[x].shape[axis:]) for _ in range(1 + int(g.chance(0.5)))]
        op = "RMSNormalization" if g.opset >= 23 and g.chance(0.5) else "LayerNormalization"
        g.emit(op, [x, *w[: 1 if op[0] == "R" else 2]], 1 if op[0] == "R" else 3, axis=axis, epsilon=0.1)
    elif form == 5:
        w = [g.weight((c,), tied=0), g.weight((c,), tied=0), g.weight((c,), tied=0), g.weight((c,), 0.5, 2, tied=0)]
        g.emit("BatchNormalization", [x, *w], 3, training_mode=1, epsilon=0.1)
        g.unread.update(w[2:])  # onnxruntime overwrites them, for other readers and for later iterations too
        g.unread.update(g.nodes[-1].output[1:] if g.outer else ())
    else:
        spread = g.value(lambda v: v.ndim == 4 and v.size > 0 and v.std(axis=(0, 2, 3)).min() > 0.2)
        g.emit("MeanVarianceNormalization", [spread])


@step(1.5)
def losses(g: Graph) -> None:
    x = g.value(lambda v: v.ndim in (2, 3) and v.size > 0)
    n, c, *rest = g.seen[x].shape
    labels = g.constant(g.rng.integers(0, c, (n, *rest)))
    more = [g.weight((c,), 0.5, 2)] if g.chance(0.4) else []
    attributes = {"reduction": str(g.pick(["mean", "sum", "none"]))} | ({"ignore_index": 0} if g.chance(0.3) else {})
    if g.chance(0.6):
        g.emit("SoftmaxCrossEntropyLoss", [x, labels, *more], 1 + int(g.chance(0.3)), **attributes)
    else:
        g.emit("NegativeLogLikelihoodLoss", [g.emit("LogSoftmax", [x], axis=1), labels, *more], **attributes)


@step(1.5)
def recurrent_states(g: Graph) -> None:
    """Recurrent layers with lengths, initial states, peepholes, batches first, and other activations."""
    x = g.value(lambda v: v.ndim == 3 and v.size > 0)
    layout, hidden = int(g.chance(0.2)), 2
    (time, batch, inputs), (op, gates) = g.seen[x].shape, [("RNN", 1), ("GRU", 3), ("LSTM", 4)][int(g.rng.integers(3))]
    if layout:
        time, batch = batch, time
    w = [g.weight((1, gates * hidden, k)) for k in (inputs, hidden)]
    state = (batch, 1, hidden) if layout else (1, batch, hidden)
    optional = [
        g.weight((1, 2 * gates * hidden)) if g.chance(0.6) else "",
        g.constant(g.rng.integers(1, time + 1, batch), np.int32) if g.chance(0.4) else "",
        g.weight(state) if g.chance(0.6) else "",
    ]
    if op == "LSTM":
        optional += [g.weight(state) if g.chance(0.6) else "", g.weight((1, 3 * hidden)) if g.chance(0.4) else ""]
    attributes: dict[str, object] = {"direction": str(g.pick(["forward", "reverse"])), "hidden_size": hidden}
    attributes |= {"layout": 1} if layout else {}
    if op == "GRU":
        attributes["linear_before_reset"] = int(g.chance(0.5))
    if op == "RNN" and g.chance(0.5):
        attributes["activations"] = [str(g.pick(["Relu", "Sigmoid", "Softsign"]))]
    g.emit(op, [x, *w, *optional], 3 if op == "LSTM" else 2, **attributes)


@step(1)
def quantized_weights(g: Graph) -> None:
    if g.depth:
        raise RejectedError  # of a branch that it takes apart onnxruntime does not find the scale
    x = g.value(lambda v: v.ndim > 0 and v.size > 0)
    n = g.seen[x].shape[-1]
    stored = g.constant(g.rng.integers(-9, 9, (n, 2)), np.int8)
    scale = g.weight((2,), 0.1, 1) if g.chance(0.5) else g.weight((), 0.1, 1)
    g.emit("MatMul", [x, g.emit("DequantizeLinear", [stored, scale], axis=1)])


@step(1)
def longer_sequences(g: Graph) -> None:
    """SequenceInsert, SequenceErase and Optional, from one value to another."""
    x = g.value(lambda v: v.ndim > 0 and v.size > 0)
    y = g.value(lambda v: v.dtype == g.seen[x].dtype and v.shape == g.seen[x].shape)
    a, b, c, d = (f"{g.name('q')}_{n}" for n in range(4))
    at = g.constant(int(g.rng.integers(0, 2)))
    make = helper.make_node("SequenceConstruct", [x, y], [a], name=a)
    change = helper.make_node("SequenceInsert", [a, x, at] if g.chance(0.5) else [a, y], [b], name=b)
    if g.chance(0.4):
        change = helper.make_node("SequenceErase", [a, at], [b], name=b)
    nodes = [make, change]
    if g.opset >= 15 and g.chance(0.3):
        nodes += [
            helper.make_node("Optional", [b], [c], name=c),
            helper.make_node("OptionalGetElement", [c], [d], name=d),
        ]
    end = nodes[-1].output[0]
    take = helper.make_node("ConcatFromSequence", [end], [f"{a}_"], name=f"{a}_", axis=0, new_axis=int(g.chance(0.5)))
    infos = [info_of(n, g.seen[n]) for n in dict.fromkeys([x, y, at])]
    graph = helper.make_graph([*nodes, take], "g", infos, [helper.make_empty_tensor_value_info(f"{a}_")])
    try:
        (result,) = run_stock(wrapped(graph, g.opset), g.seen)
    except Exception as e:  # noqa: BLE001 - of many classes
        raise RejectedError(str(e)) from None
    if result.ndim > 5 or result.size > 200:
        raise RejectedError
    g.seen[f"{a}_"] = result
    g.nodes += [*nodes, take]


@step(1)
def like_another(g: Graph) -> None:
    """CastLike, TensorScatter, ScatterElements by max and product: what copies, types and ties do."""
    x = g.value(lambda v: v.ndim > 0 and v.size > 0)
    form = int(g.rng.integers(3))
    if form == 0:
        g.emit("CastLike", [x, g.value(lambda v: v.size > 0)])
    elif form == 1:
        shape = list(g.seen[x].shape)
        places = g.rng.integers(0, shape[-2] if len(shape) > 1 else 1, shape[0])
        g.emit("TensorScatter", [x, g.weight((*shape[:-2], 1, *shape[-1:])), g.constant(places)])
    else:
        index = g.constant(g.rng.integers(0, g.seen[x].shape[0], g.seen[x].shape))
        g.emit(
            "ScatterElements",
            [x, index, g.weight(g.seen[x].shape)],
            axis=0,
            reduction=str(g.pick(["mul", "max", "min", "add"])),
        )
