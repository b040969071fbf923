"""The native operator `Ready`: writes 1, int64 in one axis, once its inputs, any number of float32 tensors, are there.

Its output is bound to memory that another thread looks at while the run goes on; what was written to the inputs before
is seen by whoever sees the 1.
"""

from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.ort_ops.compiler.decorators import exported
from onnx_backprop.ort_ops.compiler.llvm import exchange, load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime import c_abi
from onnx_backprop.ort_ops.runtime.call import MUTABLE_DATA, OUTPUT
from onnx_backprop.ort_ops.runtime.stages import ort

NAME = f"{NATIVE_PREFIX}Ready"

_length, _address = stack(1), stack(1)


@exported(INT, INT, INT)
def _compute(api, context):
    length, address = _length(), _address()
    store_i64(length, 0, 1)
    store_i64(address, 0, 0)
    status = ort(api, OUTPUT, (context, 0, length, 1, address))
    if status:
        return status
    status = ort(api, MUTABLE_DATA, (load_i64(address, 0), address))
    if status:
        return status
    exchange(load_i64(address, 0), 1)
    return 0


def custom_op() -> c_abi.OrtCustomOp:
    """The operator, for onnxruntime."""
    return c_abi.custom_op(NAME, [(c_abi.FLOAT, c_abi.VARIADIC)], [c_abi.INT64], compute=_compute, variadic=True)
