"""The routes "numpy" and "numba": every operator's float64 reference, or its loop, as a Python operator.

A Python operator of onnxruntime-extensions gets and returns float32 and integer tensors, knows no list attributes, no
optional inputs and no exceptions (one ends the process). The body in `opset.functions` therefore feeds attributes as
tensors and expects (data, shape, message) back; a check operator turns a non-empty message into a failed run with that
text.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_backprop.opset.core.errors import KernelError, OnnxBackpropError
from onnx_backprop.opset.core.op import Attribute, Given, Input, Op
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.opset.functions.declared import OPERATORS
from onnx_backprop.opset.functions.native import SEPARATE_LIBRARY
from onnx_backprop.opset.functions.numpy import CHECK_DOMAIN, CHECK_OP, NUMBA_DOMAIN, NUMPY_DOMAIN
from onnx_backprop.opset.functions.protos import ABSENT_INT, ABSENT_SHAPE
from onnx_backprop.opset.operators.registry import OPS
from onnx_backprop.ort_ops.compiler.decorators import exported
from onnx_backprop.ort_ops.compiler.llvm import load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime import c_abi, pause
from onnx_backprop.ort_ops.runtime.call import INPUT_WORDS, MUTABLE_DATA, OUTPUT, read_input
from onnx_backprop.ort_ops.runtime.extensions import PyCustomOpDef, RawArray, get_library_path, invoke, onnx_op
from onnx_backprop.ort_ops.runtime.interpreter import guarded
from onnx_backprop.ort_ops.runtime.stages import ort

logger = logging.getLogger("onnx_backprop")
RANKS_DOMAIN, SUM, WEIGHTED_SUM = "onnx_backprop.ranks", "Sum", "WeightedSum"

Array = NDArray[Any]

_input_words, _address = stack(INPUT_WORDS), stack(1)


_registered: set[str] = set()  # the keys of operators
_interrupted: dict[int, object] = {}  # what a Python operator answers, by its number, where Python raises


def register() -> None:
    """Register the Python operators and the check operator, each once per process."""
    with Deferred():  # an operator is registered once or never
        if not _registered:
            _register_check()
            for name in (SUM, WEIGHTED_SUM):
                _register_sum(name)
            pause.register()
        for op in (*OPS, *OPERATORS.values()):
            if op.key not in _registered:
                _register_kernel(NUMPY_DOMAIN, op)
                _register_kernel(NUMBA_DOMAIN, op)
                _registered.add(op.key)


_rank_sum: ContextVar[Callable[[str, Array], None]] = ContextVar("rank_sum")


@contextmanager
def summed_by(add: Callable[[str, Array], None]) -> Iterator[None]:
    """A block in which sessions of this thread sum over ranks: SUM and WEIGHTED_SUM, of one float64 tensor each.

    add: called with the operator's name and an array, which it changes in place. Where it raises, the operators answer
    NaN, as they do outside of such a block, and the end of the block raises the first error.
    """
    errors: list[BaseException] = []

    def guarded_add(name: str, array: Array) -> None:
        try:
            add(name, array)
        except BaseException as e:  # noqa: BLE001 - nothing may leave an operator
            errors.append(e)
            array[...] = np.nan

    token = _rank_sum.set(guarded_add)
    try:
        yield
    finally:
        _rank_sum.reset(token)
    if errors:
        raise errors[0]


def _register_sum(name: str) -> None:
    def compute(feed: Array) -> RawArray:
        array = np.array(feed, np.float64)
        _rank_sum.get(lambda _, outside: outside.fill(np.nan))(name, array)
        return RawArray(array, np.float64)

    onnx_op(
        op_type=f"{RANKS_DOMAIN}::{name}", inputs=[PyCustomOpDef.dt_double], outputs=[PyCustomOpDef.dt_double], attrs={}
    )(compute)


@cache
def by_loops() -> Mapping[str, Op]:
    """The operators that have loops; KernelError without Numba, which is not imported before somebody asks for it."""
    try:
        with Deferred():  # pybind11 turns an interrupted import into an ImportError
            from onnx_backprop.ort_ops.loops import BY_LOOPS
    except ImportError as e:
        raise KernelError(
            f"kernels=\"numba\" needs Numba: {e}. Run pip install 'onnx-backprop[numba]', or take the fast route "
            'that needs none, kernels="native"'
        ) from e
    return BY_LOOPS


def _register_kernel(domain: str, op: Op) -> None:
    lists = [a for a in op.attributes if a.kind in ("float", "ints", "floats")]
    scalars = [a for a in op.attributes if a.kind in ("int", "string")]
    kinds = {"int": PyCustomOpDef.dt_int64, "string": PyCustomOpDef.dt_string}

    def compute(*feeds: Array, **given: Any) -> tuple[RawArray, ...]:
        try:
            inputs = [_input(spec, feed) for spec, feed in zip(op.inputs, feeds, strict=False)]
            attributes = {a.name: _list(a, feed) for a, feed in zip(lists, feeds[len(op.inputs) :], strict=True)}
            attributes |= {name: value for name, value in given.items() if value != ABSENT_INT}
            computed_by = by_loops().get(op.key, op) if domain == NUMBA_DOMAIN else op
            results = computed_by.evaluate_all(inputs, attributes)
        except OnnxBackpropError as e:
            return _failure(str(e), len(op.outputs))
        except Exception as e:  # noqa: BLE001 - out of memory, a bug: nothing may leave this function
            return _failure(f"{op.name}: {type(e).__name__}: {e}", len(op.outputs))
        return _answer([(result.reshape(-1), result.shape) for result in results], "")

    registered = onnx_op(
        op_type=f"{domain}::{op.key}",
        inputs=[_input_type(i) for i in op.inputs]
        + [PyCustomOpDef.dt_int64 if a.kind == "ints" else PyCustomOpDef.dt_float for a in lists],
        outputs=[PyCustomOpDef.dt_float, PyCustomOpDef.dt_int64] * len(op.outputs) + [PyCustomOpDef.dt_uint8],
        attrs={a.name: kinds[a.kind] for a in scalars},
    )(compute)
    failure = _failure(f"{op.name}: interrupted", len(op.outputs))
    number = registered._nativedef.obj_id
    _interrupted[number] = (number, *(part for result in failure for part in (result.shape, result.tolist())))


_INPUT_TYPES = {
    "T1": PyCustomOpDef.dt_float,
    "T2": PyCustomOpDef.dt_int32,
    "T3": PyCustomOpDef.dt_float,
    "T4": PyCustomOpDef.dt_int64,
    "T5": PyCustomOpDef.dt_float,
    "T6": PyCustomOpDef.dt_uint8,
    "T7": PyCustomOpDef.dt_int64,
}


def _input_type(spec: Input) -> int:
    if spec.shape_only:
        return PyCustomOpDef.dt_int64
    return _INPUT_TYPES[spec.type_name]


def _input(spec: Input, feed: Array) -> Given:
    if spec.optional and feed.shape == ABSENT_SHAPE:
        return None
    return tuple(int(d) for d in feed) if spec.shape_only else feed


def _list(attribute: Attribute, feed: Array) -> float | Sequence[int] | Sequence[float]:
    if attribute.kind == "float":
        return float(feed)
    return [int(v) for v in feed] if attribute.kind == "ints" else [float(v) for v in feed]


def _answer(results: Sequence[tuple[Array, tuple[int, ...]]], message: str) -> tuple[RawArray, ...]:
    """Data and shape of each output, and the text, which ends in a zero unless it is empty."""
    text = RawArray(np.frombuffer(f"{message}\0".encode() if message else b"", np.uint8), np.uint8)
    pairs = [(RawArray(data, np.float32), RawArray(np.array(shape), np.int64)) for data, shape in results]
    return (*(part for pair in pairs for part in pair), text)


def _failure(message: str, outputs: int) -> tuple[RawArray, ...]:
    """No data for one element: where the check operator is missing, the Reshape behind it fails the run."""
    return _answer([(np.zeros(0), (1,))] * outputs, message)


@exported(INT, INT, INT)
def _check(api, context):
    """(shape, message) -> shape, or the message as the reason why the run fails."""
    words, data = _input_words(), _address()
    _, status = read_input(api, context, 1, 0, words, 0, data)
    if status:
        return status
    if load_i64(words, 3):
        return ort(api, c_abi.CREATE_STATUS, (c_abi.INVALID_ARGUMENT, load_i64(data, 0)))
    _, status = read_input(api, context, 0, 0, words, 0, data)
    if status:
        return status
    source, length = load_i64(data, 0), load_i64(words, 3)
    status = ort(api, OUTPUT, (context, 0, words + 8 * 3, 1, data))
    if status:
        return status
    status = ort(api, MUTABLE_DATA, (load_i64(data, 0), data))
    if status:
        return status
    for n in range(length):
        store_i64(load_i64(data, 0), n, load_i64(source, n))
    return 0


def _register_check() -> None:
    """And keep the library's Python from raising into C++, which ends the process."""
    try:
        inputs = [(kind, c_abi.REQUIRED) for kind in (c_abi.INT64, c_abi.UINT8)]
        check = c_abi.custom_op(CHECK_OP, inputs, (c_abi.INT64,), compute=_check)
        c_abi.add_external_custom_op(str(get_library_path()), check)
        PyCustomOpDef.install_hooker(guarded(invoke, _interrupted))
    except (OSError, AttributeError) as e:
        logger.log(
            logging.INFO if SEPARATE_LIBRARY else logging.WARNING,  # on Windows no build takes them
            "this build of onnxruntime-extensions takes no native operators (%s); reasons for failed runs of our "
            "operators are logged instead of being part of the exception",
            e,
        )
        onnx_op(
            op_type=f"{CHECK_DOMAIN}::{CHECK_OP}",
            inputs=[PyCustomOpDef.dt_int64, PyCustomOpDef.dt_uint8],
            outputs=[PyCustomOpDef.dt_int64],
        )(_logged_check)


def _logged_check(shape: Array, message: Array) -> RawArray:
    if message.size:
        logger.error("%s", message.tobytes()[:-1].decode())
    return RawArray(shape, np.int64)
