"""ONNX models as modules of PyTorch, and modules of PyTorch as ONNX models to train. Importing it needs PyTorch.

May import `training`, `converters`, `ort_ops` and opset.
"""

from typing import TYPE_CHECKING, Any

from onnx_backprop.torch.modules import Module, module

if TYPE_CHECKING:
    from onnx_backprop.torch.exporting import export

__all__ = ["Module", "export", "module"]


def __getattr__(name: str) -> Any:
    """`export`, which a process that trains a file has no use for."""
    if name != "export":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnx_backprop.torch.exporting import export

    globals()[name] = export
    return export
