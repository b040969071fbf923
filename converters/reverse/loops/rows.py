"""A Loop that adds up a cross entropy over blocks of rows: its gradients come of the same run, and no block stays.

    total = Σ_n w_n · l_n,  l_n = λ_n - (1 - ε) · z[n, t_n] - ε · mean z_n + ζ · λ_n²,  λ_n = log Σ_c exp z[n, c]
    dz_n = dtotal · w_n · ((1 + 2ζ · λ_n) · softmax(z_n) - (1 - ε) · onehot(t_n) - ε / C)

n is a row, t_n its class, w_n its weight, and z = f(x, c) what the steps make of a block of rows of x and of outer
values c. `dtotal` is the same number in every step, so that a step can compute (∂z/∂(x, c))ᵀ dz once it has z: the rows
by x are stacked, those by c added up. Where dtotal depends on the total itself, as in the square of a loss, both are
multiplied by it in the end. Other loops compute every step twice.

The exponentials of a row are summed by the softmax of onnxruntime in float32, one after the other. r = Σ_c p, in
stages, is what that sum is too small by; with p / r both are exact to 1e-6.
"""

import json
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import drop_dead, drop_unread
from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.loops.steps import Pairs, body_of
from onnx_backprop.opset.graphs.order import ancestors
from onnx_backprop.opset.graphs.walk import is_standard, values_read

ROWS = "onnx_backprop.rows"  # metadata of a Loop: JSON of the names of values in its body, of numbers, and of `added`
_STATES, _RUN = 1, 256  # of the Loop: its total; numbers that are added one after the other
Walk = Callable[[ir.Value, Sequence[ir.Value], ir.Value, Builder], dict[ir.Value, ir.Value]]


def row_losses(
    op: Builder, z: ir.Value, t: ir.Value, classes: int, smoothing: float, z_loss: float
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """l_n of every row, (R, 1), and what `row_seed` reads; z (R, C), t (R, 1) int64."""
    p = op.Softmax(z, axis=1)
    p.shape = z.shape
    r = _sum_of_row(op, p, classes)
    largest = op.ReduceMax(z, [1], keepdims=1)  # λ = max z - log max p, where max p >= 1/C
    lse = op.Sub(largest, op.Log(op.Div(op.ReduceMax(p, [1], keepdims=1), r)))
    picked = op.GatherElements(z, t, axis=1)
    loss = op.Sub(lse, op.Mul(picked, 1 - smoothing) if smoothing else picked)
    if smoothing:
        loss = op.Sub(loss, op.Mul(op.ReduceMean(z, [1], keepdims=1), smoothing))
    if z_loss:
        loss = op.Add(loss, op.Mul(op.Mul(lse, lse), z_loss))
    return loss, {"p": p, "r": r, "lse": lse, "t": t}


def _sum_of_row(op: Builder, p: ir.Value, classes: int) -> ir.Value:
    """Σ_c p[n, c], (R, 1): short runs in the type of p, the runs in float64."""
    run = next(n for n in range(_RUN, 0, -1) if classes % n == 0)
    if p.dtype == ir.DataType.DOUBLE or classes <= _RUN:
        return op.ReduceSum(p, [1], keepdims=1)
    parts = [p]
    if run < 8:  # as of a prime: the last classes apart
        run, even = _RUN, classes - classes % _RUN
        parts = [op.Slice(p, [0], [even], [1]), op.Slice(p, [even], [classes], [1])]
    sums = [op.ReduceSum(op.Reshape(parts[0], [0, -1, run]), [2], keepdims=0)]
    sums += [op.ReduceSum(part, [1], keepdims=1) for part in parts[1:]]
    wide = op.Cast(op.Concat(*sums, axis=1) if len(sums) > 1 else sums[0], to=ir.DataType.DOUBLE)
    return op.Cast(op.ReduceSum(wide, [1], keepdims=1), to=element_type(p))


def row_seed(
    op: Builder, values: dict[str, ir.Value], classes: int, smoothing: float, z_loss: float
) -> tuple[ir.Value, ir.Value]:
    """d and s of dz_n = s_n · d_n, (R, C) and (R, 1): softmax and one-hot are subtracted in place where that can be."""
    d, r, t = (values[name] for name in ("p", "r", "t"))
    if z_loss:
        d = op.Mul(d, op.Add(1.0, op.Mul(values["lse"], 2 * z_loss)))
    if smoothing:
        d = op.Sub(d, op.Mul(r, smoothing / classes))
    d = op.ScatterElements(d, t, op.Mul(r, smoothing - 1), axis=1, reduction="add")
    return d, op.Div(values["w"], r)


def rows_gradients(
    node: ir.Node, dys: Sequence[ir.Value | None], active: set[ir.Value], op: Builder, walk: Walk
) -> Pairs:
    """Let the steps of a marked Loop compute gradients too; those of what the node reads. [] for any other loop.

    walk(z, wrt, dz, builder): emits the gradients of z by values around the nodes that make it.
    """
    dy = dys[0]
    about = json.loads(node.metadata_props.get(ROWS, "{}"))
    if not about or "added" in about or dy is None or node.graph is None:  # a second derivative goes through all steps
        return []
    body = body_of(node)
    by_name = {str(value.name): value for inner in body for value in inner.outputs}
    values = {name: by_name[about[name]] for name in ("z", "p", "r", "lse", "t", "w", "at", "weights") if name in about}
    picks = {n.outputs[0]: n.inputs[0] for n in body if is_standard(n, "Gather") and n.inputs[1] is values["at"]}
    taken = {part: x for part, x in picks.items() if x in active}
    if values.get("weights") in taken:  # the weights themselves are differentiated by
        return []
    outside = sorted((values_read(node) & active).difference(taken.values()), key=lambda value: str(value.name))
    inner = op.inside()
    inner.prefix = f"{op.prefix}/rows"
    seed, scale = row_seed(inner, values, about["classes"], about["smoothing"], about["z_loss"])
    seed.type, seed.shape = values["z"].type, values["z"].shape
    early = _moved_before(node, dy, op)
    if early:
        scale = inner.Mul(scale, inner.Cast(dy, to=element_type(scale)) if dy.dtype != scale.dtype else dy)
    if outside:  # or else the rows of the gradients are multiplied, which are shorter
        seed, scale = inner.typed(inner.Mul(seed, scale), seed), None
    grads = walk(values["z"], [*taken, *outside], seed, inner)
    summed = [c for c in outside if c in grads]
    stacked = [part for part in taken if part in grads]
    before = op.inside()
    before.prefix = op.prefix
    starts: list[ir.Value] = []
    for c in summed:
        total, new, start = _added(inner, before, c, grads[c])
        body.inputs.append(total)
        body.outputs.append(new)
        starts.append(start)
    for part in stacked:
        g = grads[part] if scale is None else inner.Mul(grads[part], scale)
        body.outputs.append(inner.typed(inner.Identity(g), part))
    drop_unread(inner.nodes, body.outputs)  # as what a rule emits for a matrix that is frozen
    body.extend(inner.nodes)
    node.graph.insert_before(node, before.nodes)
    node.resize_inputs(len(node.inputs) + len(starts))
    for n, start in enumerate(starts):
        node.replace_input_with(len(node.inputs) - len(starts) + n, start)
    first = len(node.outputs)
    node.resize_outputs(first + len(summed) + len(stacked))
    about["added"] = len(summed)
    node.metadata_props[ROWS] = json.dumps(about)
    results: Pairs = []
    for y, x in zip(node.outputs[first:], [*summed, *stacked], strict=True):
        y.name, y.type = op.unique(f"{op.prefix}/{x.name}"), ir.TensorType(_wide(x))
        if x in taken:
            x = taken[x]
            g = _put_back(op, values["at"], x, y)
        else:
            y.shape = x.shape
            g = y if y.dtype == x.dtype else op.Cast(y, to=element_type(x))
        g = g if early else op.Mul(g, op.Cast(dy, to=element_type(x)) if dy.dtype != x.dtype else dy)
        results.append((x, op.typed(g, x)))
    return results


def _moved_before(node: ir.Node, dy: ir.Value, op: Builder) -> bool:
    """Put what makes dy before a forward node; False, and nothing is moved, where it depends on that node."""
    assert node.graph is not None
    before = set(takewhile(lambda other: other is not node, node.graph))
    moved = [op.nodes[n] for n in ancestors(op.nodes, [dy])]
    for value in {dy}.union(*map(values_read, moved)).difference(*(other.outputs for other in moved)):
        maker = value.producer()
        if maker not in before and not (maker is None and (value.is_graph_input() or value.is_initializer())):
            return False
    node.graph.insert_before(node, moved)
    op.nodes[:] = [other for other in op.nodes if other not in moved]
    return True


def _wide(x: ir.Value) -> ir.DataType:
    """The type to add up in: float64 for what is short, as a bias is."""
    shape = dims(x)
    return element_type(x) if shape is None or len(shape) > 1 else ir.DataType.DOUBLE


def _added(inner: Builder, before: Builder, c: ir.Value, g: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """A state that adds up the gradients by c: before a step, behind it, and the first one, which is a single 0."""
    shape, dtype = dims(c) or (), _wide(c)
    total = ir.Value(name=inner.unique(f"{inner.prefix}/sum"), type=ir.TensorType(dtype))
    start = before.constant(np.zeros([1] * len(shape), dtype.numpy()))
    node = g.producer()
    if node is not None and is_standard(node, "Gemm") and len(node.inputs) == 2 and len(shape) == 2 and not g.uses():
        node.resize_inputs(3)  # the product adds itself up
        node.replace_input_with(2, total)
        return total, g, start
    new = inner.Add(total, g if g.dtype == dtype else inner.Cast(g, to=dtype))
    return total, new, start


def _put_back(op: Builder, at: ir.Value, x: ir.Value, stacked: ir.Value) -> ir.Value:
    """The gradient of x of its rows, block behind block: those that no block has are 0."""
    node = at.producer()
    assert node is not None
    rows = op.Slice(node.inputs[0], [0], [-1], [0])  # behind the last there is one to fill the last block with
    last = [-1 if not isinstance(d, int) else d for d in (dims(x) or ())[1:]]
    each = op.Reshape(stacked, [-1, *last]) if last != [-1] else op.Flatten(stacked, axis=-1)
    each = op.Slice(each, [0], op.Shape(rows), [0])
    return op.ScatterND(op.zeros(op.shape(x), x), op.Unsqueeze(rows, [1]), each)


def drop_row_gradients(graph: ir.Graph) -> None:
    """Take the gradients out of marked Loops where nothing reads them any more, as in a model for evaluation."""
    for node in graph:
        about = json.loads(node.metadata_props.get(ROWS, "{}"))
        added = node.outputs[_STATES:]
        if "added" not in about or any(value.uses() or value.is_graph_output() for value in added):
            continue
        body, states = body_of(node), about.pop("added")
        del body.outputs[1 + _STATES :]
        drop_dead(body)
        if states:
            del body.inputs[-states:]
            node.resize_inputs(len(node.inputs) - states)
        node.resize_outputs(_STATES)
        node.metadata_props[ROWS] = json.dumps(about)
