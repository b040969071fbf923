"""`Placed`: the sessions of one model on a device, one for each set of lengths; `session`, a single one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime
from onnx import ModelProto

from onnx_backprop import ort_ops
from onnx_backprop.converters.devices.limits import HOST
from onnx_backprop.converters.prepare.fused.expand import with_expansions_written
from onnx_backprop.converters.prepare.fused.table import REGISTERED
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.extensions import load_extensions
from onnx_backprop.opset.functions.half import holds_half
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.ort_ops import Named, SessionOptions
from onnx_backprop.providers.choose import Target, chosen
from onnx_backprop.providers.memory import is_lost, lost
from onnx_backprop.providers.placement import RECORDED, placement

logger = logging.getLogger("onnx_backprop")
Lengths = Mapping[str, Sequence[int]]
Result = TypeVar("Result")
_ENTRIES = {RECORDED: "1", "session.layer_assignment_settings": f"cpu({HOST})"}
_KEPT = 8  # sets of lengths whose sessions are kept
_MOVED = 16  # nodes at most that a provider takes and cannot run, and that go to the CPU then
_FAILED = re.compile(r"while running (\S+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)


def session(
    model: ModelProto | ir.Model | str | Path,
    *,
    kernels: str | None = "native",
    session_options: SessionOptions | None = None,
    providers: Sequence[Named] | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """A stock `onnxruntime.InferenceSession` on a model, with the given kernels for the operators of our domain.

    Args:
        kernels: see `use_kernels`; None leaves the model as it is. If the native kernels cannot work, "onnx" replaces
            them and a warning says why.
        session_options: yours; the kernels are registered with them. A model in float16 or bfloat16 goes without the
            optimisers of onnxruntime that end the process on some of them, `opset.functions.half`. Other keywords go to
            InferenceSession.
        device: "cpu", or another of `devices`. The model's own operators then run there, and ours as "onnx", in a form
            that its kernels take; the log names what does not run there.
        providers: a list as onnxruntime takes it, instead of device.

    Errors: InvalidArgumentError for a missing file or an unknown device, InvalidModelError for a model that onnxruntime
    does not load, with its message; KernelError for a device that is missing, with the command that installs it, for
    "numpy" and "numba" without onnxruntime-extensions or llvmlite, and for "numba" without Numba; what `use_kernels`
    raises.
    """
    target = chosen(device, providers)
    load_extensions()
    if REGISTERED and kernels is not None:
        model = with_expansions_written(load(model, mapped=True))
    if target is None or kernels is None:
        if target is not None:
            session_options = session_options or options_for(target)
            kwargs |= {"providers": target.append_to(session_options), "lock": target.lock}
        return ort_ops.session(model, kernels=kernels, session_options=session_options, **kwargs)
    check_kernels(kernels)
    placed = Placed(load(model, mapped=True), target, session_options or options_for(target), **kwargs)
    result = placed.session({})
    placed.say()
    return result


def check_kernels(kernels: str | None) -> None:
    """InvalidArgumentError for the routes of Python operators, which run on the CPU alone."""
    if kernels in PYTHON_KERNELS:
        raise InvalidArgumentError(f"expected kernels 'onnx' with a device, got {kernels!r}", "kernels")


def options_for(target: Target) -> SessionOptions:
    """Session options for somebody who has none of their own."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    target.append_to(options)
    return options


def _entry(options: SessionOptions, key: str) -> str | None:
    try:
        return options.get_session_config_entry(key)
    except Exception:  # noqa: BLE001 - an error of no class of its own where there is none
        return None


class Placed:
    """The sessions of a model on a device, made when they are asked for.

    placement: where the nodes of the first one run; None before. loses_nan: whether what is fed must hold none.
    """

    def __init__(self, model: ModelProto, target: Target, options: SessionOptions, **more: Any) -> None:
        self.target, self.placement = target, None
        self._model, self._options, self._more = model, options, more
        self._limits = target.limits
        self._sessions: dict[tuple[Any, ...], onnxruntime.InferenceSession] = {}
        self._moved: dict[str, str] = {}  # nodes for the CPU that a run has found, with reasons
        self._names: set[str] = set()  # of nodes; a part of a graph that a provider compiles as one has another
        self._warned = False
        # a model that asks for NaN itself says what is to become of it
        self.loses_nan = not target.limits.nan and all(node.op_type != "IsNaN" for node in all_nodes(model.graph))
        if holds_half(model) and not target.has_half:
            self._limits = replace(target.limits, float16=False)
        entries = _ENTRIES if self._limits.annotations else {RECORDED: "1"}
        for key, value in entries.items():
            if _entry(options, key) != value:
                options.add_session_config_entry(key, value)

    def session(self, lengths: Lengths) -> onnxruntime.InferenceSession:
        """The session for inputs of these lengths, which are of all of them where the provider wants them fixed."""
        key = self._key(lengths)
        if key not in self._sessions:
            self._sessions[key] = self._opened(lengths)
            while len(self._sessions) > _KEPT:
                del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = result = self._sessions.pop(key)  # the last one to go
        return result

    def run(self, lengths: Lengths, call: Callable[[onnxruntime.InferenceSession], Result]) -> Result:
        """What a call with the session gives; a node that the provider takes and cannot run goes to the CPU.

        Errors: KernelError for a device that is lost, and those of the call.
        """
        while True:
            session = self.session(lengths)
            try:
                with self.target.lock:  # a binding copies what it is given at once
                    result = call(session)
            except Exception as e:
                if is_lost(str(e)):
                    raise lost(str(e)) from e
                if not self._move(str(e)):
                    raise
                self._sessions.clear()
                self.placement = None
                continue
            self.say()
            return result

    def say(self) -> None:
        """Say once what runs on the CPU."""
        if self.placement is not None and self.placement.elsewhere and not self._warned:
            logger.warning("%s", self.placement)
            self._warned = True

    def _key(self, lengths: Lengths) -> tuple[Any, ...]:
        if not self._limits.fixed_lengths:
            return ()
        return tuple((name, *shape) for name, shape in lengths.items())

    def _opened(self, lengths: Lengths) -> onnxruntime.InferenceSession:
        from onnx_backprop.converters.devices.adapt import adapted  # not above: the CPU needs no converter

        fixed = lengths if self._limits.fixed_lengths else None
        adaptation = adapted(self._model, self._limits, lengths=fixed, host=self._moved)
        providers = self.target.append_to(self._options)
        result = ort_ops.open_session(adaptation.model, self._options, providers, lock=self.target.lock, **self._more)
        self._names.update(node.name for node in all_nodes(adaptation.model.graph))
        if self.placement is None:
            self.placement = placement(result, self.target, adaptation.model, adaptation.host)
        return result

    def _move(self, error: str) -> bool:
        """Whether an error is about a node on the device, which is to run on the CPU from now on."""
        failed = _FAILED.search(error)
        if failed is None or len(self._moved) == _MOVED or not self._limits.annotations:
            return False
        name, reason = re.sub(r"_token_\d+$", "", failed[2]), failed[3].strip().rstrip(".")
        there = self.placement is not None and all(node.name != name for node in self.placement.elsewhere)
        if name not in self._names or name in self._moved or not there:
            return False
        self._moved[name] = f"its kernel fails there, {reason}"
        return True
