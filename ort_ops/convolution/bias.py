"""What happens to a tile of a convolution between the product and the tensor: the bias. Compiled."""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, store_f32
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


@inner
def add_to_rows(tile, row, values, rows, columns):
    """tile[i, j] += values[i]; `row` bytes from row to row, float32."""
    for i in range(rows):
        value, at = load_f32(values, i), tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + value)


@inner
def add_to_columns(tile, row, values, rows, columns):
    """tile[i, j] += values[j]."""
    for i in range(rows):
        at = tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + load_f32(values, j))
