"""Kernels of the operator set for stock onnxruntime, and the sessions that run them.

May import opset, and what a session needs: onnxruntime, llvmlite, Numba where somebody asks for it.
"""

from onnx_backprop.opset.functions.use_kernels import use_kernels
from onnx_backprop.ort_ops.native_graph import NativeGraph, lower
from onnx_backprop.ort_ops.sessions import (
    Named,
    SessionOptions,
    be_lean,
    default_options,
    has_kernels,
    kernels_on,
    native_kernels_work,
    open_session,
    register_ops,
    require_operators,
    run_bound,
    session,
)
from onnx_backprop.ort_ops.weights import give_back, take_weights

__all__ = [
    "Named",
    "NativeGraph",
    "SessionOptions",
    "be_lean",
    "default_options",
    "give_back",
    "has_kernels",
    "kernels_on",
    "lower",
    "native_kernels_work",
    "open_session",
    "register_ops",
    "require_operators",
    "run_bound",
    "session",
    "take_weights",
    "use_kernels",
]
