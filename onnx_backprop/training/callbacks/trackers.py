"""Trackers: what `fit(log=…)` takes beside files and functions, each a line to make, imported when it is made.

trainer.fit(batches, 10, log=[ob.callbacks.TensorBoard("runs/first"), "log.csv"])
"""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError


class Tracker(ABC):
    """Called with a dict of each step, as a function would be; closed when `fit` ends.

    Arrays of numbers become name/0, name/1, …; matrices are left out.
    """

    def __call__(self, values: Mapping[str, Any]) -> None:
        """A step."""
        self.numbers(dict(_numbers(values)), int(values["step"]))

    @abstractmethod
    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of a step by name."""

    def close(self) -> None:  # noqa: B027 some have nothing to close
        """Write what waits to be written."""


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float):
            if name != "step":
                yield name, value
        elif np.ndim(value) == 1:
            yield from ((f"{name}/{n}", float(each)) for n, each in enumerate(value))


def _imported(name: str, package: str, *modules: str) -> list[Any]:
    """Modules of a package that is an extra; KernelError without it."""
    try:
        return [import_module(module) for module in modules]
    except ImportError as e:
        raise KernelError(f"callbacks.{name} needs {package}: {e}. Install it with `pip install {package}`") from e


class TensorBoard(Tracker):
    """Event files for TensorBoard in a folder, by the package `tensorboard`; PyTorch is not needed."""

    def __init__(self, folder: str | Path) -> None:
        event, self._summary, writer = _imported(
            "TensorBoard",
            "tensorboard",
            "tensorboard.compat.proto.event_pb2",
            "tensorboard.compat.proto.summary_pb2",
            "tensorboard.summary.writer.event_file_writer",
        )
        if not str(folder):
            raise InvalidArgumentError("TensorBoard: folder: expected the name of a folder, got ''")
        self._event = event.Event
        try:
            self._writer = writer.EventFileWriter(str(folder), filename_suffix=f".{socket.gethostname()}")
        except OSError as e:
            raise InvalidArgumentError(f"cannot write to {folder}: {e.strerror or e}") from e

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        value = self._summary.Summary.Value
        self._write([value(tag=name, simple_value=float(number)) for name, number in values.items()], step)

    def histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, step: int) -> None:
        """A histogram; the values in a bin count as its middle."""
        middle = (edges[1:] + edges[:-1]) / 2
        counted = self._summary.HistogramProto(
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float(counts @ middle),
            sum_squares=float(counts @ middle**2),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._write([self._summary.Summary.Value(tag=name, histo=counted)], step)

    def _write(self, values: list[Any], step: int) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._writer.flush()


class MLflow(Tracker):
    """A run of MLflow. uri: of the server, or the folder or database where it keeps runs; default: MLflow's own.

    parameters: what is noted of the run besides.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run: str | None = None,
        uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        entities, tracking = _imported("MLflow", "mlflow", "mlflow.entities", "mlflow.tracking")
        self._metric, self._client = entities.Metric, tracking.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self.run_id: str = self._client.create_run(number, run_name=run).info.run_id
        noted = [entities.Param(name, str(value)) for name, value in (parameters or {}).items()]
        self._client.log_batch(self.run_id, params=noted)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self.run_id, [self._metric(name, float(x), now, step) for name, x in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


class WandB(Tracker):
    """A run of Weights & Biases; the arguments are those of `wandb.init`. `log=wandb.log` does as well."""

    def __init__(self, **arguments: Any) -> None:
        (self._wandb,) = _imported("WandB", "wandb", "wandb")
        self._run = self._wandb.init(**arguments)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, step: int) -> None:
        """A histogram."""
        self._run.log({name: self._wandb.Histogram(np_histogram=(counts, edges))}, step=step)

    def close(self) -> None:
        self._run.finish()
