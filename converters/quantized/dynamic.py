"""Products of integers whose scales are computed by each run, as quantize_dynamic writes them, and fused forms."""

from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backprop.converters.quantized.numbers import Blocks, blocks_along
from onnx_backprop.converters.quantized.qdq import inputs_of, scaled_cast
from onnx_backprop.converters.quantized.records import Product, Quantized
from onnx_backprop.converters.quantized.walk import Handler, Walk
from onnx_backprop.opset.graphs.facts import VIEW
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

_FLOATS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
MICROSOFT = "com.microsoft"


def quantize(w: Walk, node: NodeProto) -> None:
    """q stands for x, its scale being computed."""
    w.keep(node)  # and dropped where nothing reads the scale
    q, scale, zero = node.output
    w.integers[q] = Quantized(w.alias.get(node.input[0], node.input[0]), scale, zero)


def product(w: Walk, node: NodeProto) -> None:
    """Sums that become floats where a Mul multiplies them by the scales."""
    operands = inputs_of(node, 4)
    scales = tuple(w.integers[name].scale for name in operands[:2] if name in w.integers)
    weighted = [name for name in operands[:2] if w.is_integers(name) and name not in w.integers]
    if len(scales) + len(weighted) != 2 or not scales:
        raise w.refuse(node, "one operand at least must be quantised by the model, the other one that or a weight")
    w.products[node.output[0]] = Product(node, scales, bool(weighted))


def multiply(w: Walk, node: NodeProto) -> None:
    """Multiplied by all scales the sums of products are those of floats; else as it is."""
    n = next((n for n, name in enumerate(node.input) if name in w.products), None)
    if n is None:
        if not scaled_cast(w, node):
            w.keep(node)
        return
    sums, y = w.products[node.input[n]], node.output[0]
    factors = [*sums.factors, *_factors(w, node.input[1 - n])]
    rest = list(factors)
    missing = [scale for scale in sums.scales if scale not in rest or rest.remove(scale)]
    if missing or len(rest) < sums.weighted:
        w.products[y] = replace(sums, factors=tuple(factors))
        return
    if len(rest) > sums.weighted or not all(scale in w.tensors for scale in rest):
        raise w.refuse(node, f"it multiplies sums of integers by {rest[-1]!r} beside their scales")
    if sums.bias and sorted(sums.divisor) != sorted(factors):
        raise w.refuse(node, f"the bias {sums.bias!r} was divided by another scale than that of the sums")
    _emit(w, sums, y, *rest)


def _emit(w: Walk, sums: Product, y: str, scale: str = "") -> None:
    """Write the product of the floats."""
    node = sums.node
    op_type, operands = _FLOATS[node.op_type], inputs_of(node, 4)
    read: list[str] = []
    for place, axis in enumerate((1, 0) if op_type == "Conv" else (-2, -1)):
        q, zero = operands[place], operands[2 + place]
        read.append(w.real(node, q, w.integers[q].scale if q in w.integers else scale, zero, axis))
    before = unique(f"{y}/sums", w.taken) if sums.bias else y
    w.emit(node, op_type, read, [before], **attributes_of(node))
    if sums.bias:
        w.put(helper.make_node("Add", [before, sums.bias], [y], name=unique(f"{y}/Add", w.taken)))


def _factors(w: Walk, name: str) -> list[str]:
    """The scales that a value is the product of."""
    maker = w.makers.get(name)
    if name in w.tensors or maker is None:
        return [name]
    if maker.op_type == "Mul":
        return [factor for operand in maker.input for factor in _factors(w, operand)]
    return _factors(w, maker.input[0]) if maker.op_type in VIEW or maker.op_type == "Cast" else [name]


def add(w: Walk, node: NodeProto) -> None:
    """A bias that was rounded to the scale of sums of integers is added to the floats."""
    n = next((n for n, name in enumerate(node.input) if name in w.products), None)
    if n is None:
        w.keep(node)
        return
    chain: list[NodeProto] = []
    name = node.input[1 - n]
    while (maker := w.makers.get(name)) is not None and name not in w.tensors:
        chain.append(maker)
        name = maker.input[0]
        if maker.op_type == "Div":
            break
    kinds = [maker.op_type for maker in chain if maker.op_type != "Reshape"]
    if kinds not in (["Cast", "Floor", "Div"], ["Cast", "Round", "Div"]):
        raise w.refuse(
            node, f"it adds {node.input[1 - n]!r} to sums of integers; expected a bias divided by their scale"
        )
    name = w.alias.get(name, name)
    divisor = tuple(_factors(w, next(maker.input[1] for maker in chain if maker.op_type == "Div")))
    for maker in reversed(chain):
        if maker.op_type == "Reshape":
            shaped = unique(f"{name}/reshaped", w.taken)
            w.put(helper.make_node("Reshape", [name, maker.input[1]], [shaped], name=shaped))
            name = shaped
    w.products[node.output[0]] = replace(w.products[node.input[n]], bias=name, divisor=divisor)


def _added(w: Walk, node: NodeProto, read: list[str], bias: str) -> None:
    """Write a MatMul and a bias."""
    y = node.output[0]
    before = unique(f"{y}/MatMul", w.taken) if bias else y
    w.emit(node, "MatMul", read, [before])
    if bias:
        w.put(helper.make_node("Add", [before, w.alias.get(bias, bias)], [y], name=unique(f"{y}/Add", w.taken)))


def dynamic_mat_mul(w: Walk, node: NodeProto) -> None:
    """A · B + bias, A being rounded by each run."""
    a, b, scale, zero, bias = inputs_of(node, 5)
    _added(w, node, [a, w.real(node, b, scale, zero, -1)], bias)


def mat_mul_to_float(w: Walk, node: NodeProto) -> None:
    """A · B + bias of two operands that are rounded."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = inputs_of(node, 7)
    _added(w, node, [w.real(node, a, a_scale, a_zero, -2), w.real(node, b, b_scale, b_zero, -1)], bias)


def lstm(w: Walk, node: NodeProto) -> None:
    """LSTM, whose W and R lie transposed: (directions, inputs, 4·hidden)."""
    inputs = inputs_of(node, 12)
    for place, scale, zero in ((1, 8, 9), (2, 10, 11)):
        q, scales = inputs[place], w.tensors.get(inputs[scale])
        if not w.is_integers(q) or scales is None or len(w.tensors[q].dims) != 3:
            raise w.refuse(node, f"the weight {q!r} has not three axes, or it or its scale is computed")
        shape, count = tuple(w.tensors[q].dims), int(np.prod(scales.dims))
        lengths = {shape[0]: (1, *shape[1:]), shape[0] * shape[2]: (1, shape[1], 1)}.get(count)
        if lengths is None:
            raise w.refuse(node, f"{q!r} of {shape} has {count} scales")
        blocks = Blocks(shape, lengths)
        inputs[place] = w.weight(node, q, inputs[scale], inputs[zero], blocks, perm=(0, 2, 1))
    w.emit(node, "LSTM", inputs[:8], node.output, **attributes_of(node))


def attention(w: Walk, node: NodeProto) -> None:
    """com.microsoft's Attention."""
    x, weight, bias, x_scale, scale, mask, x_zero, zero, past = inputs_of(node, 9)
    read = [w.real(node, x, x_scale, x_zero), w.real(node, weight, scale, zero, -1), bias, mask, past]
    w.emit(node, "Attention", read, node.output, domain=MICROSOFT, **attributes_of(node))


def embedding(w: Walk, node: NodeProto) -> None:
    """com.microsoft's EmbedLayerNormalization."""
    inputs = inputs_of(node, 18)
    read = [*inputs[:2]]
    read += [w.real(node, inputs[n], inputs[n + 6], inputs[n + 11]) if inputs[n] else "" for n in range(2, 7)]
    w.emit(node, "EmbedLayerNormalization", [*read, inputs[7]], node.output, domain=MICROSOFT, **attributes_of(node))


def mat_mul_bits(w: Walk, node: NodeProto) -> None:
    """a · W + bias, W (K, N) being packed by rows (N, K) in blocks of a few bits."""
    attributes = attributes_of(node)
    a, b, scale, zero, order, bias = inputs_of(node, 6)
    if order:
        raise w.refuse(node, "g_idx is not handled. Quantise without act-order")
    if attributes.get("weight_prepacked"):
        raise w.refuse(
            node, "weights that are packed for one processor are not handled. Export with weight_prepacked=0"
        )
    rows, columns, size = (attributes.get(name, 0) for name in ("N", "K", "block_size"))
    weight = _packed(w, node, b, scale, zero, (rows, columns), size)
    _added(w, node, [a, weight], bias)


def gather_blocks(w: Walk, node: NodeProto) -> None:
    """Rows of a table that is stored in blocks of a few bits."""
    attributes = attributes_of(node)
    data, ids, scale, zero = inputs_of(node, 4)
    size, axis = attributes.get("block_size", 128), attributes.get("gather_axis", 0)
    data, shape = _viewed(w, data)
    if not w.is_integers(data) or len(shape) != 2 or axis or attributes.get("quantize_axis", 1) % 2 != 1:
        raise w.refuse(node, "tables (V, D) with blocks along their rows are handled: gather_axis=0, quantize_axis=1")
    rows, columns = shape
    if w.element_of(data) == TensorProto.UINT8:
        columns = columns * 8 // (attributes.get("bits", 4) or 4)
        weight = _packed(w, node, data, scale, zero, (rows, columns), size, perm=())
    elif shape == tuple(w.tensors[data].dims):
        weight = w.real(node, data, scale, zero, 1, size)
    else:
        raise w.refuse(node, f"the integers {data!r} of 4 bits are read in another shape. Reshape them in the file")
    w.emit(node, "Gather", [weight, ids], node.output, axis=0)


def _viewed(w: Walk, data: str) -> tuple[str, tuple[int, ...]]:
    """The tensor of the file that a table is, and its shape there, or that of a Reshape.

    An embedding that shares the packed weight (V, blocks, bytes) of the head is read so, as (V, bytes).
    """
    maker = w.makers.get(data)
    wanted = w.array(maker.input[1]) if maker is not None and is_standard(maker, "Reshape") else None
    if maker is None or wanted is None or not w.is_integers(maker.input[0]):
        return data, tuple(w.tensors[data].dims) if data in w.tensors else ()
    dims = w.tensors[maker.input[0]].dims
    copies = not attributes_of(maker).get("allowzero")
    shape = [dims[n] if copies and d == 0 and n < len(dims) else int(d) for n, d in enumerate(wanted.reshape(-1))]
    rest = int(np.prod(dims)) // max(1, int(np.prod([d for d in shape if d >= 0])))
    return maker.input[0], tuple(rest if d < 0 else d for d in shape)


def _packed(
    w: Walk,
    node: NodeProto,
    b: str,
    scale: str,
    zero: str,
    shape: tuple[int, int],
    size: int,
    perm: tuple[int, ...] = (1, 0),
) -> str:
    """The float weight of packed numbers."""
    bits = attributes_of(node).get("bits", 4)
    if bits not in (2, 4, 8):
        raise w.refuse(node, f"2, 4 and 8 bits are handled, got {bits}")
    scales = w.tensors.get(scale)
    if not w.is_integers(b) or scales is None:
        raise w.refuse(node, f"the weight {b!r} or its scale is computed")
    if min(*shape, size) < 1:
        raise w.refuse(node, f"a weight of {shape} in blocks of {size} has nothing in it")
    blocks = blocks_along(shape, int(np.prod(scales.dims)), 1, size)
    if blocks is None:
        raise w.refuse(node, f"{b!r} of {shape} in blocks of {size} has {int(np.prod(scales.dims))} scales")
    return w.weight(node, b, scale, zero, blocks, perm=perm, bits=bits)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Add"): add,
    ("", "ConvInteger"): product,
    ("", "DynamicQuantizeLinear"): quantize,
    ("", "MatMulInteger"): product,
    ("", "Mul"): multiply,
    (MICROSOFT, "DynamicQuantizeLSTM"): lstm,
    (MICROSOFT, "DynamicQuantizeMatMul"): dynamic_mat_mul,
    (MICROSOFT, "GatherBlockQuantized"): gather_blocks,
    (MICROSOFT, "MatMulIntegerToFloat"): mat_mul_to_float,
    (MICROSOFT, "MatMulNBits"): mat_mul_bits,
    (MICROSOFT, "QAttention"): attention,
    (MICROSOFT, "QEmbedLayerNormalization"): embedding,
}
