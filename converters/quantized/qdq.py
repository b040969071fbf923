"""QuantizeLinear and DequantizeLinear, operators that move integers about, and weights that Cast and Mul dequantise."""

from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backprop.converters.quantized.numbers import Range, blocks_along, blocks_beside
from onnx_backprop.converters.quantized.records import INTEGERS, Activation, Quantized, Weight
from onnx_backprop.converters.quantized.walk import Handler, Walk, floats_in
from onnx_backprop.opset.graphs.facts import MOVES_QUANTIZED
from onnx_backprop.opset.graphs.walk import attributes_of

# what gives numbers of its inputs, in other places, and which inputs are numbers; None: all
_MOVING: dict[str, tuple[int, ...] | None] = dict.fromkeys(MOVES_QUANTIZED, (0,))
_MOVING |= {"Concat": None, "Max": None, "Min": None, "Where": (1, 2)}
_PLACES = ("ArgMax", "ArgMin")  # whose results are no numbers of the input
_ZERO_INPUTS = 3  # of DequantizeLinear with a zero point


def inputs_of(node: NodeProto, count: int) -> list[str]:
    """The names of a node's first inputs, "" where one is left out."""
    return [*node.input, *[""] * count][:count]


def quantize_linear(w: Walk, node: NodeProto) -> None:
    """q stands for x; what rounding cuts for want of a Relu is cut in floats. A float weight stays one."""
    x, scale, zero = inputs_of(node, 3)
    q, value = node.output[0], w.alias.get(x, x)
    if x in w.integers or x in w.products:
        raise w.refuse(node, f"it quantises the integers {x!r}. Read them with DequantizeLinear first")
    stored, scales = w.tensors.get(x), w.tensors.get(scale)
    attributes = attributes_of(node)
    element = w.element_of(zero) if zero else attributes.get("output_dtype") or TensorProto.UINT8
    if element not in INTEGERS:
        raise w.refuse(
            node, "its numbers are no integers. dequantize handles int4, int8, int16 and uint4, uint8, uint16"
        )
    if stored is not None and floats_in(stored) and scales is not None:
        shape, length = tuple(stored.dims), attributes.get("block_size", 0)
        blocks = blocks_along(shape, int(np.prod(scales.dims)), attributes.get("axis", 1), length)
        if blocks is None:
            raise w.refuse(node, f"{x!r} of {shape} has scales of {tuple(scales.dims)}")
        zeros = w.tensors.get(zero)
        weight = w.weights.setdefault((x, id(scales), id(zeros)), Weight(x, None, scales, zeros, blocks, element))
        if problem := weight.problem():
            raise w.refuse(node, problem)
        w.integers[q] = Quantized(x, scale, zero, weight)
        return
    computed = value not in {v.name for v in w.model.graph.input}
    limits = w.limits(scale, zero) if computed and value not in w.positive and stored is None else None
    if limits:
        limited = w.name_of(q)
        w.limit(value, limited, limits, scale)
        value = limited
    w.integers[q] = Quantized(value, scale, zero, w.activation(scale, zero, element, value))


def dequantize_linear(w: Walk, node: NodeProto) -> None:
    """y is the value that the integers stand for, or a weight; of integers that a caller feeds the node stays."""
    (q, scale, zero), y = inputs_of(node, _ZERO_INPUTS), node.output[0]
    attributes = attributes_of(node)
    if q not in w.integers and not w.is_integers(q):
        if q in w.products or (q in w.tensors and not floats_in(w.tensors[q])):
            raise w.refuse(node, f"it reads {q!r}, which is neither quantised nor a weight of integers")
        w.keep(node)
        return
    axis, length = attributes.get("axis", 1), attributes.get("block_size", 0)
    value = w.real(node, q, scale, zero, axis, length, instead=y)
    if value != y:
        w.alias[y] = value
    source = w.integers[q].source if q in w.integers else w.sources.get(value)
    if source is not None:
        w.sources[y] = source


def moving(w: Walk, node: NodeProto) -> None:
    """The same places of floats; a weight gets the scale of what reads the result."""
    places = _MOVING[node.op_type]
    places = tuple(range(len(node.input))) if places is None else places
    read = [name for n, name in enumerate(node.input) if n in places and name]
    known = next((w.integers[name] for name in read if name in w.integers), None)
    if known is None and any(w.is_integers(name) for name in read):
        known = _scale_behind(w, node)
    if known is None:
        w.keep(node)
        return
    inputs = list(node.input)
    for n, name in enumerate(node.input):
        if n in places and name:
            inputs[n] = w.real(node, name, known.scale, known.zero, instead="")
    if node.op_type == "Pad":
        inputs = _padded(w, node, inputs, known)
    if node.op_type == "MaxPool" and len(node.output) > 1:
        raise w.refuse(node, "its indices are not handled. Leave the second output out")
    values = [w.name_of(q) for q in node.output]
    w.emit(node, node.op_type, inputs, values, **attributes_of(node))
    w.integers |= {q: replace(known, value=value) for q, value in zip(node.output, values, strict=True)}


def _padded(w: Walk, node: NodeProto, inputs: list[str], known: Quantized) -> list[str]:
    """The padding value in floats: (q - z) · s, q being 0 where none is given."""
    scale, zero = w.array(known.scale), w.array(known.zero) if known.zero else np.zeros(1)
    given = w.array(inputs[2]) if len(inputs) > 2 and inputs[2] else np.zeros(1)
    if scale is None or zero is None or given is None or scale.size != 1:
        raise w.refuse(node, "its padding value or its scale is computed")
    if attributes_of(node).get("mode", b"constant") != b"constant":
        return inputs
    value = (given.reshape(()) - zero.reshape(-1)[0]) * scale.reshape(())
    name = w.new_constant(f"{node.output[0]}/value", np.asarray(value, scale.dtype))
    return [*[*inputs, ""][:2], name, *inputs[3:]]


def _scale_behind(w: Walk, node: NodeProto) -> Quantized | None:
    """The scale by which a DequantizeLinear behind nodes that move integers reads a weight; None for plain integers."""
    for name in node.output:
        for reader in w.readers.get(name, ()):
            if reader.op_type == "DequantizeLinear":
                scale, zero = inputs_of(reader, 3)[1:]
                scales = w.array(scale)
                if scales is None or scales.size != 1:
                    raise w.refuse(node, "it moves a weight that has several scales. Quantise it with one scale")
                return Quantized("", scale, zero)
            if reader.op_type in _MOVING and (behind := _scale_behind(w, reader)) is not None:
                return behind
    return None


def places(w: Walk, node: NodeProto) -> None:
    """The places of extrema are the same in floats."""
    known = w.integers.get(node.input[0])
    if known is None:
        w.keep(node)
    else:
        w.emit(node, node.op_type, [known.value], node.output, **attributes_of(node))


def clip(w: Walk, node: NodeProto) -> None:
    """The same floats: what a tool leaves of a range of integers is where its scale ends."""
    known = w.integers.get(node.input[0])
    if known is None:
        w.keep(node)
        return
    ends = [w.array(name) for name in inputs_of(node, 3)[1:]]
    if any(end is None or end.size != 1 for end in ends):
        raise w.refuse(node, "it limits integers at one side alone, or by numbers that are computed")
    w.integers[node.output[0]] = known
    if isinstance(known.source, Activation):
        known.source.ints = Range(*(int(end.reshape(())) for end in ends if end is not None))


def cast(w: Walk, node: NodeProto) -> None:
    """Sums of products of integers in floats, or a weight of integers before its scale."""
    x, to = node.input[0], attributes_of(node)["to"]
    if x in w.products and to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        w.products[node.output[0]] = w.products[x]
        return
    w.keep(node)
    if w.is_integers(x) and len(w.tensors[x].dims) and to in (TensorProto.FLOAT, TensorProto.FLOAT16):
        w.casts[node.output[0]] = (x, "")


def sub(w: Walk, node: NodeProto) -> None:
    """A cast weight less its zero point."""
    w.keep(node)
    weight, zero = w.casts.get(node.input[0]), w.tensors.get(node.input[1])
    if weight is not None and not weight[1]:
        maker = w.makers.get(node.input[1])
        name = node.input[1] if zero is not None else maker.input[0] if maker and maker.op_type == "Cast" else ""
        shape, zeros = tuple(w.tensors[weight[0]].dims), w.tensors.get(name)
        if zeros is not None and blocks_beside(shape, tuple(zeros.dims)) is not None:
            w.casts[node.output[0]] = (weight[0], name)


def scaled_cast(w: Walk, node: NodeProto) -> bool:
    """Whether Mul gives a cast weight its scale; the result then is the float weight."""
    for n in (0, 1):
        cast_weight, scales = w.casts.get(node.input[n]), w.tensors.get(node.input[1 - n])
        if cast_weight is None or not floats_in(scales):
            continue
        assert scales is not None
        q, zero = cast_weight
        shape = tuple(w.tensors[q].dims)
        blocks = blocks_beside(shape, tuple(scales.dims))
        zeros = w.array(zero) if zero else np.zeros(1)
        integers = w.array(q)
        assert integers is not None
        assert zeros is not None
        if blocks is None or zeros.size not in (1, int(np.prod(scales.dims))) or np.abs(integers).max(initial=0) <= 1:
            continue
        y = node.output[0]
        value = w.weight(node, q, node.input[1 - n], zero, blocks, instead=y)
        if value != y:
            w.alias[y] = value
        return True
    return False


HANDLERS: dict[str, Handler] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "Cast": cast,
    "Clip": clip,
    "Sub": sub,
}
HANDLERS |= dict.fromkeys(_MOVING, moving) | dict.fromkeys(_PLACES, places)
