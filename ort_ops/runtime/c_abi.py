"""The part of onnxruntime's C interface that a custom operator needs, through ctypes.

onnxruntime-extensions exports `AddExternalCustomOp(const OrtCustomOp*)` next to its entry point (on Linux and
macOS); an operator handed to it belongs to the domain `ai.onnx.contrib` of every session that registers the library
afterwards. `OrtCustomOp` is a struct of function pointers in a fixed order, `OrtApi` a table of functions whose
positions never change. Everything that could crash is checked before it is used: the symbol, the API version.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p

from onnx_backprop.ort_ops.compiler.decorators import exported
from onnx_backprop.ort_ops.compiler.llvm import call, load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime.interpreter import Interpreter, ask, immortal, interface

API_VERSION = 17  # of the struct below, where KernelComputeV2 may answer with a status
INVALID_ARGUMENT = 2  # OrtErrorCode
CREATE_STATUS = 0  # its position in OrtApi

_new_words = stack(4)

# ONNXTensorElementDataType
FLOAT, UINT8, INT32, INT64, FLOAT16, BFLOAT16 = 1, 2, 6, 7, 10, 16
REQUIRED, OPTIONAL, VARIADIC = 0, 1, 2  # OrtCustomOpInputOutputCharacteristic


class Api:
    """The functions used here, by their position in `OrtApi`."""

    def __init__(self, table: int) -> None:
        functions = ctypes.cast(table, POINTER(c_void_p))

        def bind(position: int, result: object, *arguments: object) -> Callable[..., int]:
            return CFUNCTYPE(result, *arguments)(functions[position])  # type: ignore[arg-type]

        self.create_status = bind(0, c_void_p, c_int, c_char_p)
        self.release_status = bind(93, None, c_void_p)
        size = POINTER(c_size_t)
        self._int = bind(86, c_void_p, c_void_p, c_char_p, POINTER(c_int64))
        self._float = bind(85, c_void_p, c_void_p, c_char_p, POINTER(c_float))
        self._string = bind(87, c_void_p, c_void_p, c_char_p, c_void_p, size)
        self._ints = bind(163, c_void_p, c_void_p, c_char_p, c_void_p, size)
        self._floats = bind(162, c_void_p, c_void_p, c_char_p, c_void_p, size)

    def status(self, message: str) -> int:
        """A failed OrtStatus with this text; onnxruntime releases it."""
        return self.create_status(INVALID_ARGUMENT, message.encode())

    def attribute(self, info: int, name: str, kind: str) -> object:
        """An attribute of the node behind an OrtKernelInfo, None where the node has none of this name and kind."""
        key = name.encode()
        if kind in ("int", "float"):
            number, read = (c_int64(), self._int) if kind == "int" else (c_float(), self._float)
            return number.value if self._there(read(info, key, number)) else None
        read = {"string": self._string, "ints": self._ints, "floats": self._floats}[kind]
        count = c_size_t()
        if not self._there(read(info, key, None, count)):
            return None
        if kind == "string":
            text = ctypes.create_string_buffer(count.value)
            return text.value.decode() if self._there(read(info, key, text, count)) else None
        if not count.value:
            return ()
        values = ((c_int64 if kind == "ints" else c_float) * count.value)()
        return tuple(values) if self._there(read(info, key, values, count)) else None

    def _there(self, status: int | None) -> bool:
        if status:
            self.release_status(status)
        return not status


# struct OrtCustomOp of onnxruntime_c_api.h as of API 17, behind the version; what no operator needs stays null.
_FUNCTIONS = (
    "create_kernel", "get_name", "get_execution_provider", "get_input_type", "get_input_count", "get_output_type",
    "get_output_count", "compute", "destroy", "get_input_characteristic", "get_output_characteristic",
    "get_input_memory_type", "get_variadic_input_min_arity", "get_variadic_input_homogeneity",
    "get_variadic_output_min_arity", "get_variadic_output_homogeneity", "create_kernel_v2", "compute_v2",
    "infer_output_shape", "get_start_version", "get_end_version", "get_may_inplace", "release_may_inplace",
    "get_alias_map", "release_alias_map",
)  # fmt: skip
# What our functions find behind it, by its word in what onnxruntime hands them, the address of the whole.
_FIRST = 1 + len(_FUNCTIONS)
_NAME, _INPUT_COUNT, _INPUTS, _OPTIONAL, _OUTPUT_COUNT, _OUTPUTS, _PYTHON, _CREATE, _END = range(_FIRST, _FIRST + 9)


class OrtCustomOp(Structure):
    """The struct, and what is known of the operator before any kernel exists."""

    _fields_ = (("version", c_uint32), *((name, c_void_p) for name in _FUNCTIONS), ("words", c_int64 * (_END - _FIRST)))


# In compiled code, for onnxruntime has no way to hear that an answer failed, as an answer in Python may.


def _always(value: int) -> Exported:
    @exported(INT, INT)
    def constant(_op):
        return value

    return constant


def _word(word: int) -> Exported:
    @exported(INT, INT)
    def single(op):
        return load_i64(op, word)

    return single


def _entry(word: int) -> Exported:
    @exported(INT, INT, INT)
    def entry(op, index):
        return load_i64(load_i64(op, word), index)

    return entry


@exported(INT, INT, INT)
def _optional_behind(_op, index):
    """Outputs behind the first may be left out."""
    return OPTIONAL if index else REQUIRED


@exported(INT, INT, INT, INT, INT)
def _create_kernel(op, api, info, kernel):
    """CreateKernelV2: what Python makes of it, or a failure, and the kernel is null then."""
    words, python = _new_words(), view(Interpreter, load_i64(op, _PYTHON))
    store_i64(words, 0, api)
    store_i64(words, 1, info)
    store_i64(words, 2, 0)
    store_i64(words, 3, 0)
    store_i64(kernel, 0, 0)
    if ask(python, load_i64(op, _CREATE), words) and load_i64(words, 2):
        store_i64(kernel, 0, load_i64(words, 2))
        return 0
    status = load_i64(words, 3)
    return status if status else call(load_i64(api, CREATE_STATUS), (1, python.interrupted))


@exported(INT, INT, INT, INT, INT)
def _create_without_state(_op, api, _info, kernel):
    """The kernel's handle is the table it was created with."""
    store_i64(kernel, 0, api)
    return 0


_none, _one, _any, _variadic = _always(0), _always(1), _always(2**31 - 1), _always(VARIADIC)
_VARIADIC = _FUNCTIONS[12:16]  # least numbers, and whether all are of one type
_ANSWERS = dict.fromkeys(_FUNCTIONS[9:16], _none) | {
    "get_name": _word(_NAME),
    "get_execution_provider": _none,
    "get_input_type": _entry(_INPUTS),
    "get_input_count": _word(_INPUT_COUNT),
    "get_output_type": _entry(_OUTPUTS),
    "get_output_count": _word(_OUTPUT_COUNT),
    "get_input_characteristic": _entry(_OPTIONAL),
    "get_output_characteristic": _optional_behind,
    "get_start_version": _one,
    "get_end_version": _any,
}


def custom_op(
    name: str,
    inputs: Sequence[tuple[int, int]],
    outputs: Sequence[int],
    *,
    compute: Exported,
    destroy: Exported = _none,
    create: Callable[[int, int], tuple[int, int]] | None = None,
    variadic: bool = False,
) -> OrtCustomOp:
    """An operator that is compiled code but for the creation of its kernels. It lives as long as the process.

    `inputs` are pairs of element type and characteristic. `create(api, info)` runs when a session is created and
    answers (kernel handle, 0) or (0, OrtStatus); without it the handle is `api`. variadic: the last input and the last
    output are one or more, of one type.
    """

    def asked(address: int) -> None:
        words = (c_int64 * 4).from_address(address)
        words[2], words[3] = create(words[0], words[1]) if create else (0, 0)

    def array(values: Sequence[int]) -> int:
        return ctypes.addressof(immortal((c_int64 * len(values))(*values)))

    entries = {
        _NAME: ctypes.addressof(immortal(ctypes.create_string_buffer(name.encode()))),
        _INPUT_COUNT: len(inputs),
        _INPUTS: array([kind for kind, _ in inputs]),
        _OPTIONAL: array([characteristic for _, characteristic in inputs]),
        _OUTPUT_COUNT: len(outputs),
        _OUTPUTS: array(outputs),
        _PYTHON: interface(),
        _CREATE: id(immortal(asked)),
    }
    functions = _ANSWERS | {
        "create_kernel_v2": _create_kernel if create else _create_without_state,
        "compute_v2": compute,
        "destroy": destroy,
    }
    if variadic:
        functions |= dict.fromkeys(_VARIADIC, _one) | {"get_output_characteristic": _variadic}
    op = OrtCustomOp(API_VERSION, **{name: function.address for name, function in functions.items()})
    op.words[:] = [entries[word] for word in range(_FIRST, _END)]
    return immortal(op)


def c_library() -> ctypes.CDLL:
    """The C library."""
    return ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)


def add_external_custom_op(library: str, op: OrtCustomOp) -> None:
    """Hand an operator to a library. Raises OSError or AttributeError where that is impossible."""
    add = ctypes.CDLL(library).AddExternalCustomOp
    add.argtypes, add.restype = (c_void_p,), ctypes.c_bool
    if not add(ctypes.addressof(op)):
        raise OSError(f"{library} refused an operator")
