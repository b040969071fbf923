"""The tensors of onnx_ir for what lies in mapped files: views, by the rules of `opset.core.mapped`."""

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.opset.core.mapped import view


class MappedTensor(ir.ExternalTensor):
    """A reference to a file that is mapped; its numbers cannot be written to."""

    def numpy(self) -> np.ndarray:
        """The numbers. Errors: InvalidModelError for a file that was written to since."""
        data = view(str(self.location), self.offset or 0, self.length or 0, str(self.name))
        return np.frombuffer(data, self.dtype.numpy()).reshape(self.shape.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def tobytes(self) -> bytes:
        """Their bytes."""
        return self.numpy().tobytes()


def share_files(graph: ir.Graph) -> None:
    """Let the initializers of a graph that lie in files be such tensors."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = MappedTensor(
                tensor.location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=str(tensor.name),
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
