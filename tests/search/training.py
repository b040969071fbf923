"""Oracles of a step of training: by hand, saved and loaded, within less memory, and on two ranks."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

import onnx_backprop as ob
from onnx_backprop.distributed import Shard
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes
from tests.onnx_backprop.distributed.threads import Threads, on_ranks
from tests.search.dress import FLOATS, copy, renewed_statistics, without_functions
from tests.search.generate import run_stock
from tests.search.subject import Named, SkippedError, Subject, differs, one_number

RATE = 0.125


def to_train(s: Subject) -> ModelProto:
    """The model with that number as its only output; its constants are not to be trained."""
    model = one_number(s)
    del model.graph.output[:-1]
    return model


def constants(s: Subject) -> list[str]:
    return [f"c {k}" for k in range(len(s.of))]


def training(s: Subject) -> str | None:
    """One step of SGD by hand; what is trained by default; memory=; saved, loaded and exported again."""
    model = to_train(s)
    fixed = constants(s)
    subject = Subject(model, s.feeds, s.without)
    graph = ob.training_graph(model, optimizer="sgd", frozen=fixed)
    stored = [t.name for t in s.model.graph.initializer if t.data_type in FLOATS]
    weights = [n for n in dict.fromkeys([*graph.parameters, *stored]) if n not in s.without]
    reported = {*graph.parameters, *graph.frozen, *graph.left_out}
    gradient = subject.gradients(ob.backward(model, wrt=weights, of=["s of all"])) if weights else {}
    silent = [n for n, v in gradient.items() if n not in reported and np.abs(v).max(initial=0) > 0]
    if silent:
        return f"a weight that is neither trained nor told of: {silent[0]!r}"
    trainer = ob.Trainer(graph, learning_rate=RATE)
    loss = float(subject.values["s of all"].item())
    feeds = {n: v for n, v in s.feeds.items() if n in graph.inputs}
    tolerance = s.rounding
    got = trainer.step(feeds)
    if not abs(got - loss) <= tolerance * max(1, abs(loss)):
        return f"loss {got:.7g}, forward {loss:.7g}"
    before, after = graph.initial_values(), trainer.parameters()
    wrong = differs(after, {n: before[n] - RATE * gradient[n] for n in graph.parameters}, tolerance, "after a step")
    if wrong:
        return wrong
    with tempfile.TemporaryDirectory() as folder:
        trainer.export(Path(folder) / "model.onnx")
        exported = onnx.load(Path(folder) / "model.onnx")
        stepped = with_values(without_functions(model), after)
        try:
            (expected,) = run_stock(stepped, s.feeds)
        except Exception:  # noqa: BLE001 - of many classes
            raise SkippedError("weights that the model does not take, as of lengths that depend on them") from None
        (again,) = run_stock(exported, s.feeds)
        if not renewed_statistics(model) and not np.allclose(
            again, expected, rtol=max(tolerance, 1e-5), atol=tolerance, equal_nan=True
        ):
            return f"exported: {again}, weights in the model: {expected}"
        graph.save(Path(folder) / "training.onnx")
        loaded = ob.Trainer(Path(folder) / "training.onnx", learning_rate=RATE)
        if loaded.step(feeds) != got:
            return "another loss of the saved graph"
    symbols = [
        (d.dim_param, n)
        for v in s.model.graph.input
        for d, n in zip(
            v.type.tensor_type.shape.dim, s.point.get(v.name, s.feeds.get(v.name, np.zeros(0))).shape, strict=False
        )
    ]
    try:
        budget = ob.training_graph(
            model, optimizer="sgd", frozen=fixed, memory="60%", lengths={d: n for d, n in symbols if d}
        )
    except ob.InvalidArgumentError as e:
        if "cannot be kept" in str(e):
            return None
        raise
    lean = ob.Trainer(budget, learning_rate=RATE)
    if lean.step(feeds) != got:
        return "another loss with memory="
    return differs(lean.parameters(), after, 0 if tolerance > 1e-6 else 1e-12, "memory=")


def with_values(model: ModelProto, values: Named) -> ModelProto:
    result = copy(model)
    held = [(t.name, t) for graph in all_graphs(result.graph) for t in graph.initializer]
    held += [(n.output[0], n.attribute[0].t) for n in all_nodes(result.graph) if n.op_type == "Constant"]
    tensors, count = dict(held), Counter(name for name, _ in held)
    for name, value in values.items():
        if count[name] > 1:
            raise SkippedError("branches that use one name")
        if name not in tensors:
            raise SkippedError("a function was inlined under other names")
        tensors[name].CopyFrom(numpy_helper.from_array(value, name))
    return result


def ranks(s: Subject) -> str | None:
    """A step of two ranks, each with feeds of its own, against the mean of their gradients; both end with equal bits."""
    model = to_train(s)
    moves = {n: 0.1 * v for n, v in s.random({n: v for n, v in s.feeds.items() if n in s.wrt}).items()}
    other = s.feeds | {n: np.asarray(s.feeds[n] + v, v.dtype) for n, v in moves.items()}
    subjects = [Subject(model, feeds, s.without) for feeds in (s.feeds, other)]
    try:
        others = subjects[1].values
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions have no common base
        raise SkippedError("other feeds that the model does not take, as of lengths that depend on them") from None
    if not all(np.isfinite(v).all() for v in others.values()):
        raise SkippedError("nothing finite at other feeds")  # as the logarithm of what is negative there
    graph = ob.training_graph(model, optimizer="sgd", frozen=constants(s))
    fed = [{n: v for n, v in subject.feeds.items() if n in graph.inputs} for subject in subjects]
    if not fed[0]:
        raise SkippedError("no inputs")
    converted = ob.backward(model, wrt=list(graph.parameters), of=["s of all"])
    each = [subject.gradients(converted) for subject in subjects]
    before = graph.initial_values()
    want = {n: before[n] - RATE / 2 * (each[0][n] + each[1][n]) for n in graph.parameters}

    def work(rank: Threads) -> Named:
        trainer = ob.Trainer(graph, learning_rate=RATE, communicator=rank)
        trainer.step(Shard(fed[rank.rank]))
        return trainer.parameters()

    first, second = on_ranks(2, work)
    return differs(second, first, 0, "the second rank") or differs(first, want, s.rounding, "two ranks")
