"""Compiled code calls Python: whatever Python raises, it is a failure that C sees, and an exception that Python sees.

A callback of ctypes drops an exception and answers 0, which onnxruntime takes for success; and KeyboardInterrupt may be
raised before the first and after the last line of any function, so no `try` in Python is enough. Compiled code
therefore calls Python's C interface itself. What a Python function raises is raised again by the main thread as soon
as that is back in Python, which is where signals are handled anyway; meanwhile onnxruntime hears of a failure.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnx_backprop.ort_ops.compiler.decorators import exported, inner
from onnx_backprop.ort_ops.compiler.llvm import call
from onnx_backprop.ort_ops.compiler.records import Record, layout, offset, size, view
from onnx_backprop.ort_ops.compiler.values import INT

_LOW = 0xFFFFFFFF


@dataclass(kw_only=True)
class Interpreter(Record):
    """Addresses of functions of Python's C interface, all of the stable ABI and none of variable arguments."""

    PyGILState_Ensure: int
    PyGILState_Release: int
    PyLong_FromLongLong: int
    PyTuple_New: int
    PyTuple_SetItem: int
    PyObject_CallObject: int
    PyDict_GetItem: int
    Py_IncRef: int
    Py_DecRef: int
    PyErr_Fetch: int
    PyErr_Restore: int
    PyErr_WriteUnraisable: int
    Py_AddPendingCall: int
    PyMem_RawMalloc: int
    PyMem_RawFree: int
    raise_waiting: int
    interrupted: int  # a text


@dataclass(kw_only=True)
class Waiting(Record):
    """An exception that waits."""

    type: int
    value: int
    traceback: int
    python: int


_WAITING_BYTES, _VALUE, _TRACEBACK = 8 * size(Waiting), offset(Waiting, "value"), offset(Waiting, "traceback")


def immortal(value: Any) -> Any:
    """Sessions may outlive the interpreter's modules: what onnxruntime or compiled code points to is never freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


@functools.cache
def interface() -> int:
    """The address of the `Interpreter`, which compiled functions get as `python`."""
    text = immortal(ctypes.create_string_buffer(b"onnx_backprop: a kernel was interrupted"))
    addresses = {"raise_waiting": _raise_waiting.address, "interrupted": ctypes.addressof(text)}
    names = [name for name in layout(Interpreter) if name not in addresses]
    functions = {n: ctypes.cast(getattr(ctypes.pythonapi, n), ctypes.c_void_p).value or 0 for n in names}
    block = Interpreter(**functions, **addresses).words()
    return ctypes.addressof(immortal((ctypes.c_int64 * len(block))(*block)))


@inner
def _restore(waiting, python):
    """Set the exception that waits."""
    call(python.PyErr_Restore, (waiting.type, waiting.value, waiting.traceback))
    call(python.PyMem_RawFree, (waiting,))


@exported(INT, INT)
def _raise_waiting(address):
    """For Py_AddPendingCall: raise it in the main thread."""
    waiting = view(Waiting, address)
    _restore(waiting, view(Interpreter, waiting.python))
    return -1


@inner
def _put_off(python):
    """Have the exception that is set raised by the main thread; where that cannot be, it is printed."""
    address = call(python.PyMem_RawMalloc, (_WAITING_BYTES,))
    if address:
        waiting = view(Waiting, address)
        waiting.python = python
        call(python.PyErr_Fetch, (address, address + _VALUE, address + _TRACEBACK))
        if call(python.Py_AddPendingCall, (python.raise_waiting, address)) & _LOW == 0:
            return
        _restore(waiting, python)
    call(python.PyErr_WriteUnraisable, (0,))


@inner
def ask(python, function, words):
    """Call a Python function with the address of some words; whether it came back without an exception."""
    state = call(python.PyGILState_Ensure, (0,))
    result, number, arguments = 0, call(python.PyLong_FromLongLong, (words,)), call(python.PyTuple_New, (1,))
    if number and arguments:
        call(python.PyTuple_SetItem, (arguments, 0, number))
        result = call(python.PyObject_CallObject, (function, arguments))
        call(python.Py_DecRef, (result,))
        call(python.Py_DecRef, (arguments,))
    if result == 0:
        _put_off(python)
    call(python.PyGILState_Release, (state,))
    return result != 0


@exported(INT, INT, INT, INT, INT, INT, INT)
def _answer(address, function, otherwise, key, feeds, attributes):
    """What a Python function answers to three arguments; where it raises, what a dictionary has for the first."""
    python = view(Interpreter, address)
    arguments = call(python.PyTuple_New, (3,))
    if arguments == 0:
        return 0
    _give(python, arguments, 0, key)
    _give(python, arguments, 1, feeds)
    _give(python, arguments, 2, attributes)
    result = call(python.PyObject_CallObject, (function, arguments))
    if result == 0:
        result = call(python.PyDict_GetItem, (otherwise, key))
        if result:
            call(python.Py_IncRef, (result,))
            _put_off(python)
    call(python.Py_DecRef, (arguments,))
    return result


@inner
def _give(python, arguments, place, value):
    call(python.Py_IncRef, (value,))
    call(python.PyTuple_SetItem, (arguments, place, value))


def guarded(function: Callable[..., object], otherwise: dict[int, object]) -> Callable[..., object]:
    """A Python function of three arguments, made so that it answers `otherwise` of the first where it would raise.

    None of it is bytecode, so that no signal is handled outside `function`.
    """
    objects = [ctypes.py_object] * 3
    answer = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, *objects[:2], *objects)(_answer.address)
    return functools.partial(answer, interface(), function, otherwise)
