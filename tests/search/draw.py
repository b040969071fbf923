"""Whole models of random steps."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from onnx_backprop.opset.graphs.walk import reads
from tests.search import rare_steps, steps, structures  # noqa: F401 - they register steps, in the order that seeds count on
from tests.search.generate import Feeds, Graph, run_stock, wrapped


def drawn(seed: int, number: int) -> tuple[ModelProto, Feeds]:
    """A model and what it is fed, as plain as it comes; `dress` makes a file of it."""
    rng = np.random.default_rng([seed, number])
    g = Graph(rng, int(rng.integers(13, 27)), np.float64 if rng.random() < 0.5 else np.float32)
    rows = int(rng.integers(1, 4))
    for _ in range(int(rng.integers(1, 4))):
        rank = int(rng.integers(0, 4))
        lengths = rng.choice([1, 2, 3, 4], rank, p=[0.2, 0.35, 0.3, 0.15])
        shape = (rows, *map(int, lengths)) if rng.random() < 0.8 else tuple(map(int, lengths))
        if rng.random() < 0.02:
            shape = (*shape, 0)
        name = g.name("x")
        g.inputs[name] = g.seen[name] = rng.uniform(-2, 2, shape).astype(g.dtype)
    if rng.random() < 0.3:
        name = g.name("n")
        g.inputs[name] = g.seen[name] = rng.integers(0, 5, rows)
    if rng.random() < 0.3:
        name = g.name("t")
        g.inputs[name] = g.seen[name] = np.asarray(rng.random() < 0.5)
    g.grow(int(rng.integers(8, 50)))
    used = {n for node in g.nodes for n in reads(node)}
    ends = [n for node in g.nodes for n in node.output if n in g.seen and n not in used and g.seen[n].dtype.kind == "f"]
    floats = [n for node in g.nodes for n in node.output if n in g.seen and g.seen[n].dtype.kind == "f"]
    if not floats:
        return drawn(seed, number + 10**9)
    outputs = list(dict.fromkeys([*(ends[-4:] or floats[-1:]), *(rng.choice(floats, 1) if rng.random() < 0.3 else [])]))
    model = wrapped(g.proto([str(n) for n in outputs]), g.opset)
    try:
        run_stock(model, g.inputs)
    except Exception:  # noqa: BLE001 - its optimisers fail where its nodes did not
        return drawn(seed, number + 10**9)
    return model, dict(g.inputs)
