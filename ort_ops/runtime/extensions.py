"""onnxruntime-extensions without the Python package around it, which imports PyTorch wherever that is installed.

PyTorch would cost a second and 200 MB, and only a converter of Whisper models needs it. Whoever imports
onnxruntime_extensions itself, before or after, gets all of it, on the same library.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_backprop.opset.functions.native import OPERATORS_VARIABLE, SEPARATE_LIBRARY
from onnx_backprop.ort_ops.compiler.objects import SHIPPED

_NAME = "onnxruntime_extensions"


def _operators() -> Any:
    """The module of the package that holds its library and the declaration of Python operators."""
    if _NAME not in sys.modules:
        spec = find_spec(_NAME)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {_NAME!r}", name=_NAME)
        sys.modules[_NAME] = module_from_spec(spec)  # knows where its modules lie; has not run
        try:
            return import_module(f"{_NAME}._ocos")
        finally:
            del sys.modules[_NAME]
    return import_module(f"{_NAME}._ocos")


_ocos = _operators()
PyCustomOpDef: Any = _ocos.PyCustomOpDef
onnx_op: Any = _ocos.Opdef.declare
invoke: Any = _ocos._on_pyop_invocation  # what the library calls for every Python operator


def get_library_path() -> str:
    """The library to register with session options, which Python operators are in."""
    return str(_ocos.get_library_path())


def native_library() -> str:
    """The library that native operators are in: the same one, or on Windows what a wheel carries (`operators.c`)."""
    if not SEPARATE_LIBRARY:
        return get_library_path()
    return os.environ.get(OPERATORS_VARIABLE) or str(SHIPPED / "operators.dll")


class RawArray:
    """An output that onnxruntime-extensions copies from raw memory instead of through a list of Python numbers.

    The library reads `.shape` and `.flatten().tolist()` and then copies the bytes without checking, so the array is
    made contiguous and of the declared type here.
    """

    def __init__(self, array: NDArray[Any], dtype: type[np.generic]) -> None:
        self._array = np.asarray(array, dtype, order="C")
        self.shape = self._array.shape

    def flatten(self) -> "RawArray":
        return self

    def tolist(self) -> NDArray[Any]:
        return self._array
