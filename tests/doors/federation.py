"""Eight clients with the digits of scikit-learn, in one process: Flower's messages, without its network."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnx import ModelProto, parser
from sklearn.datasets import load_digits

import onnx_backprop as ob
from tests.doors.models import with_weights

CLIENTS = 8


def network() -> ModelProto:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        digits (float[N, 64] x) => (float[N, 10] scores) {
            a = Gemm (x, w1, b1) b = Relu (a) scores = Gemm (b, w2, b2) }""")
    rng = np.random.default_rng(0)
    shapes = {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}
    return with_weights(model, **{name: 0.1 * rng.standard_normal(shape).astype("f") for name, shape in shapes.items()})


def trainer(model: ModelProto | None = None, **arguments: Any) -> ob.Trainer:
    arguments = {"optimizer": "sgd", **arguments}
    graph = ob.training_graph(model or network(), loss="softmax_cross_entropy", **arguments)
    return ob.Trainer(graph, learning_rate=0.2)


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, and others."""
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    x, labels = (x[order] / 16).astype("f"), labels[order]
    return x[:1440], labels[:1440], x[1440:], labels[1440:]


def batches_of(client: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients have unequal numbers of images, mostly of their own digits."""
    x, labels, *_ = digits()
    mostly = np.argsort((labels - client) % 10 + np.random.default_rng(2).uniform(0, 6, len(x)), kind="stable")
    rows = mostly[: 100 + 20 * client]
    return [(x[rows[at : at + 30]], labels[rows[at : at + 30]]) for at in range(0, len(rows), 30)]


def of_node(context: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Those of the client that Flower asks; Ray's processes import it from here."""
    return batches_of(context.node_config["partition-id"])


def accuracy(model: ob.Trainer) -> float:
    *_, x, labels = digits()
    (scores,) = (y for name, y in model.predict(x=x).items() if name == "scores")
    return float((scores.argmax(axis=1) == labels).mean())


class InProcess:
    """What a strategy needs of a Grid: each message goes to the client app at once."""

    def __init__(self, app: Any) -> None:
        flwr: Any = import_module("flwr.app")
        identity: Any = import_module("flwr.supercore.task_identity")
        identity.TaskIdentity.task_id = identity.TaskIdentity.run_id = identity.TaskIdentity.node_id = (
            0  # which messages bear
        )
        self.app, self.run = app, SimpleNamespace(run_id=0)
        self.contexts = {
            n + 1: flwr.Context(0, n + 1, {"partition-id": n, "num-partitions": CLIENTS}, flwr.RecordDict(), {})
            for n in range(CLIENTS)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=n) for n in self.contexts]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:  # noqa: ARG002 - the name is Flower's
        return [self.app(deepcopy(message), self.contexts[message.metadata.dst_node_id]) for message in messages]
