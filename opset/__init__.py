"""The operator set `onnx_backprop`, version 1: what each gradient operator is.

Importing this package registers the schemas with onnx. One operator is one module; `OPS` lists them.
"""

from typing import Any

from onnx_backprop.opset.core.op import DOMAIN, OPSET_VERSION, Op
from onnx_backprop.opset.core.schema import reference_class, register
from onnx_backprop.opset.functions import mat_mul_n_bits
from onnx_backprop.opset.functions.use_kernels import KERNELS, use_kernels
from onnx_backprop.opset.operators.registry import OPS

__all__ = ["DOMAIN", "KERNELS", "OPS", "OPSET_VERSION", "Op", "reference_ops", "use_kernels"]

register(OPS)
mat_mul_n_bits.register()


def reference_ops() -> list[type[Any]]:
    """One class per operator for `onnx.reference.ReferenceEvaluator(model, new_ops=reference_ops())`."""
    return [reference_class(op) for op in OPS]
