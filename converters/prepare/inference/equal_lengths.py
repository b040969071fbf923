"""Lengths that are equal and have several names: onnx's inference makes a new one behind every window.

Of an input (N, C, H, W) a Conv of 3x3 with one cell of padding leaves H and W, and with a stride of 2 what a 1x1 Conv
leaves with it. Inference says so of numbers only. Where the names are the same, a residual Add broadcasts nothing, and
its gradient is neither looked at when it runs nor summed. A Reshape keeps the number of elements: of (N, 128, 768) to
(N, 128, -1, 64) it leaves 12 heads, which inference says of numbers only, too.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import zip_longest
from math import prod

from onnx import ModelProto, NodeProto

from onnx_backprop.opset.graphs.facts import ELEMENTWISE
from onnx_backprop.opset.graphs.scope import Scope
from onnx_backprop.opset.graphs.types import Dim
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard
from onnx_backprop.opset.maths.convolution import extent

_WINDOWS = ("AveragePool", "Conv", "LpPool", "MaxPool")


def name_equal_lengths(model: ModelProto) -> None:
    """Give symbolic lengths of the main graph that its nodes make equal one name, that of an input if one has it."""
    graph = model.graph
    scope = Scope(graph)
    given = {d for value in graph.input for d in scope.dims(value.name) or ()}
    names: dict[Dim, Dim] = {}  # of a symbol, another one of the same length
    behind: dict[tuple[object, ...], Dim] = {}  # what a window of some offset and stride makes of a length

    def first(d: Dim) -> Dim:
        while d in names:
            d = names[d]
        return d

    for node in graph.node:
        if not is_standard(node, *_WINDOWS, "MatMul", "Reshape") and node not in ELEMENTWISE:
            continue
        shapes = [scope.dims(name) for name in node.input if name]
        known = [tuple(map(first, dims)) for dims in shapes if dims is not None]
        for output in map(scope.dims, filter(None, node.output)):
            if output is None or len(known) < len(shapes):
                continue
            after = tuple(map(first, output))
            if node in ELEMENTWISE:
                lengths = _broadcast(known, len(after))
            elif is_standard(node, "MatMul"):
                lengths = _broadcast([dims[:-2] for dims in known], len(after) - 2)
            elif is_standard(node, "Reshape"):
                lengths = _reshaped(known[0], after)
            else:
                lengths = _behind_windows(node, known, after, behind)
            for d, length in zip(after, map(first, lengths), strict=False):
                if isinstance(d, str) and length is not None and d not in (length, *given):
                    names |= {d: length}
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                length = first(dim.dim_param)
                if isinstance(length, int):
                    dim.dim_value = length
                else:
                    dim.dim_param = str(length)


def _broadcast(shapes: Collection[tuple[Dim, ...]], rank: int) -> list[Dim]:
    """The length of each axis where no more than one of its lengths is not 1."""
    result: list[Dim] = []
    for axis in zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = set(axis) - {1}
        result.insert(0, wide.pop() if len(wide) == 1 else None)
    return result if len(result) == rank else []


def _reshaped(before: tuple[Dim, ...], after: tuple[Dim, ...]) -> list[Dim]:
    """The only symbol behind a Reshape that is not in front of it, by the number of elements."""
    if None in before or None in after:
        return []
    numbers = [prod(d for d in dims if isinstance(d, int)) for dims in (before, after)]
    symbols = [Counter(d for d in dims if isinstance(d, str)) for dims in (before, after)]
    less, more = ([*(a - b).elements()] for a, b in (symbols, symbols[::-1]))
    if len(more) != 1 or len(less) > 1 or not all(numbers) or numbers[0] % numbers[1]:
        return []
    ratio = numbers[0] // numbers[1]
    length = ratio if not less else less[0] if ratio == 1 else None
    return [length if d == more[0] else None for d in after]


def _behind_windows(
    node: NodeProto, shapes: Sequence[tuple[Dim, ...]], output: tuple[Dim, ...], behind: dict[tuple[object, ...], Dim]
) -> list[Dim]:
    """(L + offset) // stride + 1 for each axis, L itself for windows that are padded to it."""
    attributes, spatial = attributes_of(node), shapes[0][2:]
    count = len(spatial)
    kernel = attributes.get("kernel_shape") or (shapes[1][2:] if len(shapes) > 1 else ())
    strides, dilations = (attributes.get(name, [1] * count) for name in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * count)
    auto = attributes.get("auto_pad") or b"NOTSET"
    if {len(kernel), len(strides), len(dilations), len(pads) // 2} != {count} or len(output) != count + 2:
        return []
    result: list[Dim] = [None, None]
    for n, (length, after, k, stride) in enumerate(zip(spatial, output[2:], kernel, strides, strict=True)):
        same = auto.startswith(b"SAME")  # L / stride, rounded up
        offset = (
            None
            if same or not isinstance(k, int)
            else ((pads[n] + pads[n + count] if auto == b"NOTSET" else 0) - extent(k, dilations[n]))
        )
        # rounded up, or padded by onnxruntime as for a window without gaps
        other = (attributes.get("ceil_mode") and stride > 1) or (same and dilations[n] > 1)
        if not isinstance(length, str) or stride < 1 or other or (offset is None and not same):
            result.append(None)
        elif stride == 1 and (same or offset == -1):
            result.append(length)
        else:
            result.append(behind.setdefault((length, offset, stride), after))
    return result
