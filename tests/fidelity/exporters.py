"""A module written to a file as newcomers write it: each exporter with its defaults."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

TORCHSCRIPT, DYNAMO, OURS = "torchscript", "dynamo", "ob.torch.export"


def exporters() -> tuple[str, ...]:
    try:
        ours = hasattr(import_module("onnx_backprop.torch"), "export")
    except ImportError:
        ours = False
    return (TORCHSCRIPT, DYNAMO, OURS) if ours else (TORCHSCRIPT, DYNAMO)


def export(exporter: str, module: Any, inputs: tuple[np.ndarray, ...], mode: str, path: Path) -> Any:
    """What `training_graph` takes: the path, or what `ob.torch.export` returns."""
    torch = import_module("torch")
    arguments = tuple(map(torch.from_numpy, inputs))
    if exporter == OURS:  # whose warnings count
        return import_module("onnx_backprop.torch").export(module, arguments)
    with _quiet():
        if exporter == DYNAMO:
            torch.onnx.export(module, arguments, str(path), dynamo=True, external_data=False)
        else:
            training: dict[str, Any] = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
            before = {name: buffer.numpy().copy() for name, buffer in module.named_buffers()}
            torch.onnx.export(module, arguments, str(path), dynamo=False, **(training if mode == "train" else {}))
            _put_back(path, before)
    return str(path)


def _put_back(path: Path, buffers: dict[str, np.ndarray]) -> None:
    """Write the running statistics of before: TorchScript's exporter renews them in the run that it traces."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith(("running_mean", "running_var")) and tensor.name in buffers:
            tensor.CopyFrom(numpy_helper.from_array(buffers[tensor.name], tensor.name))
    onnx.save(model, path)


@contextlib.contextmanager
def _quiet() -> Any:
    """Without what exporters print, log and warn of."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
