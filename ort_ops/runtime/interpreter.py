"""Compiled code calls Python: whatever Python raises, it is a failure that C sees, and an exception that Python sees.

A callback of ctypes drops an exception and answers 0, which onnxruntime takes for success; and KeyboardInterrupt may be
raised before the first and after the last line of any function, so no `try` in Python is enough. Compiled code
therefore calls Python's C interface itself. What a Python function raises is raised again by the main thread as soon
as that is back in Python, which is where signals are handled anyway; meanwhile onnxruntime hears of a failure.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from numba import types

from onnx_backprop.ort_ops.runtime.compile import exported, inner
from onnx_backprop.ort_ops.runtime.llvm import call, load_i64, store_i64

# Functions of Python's C interface, all of the stable ABI and none of variable arguments, by their place in a block.
_FUNCTIONS = (
    "PyGILState_Ensure", "PyGILState_Release", "PyLong_FromLongLong", "PyTuple_New", "PyTuple_SetItem",
    "PyObject_CallObject", "PyDict_GetItem", "Py_IncRef", "Py_DecRef", "PyErr_Fetch", "PyErr_Restore",
    "PyErr_WriteUnraisable", "Py_AddPendingCall", "PyMem_RawMalloc", "PyMem_RawFree",
)  # fmt: skip
(
    ENSURE, RELEASE, LONG, TUPLE, SET_ITEM,
    CALL, GET_ITEM, INCREF, DECREF, FETCH, RESTORE,
    UNRAISABLE, PENDING, MALLOC, FREE,
    RAISE, INTERRUPTED, WORDS,
) = range(18)  # fmt: skip
_LOW = 0xFFFFFFFF
# An exception that waits: its type, value and traceback, and the block above.
_TYPE, _VALUE, _TRACEBACK, _PYTHON, _WAITING_WORDS = range(5)


def immortal(value: Any) -> Any:
    """Sessions may outlive the interpreter's modules: what onnxruntime or compiled code points to is never freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


@functools.cache
def interface() -> int:
    """The address of the block, which compiled functions get as `python`."""
    block = immortal((ctypes.c_int64 * WORDS)())
    for place, name in enumerate(_FUNCTIONS):
        block[place] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
    block[RAISE] = _raise_waiting.address
    block[INTERRUPTED] = ctypes.addressof(
        immortal(ctypes.create_string_buffer(b"onnx_backprop: a kernel was interrupted"))
    )
    return ctypes.addressof(block)


def surface() -> None:
    """Raise what waits, in the main thread: entering any Python function does that."""


@exported(types.int64(types.int64))
def _raise_waiting(waiting):
    """For Py_AddPendingCall: raise it in the main thread."""
    python = load_i64(waiting, _PYTHON)
    traceback = load_i64(waiting, _TRACEBACK)
    call(load_i64(python, RESTORE), (load_i64(waiting, _TYPE), load_i64(waiting, _VALUE), traceback))
    call(load_i64(python, FREE), (waiting,))
    return -1


@inner
def _put_off(python):
    """Have the exception that is set raised by the main thread; where that cannot be, it is printed."""
    waiting = call(load_i64(python, MALLOC), (8 * _WAITING_WORDS,))
    if waiting:
        store_i64(waiting, _PYTHON, python)
        call(load_i64(python, FETCH), (waiting, waiting + 8 * _VALUE, waiting + 8 * _TRACEBACK))
        if call(load_i64(python, PENDING), (load_i64(python, RAISE), waiting)) & _LOW == 0:
            return
        traceback = load_i64(waiting, _TRACEBACK)
        call(load_i64(python, RESTORE), (load_i64(waiting, _TYPE), load_i64(waiting, _VALUE), traceback))
        call(load_i64(python, FREE), (waiting,))
    call(load_i64(python, UNRAISABLE), (0,))


@inner
def ask(python, function, words):
    """Call a Python function with the address of some words; whether it came back without an exception."""
    state = call(load_i64(python, ENSURE), (0,))
    result, number, arguments = 0, call(load_i64(python, LONG), (words,)), call(load_i64(python, TUPLE), (1,))
    if number and arguments:
        call(load_i64(python, SET_ITEM), (arguments, 0, number))
        result = call(load_i64(python, CALL), (function, arguments))
        call(load_i64(python, DECREF), (result,))
        call(load_i64(python, DECREF), (arguments,))
    if result == 0:
        _put_off(python)
    call(load_i64(python, RELEASE), (state,))
    return result != 0


@exported(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64))
def _answer(python, function, otherwise, key, feeds, attributes):
    """What a Python function answers to three arguments; where it raises, what a dictionary has for the first."""
    arguments = call(load_i64(python, TUPLE), (3,))
    if arguments == 0:
        return 0
    call(load_i64(python, INCREF), (key,))
    call(load_i64(python, INCREF), (feeds,))
    call(load_i64(python, INCREF), (attributes,))
    call(load_i64(python, SET_ITEM), (arguments, 0, key))
    call(load_i64(python, SET_ITEM), (arguments, 1, feeds))
    call(load_i64(python, SET_ITEM), (arguments, 2, attributes))
    result = call(load_i64(python, CALL), (function, arguments))
    if result == 0:
        result = call(load_i64(python, GET_ITEM), (otherwise, key))
        if result:
            call(load_i64(python, INCREF), (result,))
            _put_off(python)
    call(load_i64(python, DECREF), (arguments,))
    return result


def guarded(function: Callable[..., object], otherwise: dict[int, object]) -> Callable[..., object]:
    """A Python function of three arguments, made so that it answers `otherwise` of the first where it would raise.

    None of it is bytecode, so that no signal is handled outside `function`.
    """
    objects = [ctypes.py_object] * 3
    answer = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, *objects[:2], *objects)(_answer.address)
    return functools.partial(answer, interface(), function, otherwise)
