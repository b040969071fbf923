"""ONNX models as modules of PyTorch, and modules of PyTorch as ONNX models to train. Importing it needs PyTorch.

May import `training`, `converters`, `ort_ops` and opset.
"""

from onnx_backprop.torch.exporting import export
from onnx_backprop.torch.modules import Module, module

__all__ = ["Module", "export", "module"]
