"""The route "native": the operators as compiled custom operators of onnxruntime.

Whether the route can work is found out once per process, before anything of it is used: the platform, the versions of
the libraries, the exported symbol, and one small session whose answer is known. `reason_against` says why not.
"""

import platform
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import parser

from onnx_backprop.opset.core.signals import surface
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN, NATIVE_PREFIX
from onnx_backprop.ort_ops.compiler.machine import complaint
from onnx_backprop.ort_ops.runtime.extensions import native_library

_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")
_MIN_ONNXRUNTIME = (1, 17)  # ParallelFor, and statuses from KernelComputeV2


@cache
def reason_against() -> str:
    """Register the operators; '' where that worked, else why it did not. Once per process."""
    if platform.machine().lower() not in _MACHINES or sys.maxsize < 2**32:
        return f"no native kernels for {platform.machine()}"
    version = tuple(int(n) for n in onnxruntime.__version__.split(".")[:2])
    if version < _MIN_ONNXRUNTIME:
        return f"onnxruntime {onnxruntime.__version__} is older than 1.17"
    if wrong := complaint():
        return wrong
    if not Path(native_library()).is_file():
        return f"this installation has no {native_library()}. The wheel for Windows does"
    try:
        from onnx_backprop.ort_ops import native_table

        native_table.register()
        return _self_test()
    except Exception as e:  # noqa: BLE001 - whatever is wrong with the route, there is another one
        surface()
        return f"{type(e).__name__}: {e}"


def _self_test() -> str:
    """Sum three columns on the native kernel, with attributes, a good and a bad shape; '' where all is well."""
    imports = f'["": 18, "{NATIVE_DOMAIN}": 1]'
    node = f'{NATIVE_DOMAIN}.{NATIVE_PREFIX}BiasAddBackward <data_format = "NXC"> (dy)'
    model = parser.parse_model(
        f"<ir_version: 10, opset_import: {imports}> self_test (float[] dy) => (float[] db) {{ db = {node} }}"
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(native_library())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    dy = np.arange(12, dtype=np.float32).reshape(4, 3)
    got = np.asarray(session.run(None, {"dy": dy})[0])
    if got.tolist() != dy.sum(axis=0).tolist():
        return f"the self-test expected {dy.sum(axis=0).tolist()}, got {got.tolist()}"
    try:
        session.run(None, {"dy": dy[0]})
    except Exception as e:  # noqa: BLE001 - onnxruntime's exceptions have no common base
        surface()
        return "" if "expected rank" in str(e) else f"the self-test expected a refusal of rank 1, got {e}"
    return "the self-test expected a refusal of rank 1, got an answer"
