"""The part of onnxruntime's C interface that a custom operator needs, through ctypes.

onnxruntime-extensions exports `AddExternalCustomOp(const OrtCustomOp*)` next to its entry point (on Linux and
macOS); an operator handed to it belongs to the domain `ai.onnx.contrib` of every session that registers the library
afterwards. `OrtCustomOp` is a struct of function pointers in a fixed order, `OrtApi` a table of functions whose
positions never change. Everything that could crash is checked before it is used: the symbol, the API version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p

API_VERSION = 17  # of the struct below, where KernelComputeV2 may answer with a status
INVALID_ARGUMENT = 2  # OrtErrorCode

# ONNXTensorElementDataType
FLOAT, UINT8, INT32, INT64, FLOAT16, BFLOAT16 = 1, 2, 6, 7, 10, 16
REQUIRED, OPTIONAL = 0, 1  # OrtCustomOpInputOutputCharacteristic


class OrtApiBase(Structure):
    """`OrtGetApiBase()`'s answer."""

    _fields_ = (("get_api", CFUNCTYPE(c_void_p, c_uint32)), ("get_version", CFUNCTYPE(c_char_p)))


class Api:
    """The functions used here, by their position in `OrtApi`."""

    def __init__(self, table: int) -> None:
        functions = ctypes.cast(table, POINTER(c_void_p))

        def bind(position: int, result: object, *arguments: object) -> Callable[..., int]:
            return CFUNCTYPE(result, *arguments)(functions[position])  # type: ignore[arg-type]

        self.create_status = bind(0, c_void_p, c_int, c_char_p)
        self.tensor_data = bind(51, c_void_p, c_void_p, POINTER(c_void_p))
        self.dimensions_count = bind(61, c_void_p, c_void_p, POINTER(c_size_t))
        self.dimensions = bind(62, c_void_p, c_void_p, POINTER(c_int64), c_size_t)
        self.type_and_shape = bind(65, c_void_p, c_void_p, POINTER(c_void_p))
        self.context_input = bind(90, c_void_p, c_void_p, c_size_t, POINTER(c_void_p))
        self.context_output = bind(91, c_void_p, c_void_p, c_size_t, POINTER(c_int64), c_size_t, POINTER(c_void_p))
        self.release_status = bind(93, None, c_void_p)
        self.release_type_and_shape = bind(99, None, c_void_p)
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

    def input(self, context: int, index: int) -> tuple[int, tuple[int, ...]]:
        """Address of an input's data and its shape. Raises on a failing call."""
        value, info, data, rank = c_void_p(), c_void_p(), c_void_p(), c_size_t()
        _succeed(self.context_input(context, index, value))
        _succeed(self.type_and_shape(value, info))
        try:
            _succeed(self.dimensions_count(info, rank))
            shape = (c_int64 * rank.value)()
            _succeed(self.dimensions(info, shape, rank.value))
        finally:
            self.release_type_and_shape(info)
        _succeed(self.tensor_data(value, data))
        return data.value or 0, tuple(shape)

    def output(self, context: int, index: int, shape: tuple[int, ...]) -> int:
        """Allocate an output of this shape; the address of its data."""
        value, data = c_void_p(), c_void_p()
        _succeed(self.context_output(context, index, (c_int64 * len(shape))(*shape), len(shape), value))
        _succeed(self.tensor_data(value, data))
        return data.value or 0


def _succeed(status: int | None) -> None:
    if status:
        raise RuntimeError("a call into onnxruntime's C interface failed")


_CreateKernelV2 = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))
_Name = CFUNCTYPE(c_void_p, c_void_p)  # not c_char_p: ctypes leaks the bytes a callback returns
_Type = CFUNCTYPE(c_int, c_void_p, c_size_t)
_Count = CFUNCTYPE(c_size_t, c_void_p)
_Destroy = CFUNCTYPE(None, c_void_p)
_ComputeV2 = CFUNCTYPE(c_void_p, c_void_p, c_void_p)
_Int = CFUNCTYPE(c_int, c_void_p)


class OrtCustomOp(Structure):
    """struct OrtCustomOp of onnxruntime_c_api.h, as of API 17; what an operator does not need stays null."""

    _fields_ = (
        ("version", c_uint32),
        ("create_kernel", c_void_p),
        ("get_name", _Name),
        ("get_execution_provider", _Name),
        ("get_input_type", _Type),
        ("get_input_count", _Count),
        ("get_output_type", _Type),
        ("get_output_count", _Count),
        ("compute", c_void_p),
        ("destroy", _Destroy),
        ("get_input_characteristic", _Type),
        ("get_output_characteristic", _Type),
        ("get_input_memory_type", _Type),
        ("get_variadic_input_min_arity", _Int),
        ("get_variadic_input_homogeneity", _Int),
        ("get_variadic_output_min_arity", _Int),
        ("get_variadic_output_homogeneity", _Int),
        ("create_kernel_v2", _CreateKernelV2),
        ("compute_v2", _ComputeV2),
        ("infer_output_shape", c_void_p),
        ("get_start_version", _Int),
        ("get_end_version", _Int),
        ("get_may_inplace", c_void_p),
        ("release_may_inplace", c_void_p),
        ("get_alias_map", c_void_p),
        ("release_alias_map", c_void_p),
    )


def custom_op(
    name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], compute: Callable[[Api, int], str | None]
) -> OrtCustomOp:
    """An operator without attributes whose `compute(api, context)` answers None or the text of its failure.

    The struct must outlive every session: keep a reference to it for the life of the process.
    """
    apis: dict[int, Api] = {}

    def create(_op: int, api: int, _info: int, kernel: object) -> int:
        apis.setdefault(api, Api(api))
        kernel[0] = api  # type: ignore[index]  # the kernel's handle is the table it was created with
        return 0

    def run(kernel: int, context: int) -> int:
        api = apis[kernel]
        try:
            message = compute(api, context)
        except Exception as e:  # noqa: BLE001 - an exception here must become a status
            message = f"{name}: {type(e).__name__}: {e}"
        return api.status(message) if message else 0

    return _custom_op(
        name,
        [(kind, REQUIRED) for kind in inputs],
        outputs,
        create_kernel_v2=_CreateKernelV2(create),
        compute_v2=_ComputeV2(run),
        destroy=_Destroy(lambda _kernel: None),
    )


def native_op(
    name: str,
    inputs: Sequence[tuple[int, int]],
    outputs: Sequence[int],
    *,
    create: Callable[[int, int], tuple[int, int]],
    compute: int,
    destroy: int,
) -> OrtCustomOp:
    """An operator that is compiled code but for the creation of its kernels.

    `inputs` are pairs of element type and characteristic. `create(api, info)` runs when a session is created and
    answers (kernel handle, 0) or (0, OrtStatus); `compute` and `destroy` are addresses of C functions. The struct must
    outlive every session.
    """

    def create_kernel(_op: int, api: int, info: int, kernel: object) -> int:
        handle, status = create(api, info)
        kernel[0] = handle  # type: ignore[index]
        return status

    return _custom_op(
        name,
        inputs,
        outputs,
        create_kernel_v2=_CreateKernelV2(create_kernel),
        compute_v2=_ComputeV2(compute),
        destroy=_Destroy(destroy),
    )


def _custom_op(
    name: str, inputs: Sequence[tuple[int, int]], outputs: Sequence[int], **functions: object
) -> OrtCustomOp:
    """The struct with all that is known before any kernel exists."""
    name_buffer = ctypes.create_string_buffer(name.encode())
    return OrtCustomOp(
        version=API_VERSION,
        get_name=_Name(lambda _op: ctypes.addressof(name_buffer)),
        get_execution_provider=_Name(lambda _op: None),
        get_input_type=_Type(lambda _op, n: inputs[n][0]),
        get_input_count=_Count(lambda _op: len(inputs)),
        get_output_type=_Type(lambda _op, n: outputs[n]),
        get_output_count=_Count(lambda _op: len(outputs)),
        get_input_characteristic=_Type(lambda _op, n: inputs[n][1]),
        get_output_characteristic=_Type(lambda _op, _n: REQUIRED),
        get_input_memory_type=_Type(lambda _op, _n: 0),
        get_variadic_input_min_arity=_Int(lambda _op: 0),
        get_variadic_input_homogeneity=_Int(lambda _op: 0),
        get_variadic_output_min_arity=_Int(lambda _op: 0),
        get_variadic_output_homogeneity=_Int(lambda _op: 0),
        get_start_version=_Int(lambda _op: 1),
        get_end_version=_Int(lambda _op: 2**31 - 1),
        **functions,
    )


def add_external_custom_op(library: str, op: OrtCustomOp) -> None:
    """Hand an operator to onnxruntime-extensions. Raises OSError or AttributeError where that is impossible."""
    add = ctypes.CDLL(library).AddExternalCustomOp
    add.argtypes, add.restype = (c_void_p,), ctypes.c_bool
    # sessions in reference cycles are destroyed after everything in modules, and their kernels call the struct
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(op))
    if not add(ctypes.addressof(op)):
        raise OSError("onnxruntime-extensions refused an external custom operator")
