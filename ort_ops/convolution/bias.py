"""The bias of what a convolution computes: where it lies, and a tile's part of it. Compiled."""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.vector.rows import clear, read_run


@inner
def bias_address(call, p):
    """Where the bias lies; 0 where there is none."""
    return call.inputs[p.bias] if p.bias else 0


@inner
def bias_of(kind, bias, first, count, target):
    """float32 target[i] = bias[first + i] for i < count; zeros where there is no bias, whose address is 0 then."""
    if bias == 0:
        clear(target, 0, count)
    else:
        read_run(kind, target, 0, bias, first, 1, count)
