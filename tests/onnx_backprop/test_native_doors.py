"""The four doors to a native graph, with models whose nodes have no names and models that use the names of ours."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from models import digits, transformer
from tests.onnx_backprop.distributed.threads import Threads, on_ranks
from tests.support.renamed import OURS, renamed
from tests.support.training_models import classifier

NETWORKS = {"classifier": classifier, "digits": digits.build, "transformer": transformer.build}
STYLES = ["unnamed", "ours"]
Bits = list[bytes]


def network(name: str, style: str | None) -> ModelProto:
    """Under the names of what `Trainer` and the native graph of the plain network add, where that is the style."""
    model = NETWORKS[name]()
    if style is None:
        return model
    values = [value for node in model.graph.node for value in node.output]
    ours = [f"{value}/{added}" for value in values for added in ("again", "numbers", "mean", "variance")]
    numbered = [f"optimizer/AdamW/{added}_{n}" for n in range(2) for added in ("numbers", "update")]
    return renamed(model, style, [*numbered, "update_guard", "update_guard/loss", "bucket_ready", *OURS, *ours])[0]


def graph_of(model: ModelProto, **more: Any) -> ob.TrainingGraph:
    # all of them, since names that say nothing leave a doubt about some
    trainable = [tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1]
    return ob.training_graph(model, loss="mse", trainable=trainable, **more)


def batch(graph: ob.TrainingGraph, seed: int) -> list[np.ndarray]:
    rng, kinds = np.random.default_rng(seed), {v.name: v.type.tensor_type for v in graph.model.graph.input}
    shapes = [[4, *(d.dim_value or 8 for d in list(kinds[name].shape.dim)[1:])] for name in graph.inputs]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def trainer(name: str, style: str | None) -> Bits:
    """Losses and state, the updates overwriting what they renew."""
    graph = graph_of(network(name, style), optimizer="adamw")
    trained = ob.Trainer(graph, seed=3)
    assert trained.kernels == "native"
    assert trained._buffers.in_place
    losses = [trained.step(*batch(graph, n)) for n in range(3)]
    return [np.array(losses).tobytes(), *(value.tobytes() for value in trained.state().values())]


def ranks(name: str, style: str | None) -> Bits:
    graph = graph_of(network(name, style), optimizer="adamw")

    def work(communicator: Threads) -> Bits:
        trained = ob.Trainer(graph, seed=3, communicator=communicator, shard_update=True)
        losses = [trained.step(*batch(graph, n)) for n in range(3)]
        return [np.array(losses).tobytes(), *(value.tobytes() for value in trained.state().values())]

    first, second = on_ranks(2, work)
    assert first == second
    return first


def session(name: str, style: str | None) -> Bits:
    graph = graph_of(network(name, style), optimizer="adamw")
    feeds = dict(zip(graph.inputs, batch(graph, 0), strict=True)) | graph.initial_state()
    assert graph.learning_rate is not None
    results = ob.session(graph.model).run(None, feeds | {graph.learning_rate: np.array(0.1, np.float32)})
    return [np.asarray(result).tobytes() for result in results]


def torch(name: str, style: str | None) -> Bits:
    """The output and the gradient of the input; which tensors are parameters is a guess from their names."""
    torch: Any = pytest.importorskip("torch")
    model = network(name, style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
        module = ob.torch.module(model)
    torch.manual_seed(3)
    x = torch.from_numpy(batch(graph_of(model), 0)[0]).requires_grad_()
    y = module(x)
    (y * y).sum().backward()
    return [y.detach().numpy().tobytes(), x.grad.numpy().tobytes()]


DOORS = {door.__name__: door for door in (trainer, ranks, session, torch)}


@cache
def plain(door: str, name: str) -> Bits:
    return DOORS[door](name, None)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NETWORKS)
def test_names_change_nothing(name: str, door: str, style: str) -> None:
    assert DOORS[door](name, style) == plain(door, name)
