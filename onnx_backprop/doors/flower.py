"""`client`: a trainer as Flower's ClientApp; `DeltaAvg`: FedAvg of what the clients have added."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_backprop.converters.training.slots import RANDOM
from onnx_backprop.doors import library
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.training.inputs import rows
from onnx_backprop.training.opening import first_seed
from onnx_backprop.training.trainer import Trainer

_app = library("flwr.app", package="flwr")
_clientapp = library("flwr.clientapp", package="flwr")
_strategy = library("flwr.serverapp.strategy", package="flwr")

Arrays = dict[str, np.ndarray]
Data = Iterable[Any] | Callable[[Any], Iterable[Any]]


def client(
    trainer: Trainer, data: Data, *, evaluation: Data | None = None, secure: bool = False, mods: Sequence[Any] = ()
) -> Any:
    """A ClientApp that trains on its data, and measures the loss of others, from the arrays that a server sends.

        app = ob.flower.client(trainer, lambda context: batches_of(context.node_config["partition-id"]))

    What travels is `arrays(trainer)`: the parameters that are trained, those of the adapter alone with `ob.lora`, and
    the running statistics. Each message begins with a fresh optimizer at the server's arrays. Its configuration may
    have "epochs" (1) and "learning-rate" (the trainer's); with "deltas", which `DeltaAvg` sets, the reply has what
    has been added, in the place of what there is now. Replies have "num-examples", and the mean loss as "train-loss",
    or as "eval-loss".

    Args:
        trainer: made with an optimizer. It goes to other processes as it is: `Trainer` is copied with its state.
        data, evaluation: batches that can be gone through again, or a function from Flower's Context to them.
        secure: for Flower's SecAggPlusWorkflow, which learns the sum of all clients' arrays and no client's own.
        mods: of Flower, as for differential privacy.

    Raises: KernelError without Flower; in a reply InvalidArgumentError for arrays of another model.
    """
    worker = _Client(trainer, data, evaluation)
    if secure:
        return _secure(worker, mods)
    app = _clientapp.ClientApp(mods=list(mods))
    app.train()(worker.train)
    if evaluation is not None:
        app.evaluate()(worker.evaluate)
    return app


def arrays(trainer: Trainer) -> Any:
    """What clients train of a trainer, as the ArrayRecord that a strategy starts from."""
    return _app.ArrayRecord({name: _app.Array(value) for name, value in _exchanged(trainer).items()})


def set_arrays(trainer: Trainer, record: Any) -> None:
    """Put what a strategy returns into a trainer. Raises: InvalidArgumentError for arrays of another model."""
    _put(trainer, {name: array.numpy() for name, array in record.items()})


class DeltaAvg(_strategy.FedAvg):
    """x ← x + server_rate · Σ_k n_k / n · (x_k - x), of clients k with n_k examples: FedAvg with a rate of its own.

    Clients send x_k - x, small numbers around zero. Other arguments are FedAvg's.
    """

    def __init__(self, *, server_rate: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.server_rate, self._sent = server_rate, None

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """FedAvg's, asking for deltas."""
        self._sent, config["deltas"] = arrays, True
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """What was sent and the mean of what came back."""
        deltas, metrics = super().aggregate_train(server_round, replies)
        if deltas is None or self._sent is None:
            return None, metrics
        new = {
            name: _app.Array((before.numpy() + self.server_rate * deltas[name].numpy()).astype(before.dtype))
            for name, before in self._sent.items()
        }
        return _app.ArrayRecord(new), metrics


class _Client:
    def __init__(self, trainer: Trainer, data: Data, evaluation: Data | None) -> None:
        self.trainer, self._data, self._evaluation = trainer, data, evaluation
        self._start, self._rate = trainer.state(), trainer.learning_rate

    def train(self, message: Any, context: Any) -> Any:
        new, count, loss = self.fit(_values(message), message.content["config"], context)
        record = _app.ArrayRecord({name: _app.Array(value) for name, value in new.items()})
        metrics = _app.MetricRecord({"num-examples": count, "train-loss": loss})
        return _reply(message, {"arrays": record, "metrics": metrics})

    def evaluate(self, message: Any, context: Any) -> Any:
        count, loss = self.measure(_values(message), message.content["config"], context)
        return _reply(message, {"metrics": _app.MetricRecord({"num-examples": count, "eval-loss": loss})})

    def fit(self, values: Arrays, config: Any, context: Any) -> tuple[Arrays, int, float]:
        """What has become of the values, or has been added; of how many rows, and their mean loss."""
        trainer, epochs = self.trainer, int(config.get("epochs", 1))
        self._begin(values, config, context)
        trainer.learning_rate = float(config.get("learning-rate", self._rate))
        before, count, total = _exchanged(trainer), 0, 0.0
        for _ in range(epochs):
            for batch in _of(self._data, context):
                named = trainer.named(batch)
                size = rows(next(iter(named.values())))
                count, total = count + size, total + size * trainer.step(named)
        after = _exchanged(trainer)
        if config.get("deltas", False):
            after = {name: value - before[name] for name, value in after.items()}
        return after, count // max(epochs, 1), total / max(count, 1)

    def measure(self, values: Arrays, config: Any, context: Any) -> tuple[int, float]:
        self._begin(values, config, context)
        batches = list(_of(self._evaluation, context))
        count = sum(rows(next(iter(self.trainer.named(batch).values()))) for batch in batches)
        return count, float(self.trainer.evaluate(batches))

    def _begin(self, values: Arrays, config: Any, context: Any) -> None:
        """The state of the first step but for the server's arrays; masks of Dropout of this round and node alone.

        Noise that hides rows has a seed that nobody knows.
        """
        state = {name: value.copy() for name, value in self._start.items()}
        if random := self.trainer.graph.slot(RANDOM):
            place = f"{config.get('server-round', 0)} {context.node_id}"
            seed = None if self.trainer.graph.options.privacy.get("noise") else zlib.crc32(place.encode())
            state[random] = np.array([first_seed(seed, self.trainer.graph), 0], state[random].dtype)
        self.trainer.rewind(state, 0)
        _put(self.trainer, values)


def _secure(worker: _Client, mods: Sequence[Any]) -> Any:
    """The same by the messages that Flower's secure aggregation has: lists of arrays, in the order of `arrays`."""
    flwr = library("flwr.client", package="flwr")
    names = worker.trainer.graph.forward_state

    class Client(flwr.NumPyClient):
        def __init__(self, context: Any) -> None:
            self.of = context

        def get_parameters(self, _: Any) -> list[np.ndarray]:
            return list(_exchanged(worker.trainer).values())

        def fit(self, parameters: list[np.ndarray], config: Any) -> tuple[list[np.ndarray], int, dict[str, float]]:
            new, count, loss = worker.fit(dict(zip(names, parameters, strict=True)), config, self.of)
            return list(new.values()), count, {"train-loss": loss}

        def evaluate(self, parameters: list[np.ndarray], config: Any) -> tuple[float, int, dict[str, float]]:
            count, loss = worker.measure(dict(zip(names, parameters, strict=True)), config, self.of)
            return loss, count, {"eval-loss": loss}

    def of_context(context: Any) -> Any:
        return Client(context).to_client()

    return _clientapp.ClientApp(client_fn=of_context, mods=[flwr.mod.secaggplus_mod, *mods])


def _put(trainer: Trainer, values: Arrays) -> None:
    if set(values) != (names := set(trainer.graph.forward_state)):
        other = ", ".join(sorted(names ^ set(values)))
        raise InvalidArgumentError(f"the server's arrays are those of another model: {other} are in one of them alone")
    trainer.set_state(values)


def _values(message: Any) -> Arrays:
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


def _exchanged(trainer: Trainer) -> Arrays:
    state = trainer.state()
    return {name: state[name] for name in trainer.graph.forward_state}


def _of(data: Any, context: Any) -> Any:
    return data(context) if callable(data) else data


def _reply(message: Any, content: Mapping[str, Any]) -> Any:
    return _app.Message(content=_app.RecordDict(dict(content)), reply_to=message)
