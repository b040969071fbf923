"""Steps with graphs inside them, and with sequences."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.search.generate import DEPTH, Graph, RejectedError, info_of, run_stock, step, wrapped


def _result(g: Graph, like: np.ndarray, fallback: str) -> str:
    """A value of the graph's own of a type and shape, late ones first."""
    produced = {n for node in g.nodes for n in node.output}
    names = [n for n, v in g.seen.items() if n in produced and v.dtype == like.dtype and v.shape == like.shape]
    return names[-1] if names else g.emit("Identity", [fallback])


@step(2)
def branches(g: Graph) -> None:
    if g.depth >= DEPTH:
        raise RejectedError
    x = g.value()
    fed = [n for n, v in g.seen.items() if v.dtype.kind == "b" and v.size == 1]
    condition = str(g.pick(fed)) if fed and g.chance(0.8) else g.constant(bool(g.chance(0.5)), np.bool_)
    graphs = []
    for _ in range(2):
        inner = g.inner()
        inner.grow(int(g.rng.integers(0, 5)))
        graphs.append(inner.proto([_result(inner, g.seen[x], x)]))
    g.emit("If", [condition], then_branch=graphs[0], else_branch=graphs[1])


@step(1.5)
def loops(g: Graph) -> None:
    if g.depth >= DEPTH:
        raise RejectedError
    x, scan, d = g.value(lambda v: v.size > 0), g.chance(0.5), "abc"[g.depth]
    states = {f"s{d}{len(g.seen)}": g.seen[x]}
    xs = ""
    if scan:
        xs = g.value(lambda v: v.ndim > 0 and v.size > 0)  # of nothing a Scan may end the process
        inner = g.inner(**states, **{f"e{d}{len(g.seen)}": g.seen[xs][0]})
    else:
        inner = g.inner(**{f"i{d}{len(g.seen)}": np.int64(0), f"c{d}{len(g.seen)}": np.bool_(True)}, **states)
    inner.seen = {k: np.asarray(v) for k, v in inner.seen.items()}
    inner.grow(int(g.rng.integers(1, 5)))
    state = next(iter(states))
    result = _result(inner, g.seen[x], state)
    produced = [n for node in inner.nodes for n in node.output if n in inner.seen]
    floats = [n for n in produced if inner.seen[n].dtype.kind == "f" and inner.seen[n].size]
    each = [n for n in floats if n != result][-1:] if g.chance(0.6) else []  # one twice is garbage in onnxruntime
    if scan:
        body = inner.proto([result, *each])
        g.emit(
            "Scan",
            [x, xs],
            1 + len(each),
            body=body,
            num_scan_inputs=1,
            **({"scan_input_directions": [1]} if g.chance(0.3) else {}),
        )
    else:
        going = inner.emit("Identity", [next(n for n in inner.inputs if n.startswith("c"))])
        trips = g.constant(
            int(g.rng.integers(1 if each else 0, 4))
        )  # of no step at all onnxruntime takes symbols for 0
        start = g.constant(True, np.bool_) if g.chance(0.5) else ""
        g.emit("Loop", [trips, start, x], 1 + len(each), body=inner.proto([going, result, *each]))


@step(1)
def sequences(g: Graph) -> None:
    x = g.value(lambda v: v.ndim > 0)
    name = g.name("q")
    if g.chance(0.5):
        pair = [x, g.value(lambda v: v.dtype == g.seen[x].dtype and v.shape == g.seen[x].shape)]
        make = helper.make_node("SequenceConstruct", pair, [name], name=name)
    else:
        make = helper.make_node("SplitToSequence", [x], [name], name=name, axis=0, keepdims=int(g.chance(0.5)))
        pair = [x]
    at = g.constant(0)
    take = helper.make_node("SequenceAt", [name, at], [f"{name}_"], name=f"{name}_")
    if g.chance(0.5):
        take = helper.make_node("ConcatFromSequence", [name], [f"{name}_"], name=f"{name}_", axis=0)
    infos = [info_of(n, g.seen[n]) for n in dict.fromkeys([*pair, at])]
    graph = helper.make_graph([make, take], "g", infos, [helper.make_empty_tensor_value_info(f"{name}_")])
    try:
        (g.seen[f"{name}_"],) = run_stock(wrapped(graph, g.opset), g.seen)
    except Exception as e:  # noqa: BLE001 - of many classes
        raise RejectedError(str(e)) from None
    g.nodes += [make, take]
