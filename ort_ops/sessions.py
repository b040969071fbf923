"""Sessions: stock onnxruntime with the kernels of our operators registered.

Those of all routes but "onnx" need llvmlite and onnxruntime-extensions, which are imported when somebody asks for them:
where there are none, the standard operators of "onnx" run on onnxruntime alone.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import onnxruntime
from onnx import ModelProto, parser
from onnxruntime.capi import onnxruntime_pybind11_state as state  # pyright: ignore[reportAttributeAccessIssue]

from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, KernelError, warn
from onnx_backprop.opset.core.limits import Limits
from onnx_backprop.opset.core.mapped import mapped_tensors, serialized, whole
from onnx_backprop.opset.core.reading import existing, load
from onnx_backprop.opset.core.signals import Deferred, surface
from onnx_backprop.opset.functions.declared import OPERATORS
from onnx_backprop.opset.functions.half import holds_half, without
from onnx_backprop.opset.functions.native import SEPARATE_LIBRARY
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from onnx_backprop.opset.graphs.lazy import ir, is_ir_model
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.ort_ops.native_graph import lower_sound
from onnx_backprop.ort_ops.weights import give_values

if TYPE_CHECKING:
    from typing import Any as SessionOptions  # a class in C, of which type checkers know nothing
else:
    from onnxruntime import SessionOptions

Lock = AbstractContextManager[Any]
Named = str | tuple[str, Mapping[str, Any]]  # a provider as onnxruntime takes it
logger = logging.getLogger("onnx_backprop")
_FOLDING = "optimization.constant_folding_max_output_size_in_bytes"
_ACCURACY, _FLOAT32 = "session.qdq_matmulnbits_accuracy_level", "1"
_LEAN_FOLDED_BYTES = 16 << 20  # a mask of 2,048 by 2,048; no table of words
# what onnxruntime says about a model; its errors have no base of their own
_REFUSALS = (state.Fail, state.InvalidGraph, state.InvalidArgument, state.InvalidProtobuf, state.NotImplemented)
_REFUSALS = (*_REFUSALS, state.RuntimeException, state.NoModel, state.NoSuchFile)

_UNKNOWN = re.compile(r"([\w.-]+):(\w+)\(-?\d+\) is not a registered function/op")
_QUIET = {"log_severity_level": 4, "optimized_model_filepath": "", "enable_profiling": False}  # while options are tried
_CHANGED = threading.Lock()  # held while options that other sessions may have too are changed
_TOO_EARLY = (
    "onnxruntime-extensions' library was registered with these session options before the kernels were in it. Call "
    "onnx_backprop.register_ops(options) in the place of options.register_custom_ops_library(…), which it does too"
)
_registered: WeakSet[SessionOptions] = WeakSet()
_settings: WeakKeyDictionary[SessionOptions, dict[str, Any]] = WeakKeyDictionary()  # what `_options` was called with
# Libraries take an operator once, and the first sessions may be made by several threads at once.
_registration = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_registration.acquire, after_in_parent=_registration.release, after_in_child=_registration.release
    )


def register_ops(session_options: SessionOptions) -> SessionOptions:
    """Register the kernels with your session options; returns the same options.

    Every session on a model with kernels="native", "numpy" or "numba" needs this. Calling it again with the same
    options does nothing: onnxruntime takes a library once. "numpy" and "numba" run in the Python process that calls
    this, under its interpreter lock, which the loops themselves release. If the native kernels cannot work, a warning
    says why, and models that need them do not load.

    Options with which `register_custom_ops_library` has registered onnxruntime-extensions are used as they are, since
    that library cannot be registered twice. They have the kernels if these had been registered in the process before;
    otherwise this is a KernelError.
    """
    if not isinstance(session_options, onnxruntime.SessionOptions):
        raise InvalidArgumentError(
            f"session_options: expected onnxruntime.SessionOptions, got {type(session_options).__name__}"
        )
    if not has_kernels(session_options) and not _missing():
        raise KernelError(_TOO_EARLY)
    return session_options


def has_kernels(session_options: SessionOptions) -> bool:
    """Register the kernels with session options; whether they have them."""
    with _registration:
        native = native_kernels_work()
        if _missing():
            return False
        from onnx_backprop.ort_ops import native_table, numpy_route
        from onnx_backprop.ort_ops.runtime.extensions import get_library_path, native_library

        if native:
            native_table.register()
        numpy_route.register()
        with Deferred():
            if session_options not in _registered:
                if _loads(session_options, "ai.onnx.contrib.StringUpper", "string"):
                    if not _loads(session_options, f"{numpy_route.RANKS_DOMAIN}.{numpy_route.SUM}", "double"):
                        return False
                else:
                    session_options.register_custom_ops_library(get_library_path())
                if SEPARATE_LIBRARY and native_kernels_work():
                    session_options.register_custom_ops_library(native_library())
                _registered.add(session_options)
    return True


def kernels_on(options: SessionOptions, kernels: str | None) -> str | None:
    """Register the kernels with session options; the route that then runs there.

    That is the given one, "onnx" in the place of "native" where that is missing, with a warning. KernelError for
    "numpy" and "numba" where they are missing.
    """
    there = has_kernels(options)
    if kernels in PYTHON_KERNELS:
        require_operators(f'kernels="{kernels}"')
        if not there:
            raise KernelError(_TOO_EARLY)
    if kernels == "numba":
        from onnx_backprop.ort_ops.numpy_route import by_loops

        by_loops()
    if kernels == "native" and not there and not _missing():
        logger.warning('kernels="onnx" take the place of "native": %s', _TOO_EARLY)
    return "onnx" if kernels == "native" and not (there and native_kernels_work()) else kernels


def _loads(options: SessionOptions, operator: str, kind: str) -> bool:
    """Whether a session on some options has an operator of one input and one output of a type."""
    domain = operator.rpartition(".")[0]
    graph = f"trial ({kind}[n] x) => ({kind}[] y) {{ y = {operator}(x) }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "{domain}": 1]> {graph}')
    kept = {name: getattr(options, name) for name in _QUIET}
    try:
        for name, value in _QUIET.items():
            setattr(options, name, value)
        providers = None if options.has_providers() else ["CPUExecutionProvider"]
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    except _REFUSALS:
        return False
    finally:
        for name, value in kept.items():
            setattr(options, name, value)
    return True


def session(
    model: ModelProto | ir.Model | str | Path,
    *,
    kernels: str | None = "native",
    session_options: SessionOptions | None = None,
    providers: Sequence[Named] | None = None,
    lock: Lock | None = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """`onnx_backprop.session` on the CPU, or on providers that are given or stand in the session options.

    lock: what is held while it is made and in each of its runs.
    """
    path = None if isinstance(model, ModelProto) or is_ir_model(model) else existing(model)
    if kernels is not None or is_ir_model(model):
        model = load(model, mapped=True)
    options = session_options or default_options(python_operators=kernels in PYTHON_KERNELS)
    source, weights = str(path), list[onnxruntime.OrtValue]()
    if isinstance(model, ModelProto):
        mapped = any(mapped_tensors(model))
        if mapped and options in _settings:  # weights are given to options for good, so not to those that others have
            options = _options(**_settings[options])
        elif mapped:
            model = whole(model)
        kernels = kernels_on(options, kernels)
        model = deepcopy(model) if kernels is not None or mapped else model
        model = model if kernels is None else lower_sound(model, kernels).model
        weights = give_values(model, options)
        source = serialized(model)
    else:
        kernels_on(options, None)
    opened = _open(source, model, options, providers, lock, kwargs)
    opened.weights = weights
    if native_kernels_work():
        from onnx_backprop.ort_ops.runtime import ahead

        opened.twice = ahead.run if ahead.repeatable(model) else None
    return opened


def open_session(
    model: ModelProto,
    options: SessionOptions,
    providers: Sequence[Named] | None,
    *,
    lock: Lock | None = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """A session on a model as it is, without operators of our own; lock, errors as `session`."""
    return _open(serialized(whole(model)), model, options, providers, lock, kwargs)


def _open(
    source: str | bytes,
    model: object,
    options: SessionOptions,
    providers: Sequence[Named] | None,
    lock: Lock | None,
    arguments: dict[str, Any],
) -> _Session:
    """providers: those of the options, or the CPU, where there are none."""
    if isinstance(model, ModelProto):
        left_out = list(without(onnxruntime.__version__)) if holds_half(model) else []
        if any(a.name == "training_mode" and a.i for node in all_nodes(model) for a in node.attribute):
            left_out.append("ConstantSharing")  # a BatchNormalization overwrites statistics that others read then
        if left_out:
            arguments["disabled_optimizers"] = [*(arguments.get("disabled_optimizers") or ()), *left_out]
    if providers or not options.has_providers():
        arguments["providers"] = list(providers or ["CPUExecutionProvider"])
    lock = lock or nullcontext()
    try:
        with lock:
            opened = _Session(source, options, **arguments)
    except _REFUSALS as e:
        with lock:
            unoptimized = _open_unoptimized(source, options, arguments)
        if unoptimized is None:
            raise InvalidModelError(f"onnxruntime does not load the model: {e}{_advice(str(e))}") from e
        warn(f"onnxruntime's graph optimizations fail on this model, which runs without them: {e}")
        opened = unoptimized
    opened.lock = lock
    return opened


def _open_unoptimized(source: str | bytes, options: SessionOptions, arguments: dict[str, Any]) -> _Session | None:
    """A session on a model as it stands; None if that does not load either, or no optimizations were asked for."""
    none = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with _CHANGED:
        level = options.graph_optimization_level
        if level == none:
            return None
        try:
            options.graph_optimization_level = none
            return _Session(source, options, **arguments)
        except _REFUSALS:
            return None
        finally:
            options.graph_optimization_level = level


def _advice(refusal: str) -> str:
    """What to do about an operator that nothing runs."""
    early = next((op.name for op in OPERATORS.values() if op.key in refusal), "")
    if early:
        return f". {early} was registered after these session options had been: make new ones"
    if "Could not find an implementation" in refusal:
        return ". onnxruntime has no kernel of it for these types on this device: export the model in float32"
    match = _UNKNOWN.search(refusal)
    if match is None:
        return ""
    if (match[1], match[2]) in OPERATORS:
        return f". The declaration of {match[2]} has no body=, which standard operators are written from; give it one"
    return (
        ". Nothing runs it: declare it by onnx_backprop.register_kernel, write it out by register_expansion, or give "
        "session_options in which its library is registered"
    )


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _surfacing(method: _Method) -> _Method:
    """A method that fails because Python was interrupted in a kernel raises that, a KeyboardInterrupt as a rule."""

    @wraps(method)
    def call(self: _Session, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.lock:
                return method(self, *args, **kwargs)
        except Exception:
            surface()
            raise

    return cast(_Method, call)


def _compiling(method: _Method) -> _Method:
    """A method that first compiles what it needs all together."""

    @wraps(method)
    def call(self: _Session, *args: Any, guard: np.ndarray | None = None, **kwargs: Any) -> Any:
        if self.twice is None:
            return method(self, *args, **kwargs)
        return self.twice(lambda: method(self, *args, **kwargs), guard)

    return cast(_Method, call)


class _Session(onnxruntime.InferenceSession):
    twice: Callable[..., Any] | None = None  # `ahead.run`, where a run may take place twice
    weights: Sequence[onnxruntime.OrtValue] = ()  # which it reads and does not hold
    lock: Lock = nullcontext()  # held in each run
    __init__ = _surfacing(onnxruntime.InferenceSession.__init__)
    run = _compiling(_surfacing(onnxruntime.InferenceSession.run))
    run_with_ort_values = _compiling(_surfacing(onnxruntime.InferenceSession.run_with_ort_values))
    run_with_iobinding = _surfacing(onnxruntime.InferenceSession.run_with_iobinding)
    run_bound: Any = _compiling(run_with_iobinding)


def run_bound(
    session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, guard: np.ndarray | None = None
) -> None:
    """`session.run_with_iobinding(binding)`, kernels compiling together.

    So the run may take place twice. Where outputs share memory with inputs, `guard` is the number that the model's
    updates wait for (`rewrites.in_place`).
    """
    if isinstance(session, _Session):
        session.run_bound(binding, guard=guard)
    else:
        session.run_with_iobinding(binding)


@cache
def native_kernels_work() -> bool:
    """Whether the native kernels are registered; a warning, once per process, where they are not."""
    with _registration:  # which no cache keeps several threads from doing at once
        reason = _missing()
        if not reason:
            from onnx_backprop.ort_ops import native_route

            reason = native_route.reason_against()
    if reason:
        logger.warning(
            'the native kernels of kernels="native" cannot work here. Sessions and trainers use "onnx" in their place, '
            "standard operators of onnxruntime: %s",
            reason,
        )
    return not reason


def require_operators(what: str) -> None:
    """KernelError where no operators can be registered, which `what` needs."""
    if reason := _missing():
        raise KernelError(f"{what} needs onnxruntime-extensions and llvmlite: {reason}. Install both")


@cache
def _missing() -> str:
    """What all routes but "onnx" lack to be imported, onnxruntime-extensions or llvmlite; '' where both are there."""
    try:
        with Deferred():  # pybind11 turns an interrupted import into an ImportError
            from onnx_backprop.ort_ops import native_route, numpy_route  # noqa: F401
    except (ImportError, OSError) as e:  # OSError: a library that this system cannot load
        return str(e)
    return ""


def _options(*, python_operators: bool, lean: bool = False, threads: int = 0) -> SessionOptions:
    """`default_options` that nobody else has."""
    options = onnxruntime.SessionOptions()
    _settings[options] = {"python_operators": python_operators, "lean": lean, "threads": threads}
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if lean:
        be_lean(options)
    else:
        _be_exact(options)
        options.add_session_config_entry(_FOLDING, str(Limits().folded_bytes))
    if python_operators:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


@cache
def default_options(*, python_operators: bool, lean: bool = False, threads: int = 0) -> SessionOptions:
    """Options for somebody who has none of their own, the same for all: what is registered with options is never freed.

    Only the end of the process is logged: errors come as exceptions, and onnxruntime warns of every initializer that
    can be overridden, which parameters are. No spinning with Python operators: onnxruntime's worker threads, waiting
    busily between nodes, would take the cores from NumPy's (measured: half the speed). lean: see `be_lean`.
    threads: of an operator; 0 for one on each core.
    """
    return _options(python_operators=python_operators, lean=lean, threads=threads)


def _be_exact(options: SessionOptions) -> None:
    """Let a product with dequantised weights take floats as they are, unless the options say otherwise.

    By default onnxruntime rounds the other factor to 8 bits: a loss is 0.2 % off, and its gradient is that of the file.
    """
    _set_default(options, _ACCURACY, _FLOAT32)


def _set_default(options: SessionOptions, key: str, value: str) -> None:
    try:
        options.get_session_config_entry(key)
    except RuntimeError:  # it is not there
        options.add_session_config_entry(key, value)


def be_lean(options: SessionOptions) -> SessionOptions:
    """Let a session hold what its run needs at a time, and no more; returns the options.

    With memory patterns onnxruntime allocates all that a run needs once more after the first, in one block, and keeps
    both. With reuse it keeps the memory of a tensor for a later one of the same shape, however late that comes. Its
    default order runs gradients of parameters last and keeps all that they read until then; a training graph's own
    order, which the other one follows, runs them as soon as it can. What it computes from constants it holds for good,
    as the zeros that rows of an embedding's gradient are put into; so not what is large, unless the options say so.
    Products are exact in it (`_be_exact`).
    """
    _be_exact(options)
    _set_default(options, _FOLDING, str(_LEAN_FOLDED_BYTES))
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    return options
