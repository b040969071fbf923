"""Steps that a random graph grows by, each a node or a few."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.search.generate import Graph, RejectedError, step

SMOOTH = "Tanh Sigmoid Softplus Erf Softsign Sin Cos Atan Exp Neg Identity Mish Gelu Sinh Asinh Reciprocal Log Sqrt"
PIECES = "Relu Abs Elu Selu LeakyRelu HardSigmoid HardSwish Celu ThresholdedRelu Floor Sign Clip Round Dropout"
REDUCTIONS = "Sum Mean Max Min Prod L1 L2 SumSquare LogSumExp LogSum"


@step(8)
def unary(g: Graph) -> None:
    op = str(g.pick([*SMOOTH.split() * 2, *PIECES.split()]))
    holds = {"Log": lambda v: v.min(initial=1) > 0.05, "Sqrt": lambda v: v.min(initial=1) > 0.05}
    g.emit(op, [g.value(holds.get(op, lambda _: True))])


def _fitting(g: Graph, x: str, *, low: float = -1, high: float = 1) -> str:
    """Something that broadcasts with x: a value, a weight of fewer, more or shorter axes, or a number."""
    shape = g.seen[x].shape
    if g.chance(0.4):

        def fits(v: np.ndarray) -> bool:
            try:
                return (
                    v.dtype == g.seen[x].dtype
                    and len(np.broadcast_shapes(v.shape, shape)) >= 0
                    and v.min(initial=low) >= low
                )
            except ValueError:
                return False

        return g.value(fits)
    axes = [1 if g.chance(0.25) else n for n in shape[int(g.rng.integers(len(shape) + 1)) if g.chance(0.5) else 0 :]]
    if g.chance(0.1):
        axes = [int(g.rng.integers(1, 3)), *([1] * (len(shape) - len(axes))), *axes]
    return g.weight(axes, low, high)


@step(10)
def binary(g: Graph) -> None:
    op = str(g.pick(["Add", "Add", "Sub", "Mul", "Mul", "Div", "Pow", "Max", "Min", "PRelu", "Mod"]))
    x = g.value(lambda v: op != "Pow" or v.min(initial=1) > 0.1)
    y = _fitting(g, x, low=0.5 if op in ("Div", "Mod") else -1, high=2)
    if op == "PRelu" and np.broadcast_shapes(g.seen[x].shape, g.seen[y].shape) != g.seen[x].shape:
        raise RejectedError  # onnxruntime takes it, ONNX does not
    pair = [x, y] if op in ("Pow", "PRelu", "Div", "Mod") or g.chance(0.5) else [y, x]
    g.emit(op, pair, **({"fmod": 1} if op == "Mod" else {}))


@step(3)
def variadic(g: Graph) -> None:
    x = g.value()
    g.emit(str(g.pick(["Sum", "Mean", "Max", "Min"])), [x, _fitting(g, x), x if g.chance(0.3) else _fitting(g, x)])


@step(4)
def reduction(g: Graph) -> None:
    op, x = "Reduce" + str(g.pick(REDUCTIONS.split())), g.value()
    rank = g.seen[x].ndim
    axes = [int(a) for a in np.flatnonzero(g.rng.random(rank) < 0.5)]
    axes = [a - rank if g.chance(0.3) else a for a in axes]
    keep = {"keepdims": int(g.chance(0.5))}
    if op == "ReduceSum" or g.opset >= 18:
        g.emit(
            op, [x, g.constant(axes)] if axes else [x], **keep, **({"noop_with_empty_axes": 1} if g.chance(0.1) else {})
        )
    else:
        g.emit(op, [x], **keep, **({"axes": axes} if axes else {}))


@step(4)
def along_axis(g: Graph) -> None:
    op, x = (
        str(g.pick(["Softmax", "LogSoftmax", "LpNormalization", "CumSum", "Hardmax", "ArgMax", "TopK"])),
        g.value(lambda v: v.ndim > 0),
    )
    axis = int(g.rng.integers(-g.seen[x].ndim, g.seen[x].ndim))
    if op == "CumSum":
        g.emit(op, [x, g.constant(axis)], exclusive=int(g.chance(0.3)), reverse=int(g.chance(0.3)))
    elif op == "TopK":
        g.emit(op, [x, g.constant([int(g.rng.integers(1, 3))])], 2, axis=axis, largest=int(g.chance(0.5)))
    else:
        g.emit(op, [x], axis=axis)


@step(6)
def product(g: Graph) -> None:
    x = g.value(lambda v: 1 <= v.ndim <= 4)
    shape, form = [*g.seen[x].shape], int(g.rng.integers(6))
    out = int(g.rng.integers(1, 5))
    if form == 0 and len(shape) == 2:
        transA, transB = int(g.chance(0.3)), int(g.chance(0.5))
        k, m = shape[not transA], shape[transA]
        w = g.weight((out, k) if transB else (k, out))
        rest = (
            [g.weight([(), (out,), (1, out), (m, 1), (m, out), (1,)][int(g.rng.integers(6))])] if g.chance(0.7) else []
        )
        g.emit(
            "Gemm",
            [x, w, *rest],
            transA=transA,
            transB=transB,
            alpha=float(g.rng.choice([1, 0.5])),
            beta=float(g.rng.choice([1, 2])),
        )
    elif form == 1 and len(shape) >= 2:
        g.emit("MatMul", [g.weight((out, shape[-2])), x])
    elif form == 2:
        turned = any(x in node.output and node.op_type == "Transpose" for node in g.nodes)  # onnxruntime forgets it
        vector = not g.chance(0.5) and not turned
        g.emit("MatMul", [x, g.weight((shape[-1],) if vector else (*shape[:-2], shape[-1], out))])
    elif form == 3 and len(shape) >= 2 and g.seen[x].size:  # onnxruntime divides by the length of an axis
        letters = "abcde"[: len(shape)]
        kept = [str(n) for n in g.rng.permutation(list(letters[:-1])) if g.chance(0.7)]
        g.emit("Einsum", [x, g.weight((shape[-1], out))], equation=f"{letters},{letters[-1]}z->{''.join(kept)}z")
    elif form == 4:
        y = g.value(lambda v: v.ndim >= 1 and v.dtype == g.seen[x].dtype and v.shape[-1] == shape[-1])
        rank = g.seen[y].ndim
        turned = g.emit("Transpose", [y], perm=[*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else y
        g.emit("MatMul", [x, turned])
    else:
        g.emit("MatMul", [x, g.weight((shape[-1], out))])


@step(7)
def shaped(g: Graph) -> None:
    x = g.value(lambda v: v.size > 0)
    array = g.seen[x]
    shape, rank = array.shape, array.ndim
    axis = int(g.rng.integers(-rank, rank)) if rank else 0
    op = str(
        g.pick(
            [
                "Transpose",
                "Reshape",
                "Flatten",
                "Unsqueeze",
                "Squeeze",
                "Expand",
                "Tile",
                "Slice",
                "Pad",
                "Split",
                "Concat",
                "Shape",
                "Trilu",
                "Compress",
            ]
        )
    )
    if op == "Transpose":
        g.emit(op, [x], perm=[int(a) for a in g.rng.permutation(rank)])
    elif op == "Reshape":
        shapes = [(-1,), (1, *shape), (0, -1), (*shape[:-2], -1), shape[::-1], (*shape, 1)]
        g.emit(op, [x, g.constant(shapes[int(g.rng.integers(6))])])
    elif op == "Shape":  # lengths that are computed
        n = g.emit("Shape", [x])
        if g.chance(0.5):
            first = g.emit("Gather", [n, g.constant([0])])
            g.emit("Reshape", [x, g.emit("Concat", [first, g.constant([-1])], axis=0)])
        elif g.chance(0.5):
            g.emit("Expand", [g.weight((1,) * rank), n])
        else:
            g.emit("Mul", [x, g.emit("Cast", [g.emit("ReduceProd", [n], keepdims=0)], to=_type(g))])
    elif op == "Flatten":
        g.emit(op, [x], axis=int(g.rng.integers(-rank, rank + 1)))
    elif op == "Unsqueeze":
        g.emit(op, [x, g.constant([axis])])
    elif op == "Squeeze":
        ones = [a for a, n in enumerate(shape) if n == 1]
        g.emit(op, [x, g.constant(ones[:1])] if g.chance(0.6) else [x])
    elif op == "Expand":
        g.emit(op, [x, g.constant([2, *shape] if g.chance(0.3) else [3 if n == 1 else 1 for n in shape])])
    elif op == "Tile":
        g.emit(op, [x, g.constant([int(n) for n in g.rng.integers(1, 3, rank)])])
    elif op == "Slice":
        pieces = [([0], [1], 1), ([1], [2**40], 1), ([-1], [-(2**40)], -1), ([0], [2**31 - 1], 2), ([-2], [2**40], 1)]
        start, end, by = pieces[int(g.rng.integers(5))]
        g.emit(op, [x, g.constant(start), g.constant(end), g.constant([axis]), g.constant([by])])
    elif op == "Pad":
        mode = str(
            g.pick(["constant", "reflect", "edge", "wrap"] if g.opset >= 19 else ["constant", "reflect", "edge"])
        )
        low = -1 if mode == "constant" else 0
        g.emit(op, [x, g.constant(g.rng.integers(low, 2, 2 * rank))], mode=mode)
    elif op == "Split":
        if rank and shape[axis] < 2:
            raise RejectedError
        cut = int(g.rng.integers(1, max(2, shape[axis] if rank else 2)))
        g.emit(op, [x, g.constant([cut, shape[axis] - cut] if rank else [1])], 2, axis=axis)
    elif op == "Concat":
        along = axis % max(rank, 1)
        rest = (*shape[:along], *shape[along + 1 :])
        other = g.value(
            lambda v: (v.dtype, v.ndim, (*v.shape[:along], *v.shape[along + 1 :])) == (array.dtype, rank, rest)
        )
        g.emit(op, [x, other, x] if g.chance(0.3) else [other, x], axis=axis)
    elif op == "Compress":
        g.emit(op, [x, g.constant(g.rng.random(shape[axis] if rank else 1) < 0.7, np.bool_)], axis=axis)
    else:
        g.emit(op, [x], upper=int(g.chance(0.5)))


def _type(g: Graph) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(g.dtype))


@step(4)
def indexed(g: Graph) -> None:
    x = g.value(lambda v: v.ndim > 0 and v.size > 0)
    array = g.seen[x]
    axis = int(g.rng.integers(-array.ndim, array.ndim))
    n, op = (
        array.shape[axis],
        str(g.pick(["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot", "Table"])),
    )
    if op == "Gather":
        shape = [(), (2,), (1, 3), (n,)][int(g.rng.integers(4))]
        g.emit(op, [x, g.constant(g.rng.integers(-n, n, shape))], axis=axis)
    elif op in ("GatherElements", "ScatterElements"):
        shape = tuple(max(1, d - int(g.chance(0.3))) for d in array.shape)
        index = g.constant(
            g.rng.permuted(
                np.broadcast_to(
                    np.arange(n).reshape([-1] + [1] * (-axis - 1 if axis < 0 else array.ndim - axis - 1)), array.shape
                ),
                axis=axis,
            )[tuple(map(slice, shape))]
        )
        reduce = {"reduction": "add"} if g.opset >= 16 and g.chance(0.4) else {}
        g.emit(
            op, [x, index, *([g.weight(shape)] if op[0] == "S" else [])], axis=axis, **(reduce if op[0] == "S" else {})
        )
    elif op in ("GatherND", "ScatterND"):
        index = g.rng.permutation(array.shape[0])[: int(g.rng.integers(1, 3))].reshape(-1, 1)
        reduce = {"reduction": "add"} if g.opset >= 16 and g.chance(0.4) else {}
        update = [g.weight((len(index), *array.shape[1:]))] if op[0] == "S" else []
        g.emit(op, [x, g.constant(index), *update], **(reduce if update else {}))
    elif op == "Table":
        i = g.value(lambda v: v.size > 0 and v.min() >= 0 and v.max() < 6 and v.ndim < 4, "i")
        g.emit("Gather", [g.weight((6, 3)), i])
    else:
        i = g.emit("ArgMax", [x], axis=axis, keepdims=0)
        g.emit("OneHot", [i, g.constant(n), g.weight((2,))], axis=-1)


@step(4)
def logic(g: Graph) -> None:
    x = g.value()
    y = _fitting(g, x)
    condition = g.emit(str(g.pick(["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"])), [x, y])
    if g.chance(0.3):
        condition = g.emit("Not", [condition])
    if g.chance(0.6):
        g.emit("Where", [condition, *([x, y] if g.chance(0.5) else [_fitting(g, x), x])])
    else:
        number = g.emit("Cast", [condition], to=int(g.rng.choice([_type(g), TensorProto.INT64, TensorProto.INT32])))
        if g.seen[number].dtype.kind == "f":
            g.emit("Mul", [number, x])


@step(1.5)
def integers(g: Graph) -> None:
    i = g.value(kind="i")
    form = int(g.rng.integers(4))
    if form == 0:
        g.emit("Cast", [i], to=_type(g))
    elif form == 1:
        g.emit("Add", [i, g.constant(np.asarray(1), g.seen[i].dtype.type)])
    elif form == 2:
        g.emit("Cast", [g.value()], to=TensorProto.INT64)
    else:
        g.emit("Mul", [i, i])


@step(1.5)
def casts(g: Graph) -> None:
    x = g.value()
    there = g.emit("Cast", [x], to=TensorProto.DOUBLE if g.seen[x].dtype == np.float32 else TensorProto.FLOAT)
    if g.chance(0.7):
        g.emit("Cast", [g.emit(str(g.pick(["Tanh", "Neg", "Exp", "Relu"])), [there])], to=_type(g))


@step(5)
def layers(g: Graph) -> None:
    """What has channels on axis 1, and normalisation over the last axis."""
    x = g.value(lambda v: 2 <= v.ndim <= 4 and v.size > 0)
    if g.seen[x].ndim == 2 and g.chance(0.7):
        x = g.emit("Reshape", [x, g.constant([0, 0, -1] if g.chance(0.5) else [0, -1, 1])])
    _, c, *space = g.seen[x].shape
    last, op = (
        g.seen[x].shape[-1],
        str(
            g.pick(
                [
                    "Conv",
                    "Conv",
                    "ConvTranspose",
                    "MaxPool",
                    "AveragePool",
                    "Global",
                    "Batch",
                    "Instance",
                    "Layer",
                    "Group",
                    "LRN",
                    "Resize",
                    "Lp",
                ]
            )
        ),
    )
    kernel = [min(2, s) for s in space]
    group = c if g.chance(0.3) else 1
    out = group * int(g.rng.integers(1, 3))
    pads = [int(p) for p in g.rng.integers(0, 2, 2 * len(space))]
    if op == "Conv":
        bias = [g.weight((out,))] if g.chance(0.6) else []
        g.emit(
            op,
            [x, g.weight((out, c // group, *kernel)), *bias],
            group=group,
            pads=pads,
            strides=[int(g.rng.integers(1, 3))] * len(space),
        )
    elif op == "ConvTranspose":
        bias = [g.weight((out,))] if g.chance(0.6) else []
        g.emit(
            op,
            [x, g.weight((c, out // group, *kernel)), *bias],
            group=group,
            strides=[int(g.rng.integers(1, 3))] * len(space),
        )
    elif op in ("MaxPool", "AveragePool"):
        g.emit(
            op,
            [x],
            kernel_shape=kernel,
            pads=[min(p, k - 1) for p, k in zip(pads, kernel * 2, strict=True)],
            ceil_mode=int(g.chance(0.3)),
        )
    elif op in ("Global", "Lp"):
        g.emit(f"Global{g.pick(['Average', 'Max']) if op == 'Global' else 'Lp'}Pool", [x])
    elif op == "Batch":
        w = [g.weight((c,), tied=0), g.weight((c,), tied=0), g.weight((c,), tied=0), g.weight((c,), 0.5, 2, tied=0)]
        g.emit("BatchNormalization", [x, *w])
    elif op == "Instance":
        g.emit("InstanceNormalization", [x, g.weight((c,)), g.weight((c,))], epsilon=0.1)
    elif op == "Layer":
        g.emit(
            "LayerNormalization", [x, g.weight((last,)), *([g.weight((last,))] if g.chance(0.6) else [])], epsilon=0.1
        )
    elif op == "Group":
        g.emit(
            "GroupNormalization", [x, g.weight((c,)), g.weight((c,))], num_groups=c if g.chance(0.5) else 1, epsilon=0.1
        )
    elif op == "LRN":
        g.emit(op, [x], size=3)
    else:
        scales = g.constant([1, 1, *[2.0] * len(space)], np.float32)
        g.emit(op, [x, "", scales], mode=str(g.pick(["nearest", "linear"])))


@step(1)
def recurrent(g: Graph) -> None:
    x = g.value(lambda v: v.ndim == 3 and v.size > 0)
    (_, _, inputs), hidden, both = g.seen[x].shape, 2, int(g.chance(0.3)) + 1
    op, gates = [("RNN", 1), ("GRU", 3), ("LSTM", 4)][int(g.rng.integers(3))]
    w = [g.weight((both, gates * hidden, k)) for k in (inputs, hidden)]
    g.emit(
        op,
        [x, *w, *([g.weight((both, 2 * gates * hidden))] if g.chance(0.6) else [])],
        2,
        hidden_size=hidden,
        direction=["forward", "bidirectional"][both - 1],
    )
