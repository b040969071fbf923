"""`ob.flower`: eight clients with digits, beside federated averaging in NumPy; the adapter of a network alone; Ray."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.doors.federation import CLIENTS, InProcess, accuracy, batches_of, network, of_node, trainer
from tests.doors.models import weights_of

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # read when Flower is imported
flwr_app: Any = pytest.importorskip("flwr.app", reason="needs flwr: make doors")
strategies: Any = pytest.importorskip("flwr.serverapp.strategy")
flwr_common: Any = pytest.importorskip("flwr.common")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def averaged(rounds: int, epochs: int, rate: float, server_rate: float = 1.0) -> dict[str, np.ndarray]:
    """The same in NumPy, float64: SGD of each client from the server's weights, their mean weighted by images."""
    w = {name: value.astype(np.float64) for name, value in weights_of(network()).items()}
    for _ in range(rounds):
        total = {name: np.zeros_like(value) for name, value in w.items()}
        images = 0
        for client in range(CLIENTS):
            local = {name: value.copy() for name, value in w.items()}
            for _ in range(epochs):
                for x, labels in batches_of(client):
                    a = x @ local["w1"] + local["b1"]
                    b = np.maximum(a, 0)
                    scores = b @ local["w2"] + local["b2"]
                    e = np.exp(scores - scores.max(axis=1, keepdims=True))
                    d = (e / e.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / len(x)
                    da = d @ local["w2"].T * (a > 0)
                    gradients = {"w1": x.T @ da, "b1": da.sum(0), "w2": b.T @ d, "b2": d.sum(0)}
                    local = {name: value - rate * gradients[name] for name, value in local.items()}
            size = sum(len(labels) for _, labels in batches_of(client))
            images += size
            total = {name: total[name] + size * (local[name] - w[name]) for name in w}
        w = {name: w[name] + server_rate * total[name] / images for name in w}
    return w


@pytest.mark.parametrize("deltas", [False, True])
def test_federated_averaging(deltas: bool) -> None:
    server, app = trainer(), ob.flower.client(trainer(), of_node, evaluation=of_node)
    strategy = ob.flower.DeltaAvg(server_rate=0.8) if deltas else strategies.FedAvg()
    config = flwr_app.ConfigRecord({"epochs": 2, "learning-rate": 0.3})
    result = strategy.start(InProcess(app), ob.flower.arrays(server), num_rounds=3, train_config=config)
    before = accuracy(server)
    ob.flower.set_arrays(server, result.arrays)
    expected = averaged(3, 2, 0.3, 0.8 if deltas else 1.0)
    for name, value in server.parameters().items():
        np.testing.assert_allclose(value, expected[name], atol=2e-4, err_msg=name)
    assert accuracy(server) > before + 0.2
    losses = [result.evaluate_metrics_clientapp[n]["eval-loss"] for n in (1, 2, 3)]
    assert losses == sorted(losses, reverse=True)


def test_an_adapter_alone_travels() -> None:
    base = network()
    adapted = ob.lora(base, targets=["w1", "w2"], rank=4)
    server = trainer(adapted.model, optimizer="adam", trainable=adapted.trainable)
    names = set(server.parameters())
    record = ob.flower.arrays(server)
    assert set(record) == names
    assert names.isdisjoint(weights_of(base))
    assert sum(array.numpy().size for array in record.values()) < sum(w.size for w in weights_of(base).values()) / 3
    app = ob.flower.client(trainer(adapted.model, optimizer="adam", trainable=adapted.trainable), of_node)
    config = flwr_app.ConfigRecord({"learning-rate": 0.05, "epochs": 3})
    strategy = ob.flower.DeltaAvg(fraction_evaluate=0.0)
    before = accuracy(server)
    result = strategy.start(InProcess(app), record, num_rounds=3, train_config=config)
    ob.flower.set_arrays(server, result.arrays)
    assert accuracy(server) > before + 0.2


def test_a_round_does_not_depend_on_those_before() -> None:
    """Neither the optimizer's moments nor the masks of another round are left, in whatever order clients are asked."""
    app = ob.flower.client(trainer(optimizer="adam"), of_node)
    grid, record = InProcess(app), ob.flower.arrays(trainer())

    def replies(nodes: list[int], rate: float = 0.01) -> dict[int, Any]:
        config = flwr_app.ConfigRecord({"server-round": 1, "learning-rate": rate})
        content = flwr_app.RecordDict({"arrays": record, "config": config})
        messages = [flwr_app.Message(content=content, dst_node_id=n, message_type="train") for n in nodes]
        return dict(zip(nodes, grid.send_and_receive(messages), strict=True))

    first, second = replies([1, 2, 3]), replies([3, 1, 2])
    for node, reply in first.items():
        assert reply.content["metrics"]["num-examples"] == 100 + 20 * (node - 1)
        for name, array in reply.content["arrays"].items():
            np.testing.assert_array_equal(array.numpy(), second[node].content["arrays"][name].numpy())

    still = replies([3], rate=1e-12)[3].content["metrics"]["train-loss"]
    assert still == pytest.approx(float(trainer().evaluate(batches_of(2))), rel=1e-5)


def test_noise_that_hides_rows_follows_from_no_round() -> None:
    """What a server knows gives the masks of Dropout, and nothing of the noise; without it clients agree."""

    def sent(noise: float) -> Any:
        private = trainer(per_sample_clip=0.1, noise=noise)
        grid = InProcess(ob.flower.client(private, of_node))
        config = flwr_app.ConfigRecord({"server-round": 1})
        content = flwr_app.RecordDict({"arrays": ob.flower.arrays(private), "config": config})
        (reply,) = grid.send_and_receive([flwr_app.Message(content=content, dst_node_id=1, message_type="train")])
        return reply.content["arrays"]["w1"].numpy()

    np.testing.assert_array_equal(sent(0.0), sent(0.0))
    assert (sent(1.0) != sent(1.0)).mean() > 0.99


def test_arrays_of_another_model_are_refused() -> None:
    server = trainer()
    record = ob.flower.arrays(server)
    record["w3"] = record.pop("w2")
    with pytest.raises(ob.InvalidArgumentError, match="those of another model: w2, w3 are in one of them alone"):
        ob.flower.set_arrays(server, record)
    record["w2"] = flwr_app.Array(np.zeros((3, 3), "f"))
    del record["w3"]
    with pytest.raises(ob.InvalidArgumentError, match="'w2' has shape"):
        ob.flower.set_arrays(server, record)


def test_secure_aggregation() -> None:
    """Flower's SecAgg+ with 8 clients: the sum is what averaging gives, and no client's arrays reach the server."""
    flwr: Any = pytest.importorskip("flwr.server")
    server, seen = trainer(), list[Any]()
    app = ob.flower.client(trainer(), of_node, secure=True)

    class Watched(InProcess):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
            replies = super().send_and_receive(messages, timeout=timeout)
            seen.extend(
                array for reply in replies for record in reply.content.array_records.values() for array in record
            )
            return replies

    initial = flwr_common.ndarrays_to_parameters([array.numpy() for array in ob.flower.arrays(server).values()])
    settings = flwr.ServerConfig(num_rounds=2)
    strategy = flwr.strategy.FedAvg(
        initial_parameters=initial,
        fraction_evaluate=0.0,
        min_available_clients=CLIENTS,
        on_fit_config_fn=lambda _: {"learning-rate": 0.3},
    )
    context = flwr.LegacyContext(context=Watched(app).contexts[1], config=settings, strategy=strategy)
    secure = flwr.workflow.SecAggPlusWorkflow(num_shares=5, reconstruction_threshold=3)
    flwr.workflow.DefaultWorkflow(fit_workflow=secure)(Watched(app), context)
    record = context.state.array_records["parameters"]
    expected = averaged(2, 1, 0.3)
    for (name, e), array in zip(expected.items(), record.values(), strict=True):
        np.testing.assert_allclose(array.numpy(), e, atol=5e-4, err_msg=name)
    assert not seen


def test_flower_simulation() -> None:
    """Two rounds in Ray's processes, to which the client app goes by pickle."""
    pytest.importorskip("ray", reason="needs ray: make doors")
    simulation: Any = pytest.importorskip("flwr.simulation")
    serverapp: Any = pytest.importorskip("flwr.serverapp")
    server, central = serverapp.ServerApp(), trainer()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = ob.flower.DeltaAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS, min_train_nodes=CLIENTS)
        config = flwr_app.ConfigRecord({"learning-rate": 0.3})
        result = strategy.start(grid, ob.flower.arrays(central), num_rounds=2, train_config=config)
        ob.flower.set_arrays(central, result.arrays)

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}
    app = ob.flower.client(trainer(), of_node)
    simulation.run_simulation(server, app, num_supernodes=CLIENTS, backend_config=resources)
    expected = averaged(2, 1, 0.3)
    for name, value in central.parameters().items():
        np.testing.assert_allclose(value, expected[name], atol=2e-4, err_msg=name)
