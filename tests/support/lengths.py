"""Models with lengths of inputs written down."""

from collections.abc import Mapping, Sequence

from onnx import ModelProto

from onnx_backprop.converters.devices.adapt import fix_lengths
from onnx_backprop.opset.graphs.edit import copied


def fixed(model: ModelProto, lengths: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy of a forward model whose inputs have these lengths."""
    result = copied(model)
    fix_lengths(result, lengths)
    return result
