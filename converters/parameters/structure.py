"""What a tensor is by where it is read: a weight of an operator, or what defines the function, as an exponent."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.parameters.values import are_sine_and_cosine, holds_angles, is_uniform
from onnx_backprop.converters.prepare.fused.composer import SCALE, defined
from onnx_backprop.opset.functions.mat_mul_n_bits import MICROSOFT
from onnx_backprop.opset.graphs.facts import HANDS_ON
from onnx_backprop.opset.graphs.walk import is_standard

CLASSES = "weight of a class"
# operator -> {input: what the function has there}
DEFINES: dict[str, dict[int, str]] = {
    "BatchNormalization": {3: "running statistic", 4: "running statistic"},
    "Clip": {1: "limit", 2: "limit"},
    "DequantizeLinear": {0: "quantized number", 1: SCALE},
    "Dropout": {1: "ratio"},
    "MaxRoiPool": {1: "region"},
    "MelWeightMatrix": {3: "limit", 4: "limit"},
    "Mod": {1: "divisor"},
    "NegativeLogLikelihoodLoss": {2: CLASSES},
    "NonMaxSuppression": {3: "threshold", 4: "threshold"},
    "OneHot": {2: "value"},
    "Pad": {2: "padding value"},
    "Pow": {1: "exponent"},
    "QuantizeLinear": {1: SCALE},
    "Range": {0: "limit", 1: "limit", 2: "step"},
    "Resize": {1: "region", 2: "scale"},
    "RoiAlign": {1: "region"},
    "STFT": {2: "window"},
    "SoftmaxCrossEntropyLoss": {2: CLASSES},
    "Upsample": {1: "scale"},
}
_OF_PACKED = {2: SCALE, 3: "zero point"}  # the inputs of MatMulNBits, and 5, a bias
NEVER_TRAINED = ("running statistic of BatchNormalization", "ratio of Dropout")  # which a step renews, or reads as is
# where a tensor is a weight, however few elements it has
WEIGHTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": tuple(range(16)),
    "Exp": (0,),
    "GRU": (1, 2, 3, 5),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 5, 6, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3, 5),
}
_LINEAR = ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul", "MatMulNBits")
_ROUNDED = ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger")
# what hands on the numbers of any input
_JOINING = ("Concat", "Sum")
SINGLE, STATISTIC, FREQUENCY = "a single number", "statistic of an input", "frequency of Sin and Cos"
BASE = "base that is scattered into"
FACTOR = "factor of the loss"
_ROUNDING = 1e-2  # how far the norm of a unit vector may be from 1, in numbers of 16 bits too
_SCALE_AND_BIAS = {1: 1.0, 2: 0.0}  # the inputs of a normalisation and what stands there for none
_NORMALIZATIONS = ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization")
_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}  # the inputs that are initial states
_SCATTERED = ("Scatter", "ScatterElements", "ScatterND")
_LINEAR_IN_ALL = ("Add", "Concat", "Div", "Identity", "MatMul", "Mean", "Mul", "Neg", "Sub", "Sum")
_LINEAR_IN_FIRST = ("Gather", "GatherElements", "GatherND", "ReduceMean", "ReduceSum")

_ADDED = re.compile(r"\w*_Addcst\d*")

Use = tuple[ir.Node, int]


def defines(value: ir.Value, node: ir.Node, index: int) -> str | None:
    """What the table or the node says of an input, or that it rescales the product of rounded numbers."""
    places = _OF_PACKED if _is_packed(node) else DEFINES.get(node.op_type, {}) if node.domain == "" else {}
    what = places.get(index)
    if what is not None:
        return f"{what} of {node.op_type}"
    if (what := defined(node, index)) is not None:
        return what
    if is_standard(node, "Gemm") and index == 2 and node.attributes.get_float("beta", 1.0) == 0:
        return "term times 0 of Gemm"
    if is_standard(node, "Max", "Min") and is_vector(value):
        return f"limit of {node.op_type}"
    if is_standard(node, "Where") and index and is_single(value):
        return "fill of Where"
    if is_standard(node, "Mul"):
        other = source_of(node.inputs[1 - index])
        producer = None if other is None else other.producer()
        if producer is not None and producer.op_type in _ROUNDED:
            return f"{SCALE} of {producer.op_type}"
    return None


def is_affine(node: ir.Node) -> bool:
    """Whether a node scales what InstanceNormalization gives, or shifts that, as the exporters write GroupNorm."""
    for op_type in ("Add", "Mul"):
        if is_standard(node, op_type):
            values = (source_of(value) for value in node.inputs)
            node = next((maker for v in values if v is not None and (maker := v.producer()) is not None), node)
    return node.op_type == "InstanceNormalization"


def is_codebook(value: ir.Value) -> bool:
    """Whether a table is read at the places of the largest or smallest numbers, as by a vector quantiser."""
    for node, index in uses_of(value):
        places = source_of(node.inputs[1]) if is_standard(node, "Gather") and index == 0 else None
        maker = None if places is None else places.producer()
        if maker is not None and maker.op_type in ("ArgMax", "ArgMin"):
            return True
    return False


def is_root_of_width(value: ir.Value, array: np.ndarray) -> bool:
    """Whether a single number multiplies rows of a table alone, and is the square root of their length."""
    for node, index in uses_of(value):
        other = source_of(node.inputs[1 - index]) if is_standard(node, "Mul") else None
        gather = None if other is None else other.producer()
        table = gather.inputs[0] if gather is not None and is_standard(gather, "Gather") else None
        width = None if table is None or table.shape is None or not table.is_initializer() else table.shape[-1]
        if not isinstance(width, int) or abs(float(array.flat[0]) ** 2 - width) > 1e-2 * width:
            return False
    return True


def reader_of(what: str) -> str:
    """The operator that a tensor is read by, from what `defines` says that it is: `limit of Clip`."""
    return what.rpartition(" of ")[2]


def is_scale(what: str) -> bool:
    """Whether a tensor is a quantization scale, from what `defines` says that it is."""
    return what.startswith(SCALE)


def has_integer_weights(graph: ir.Graph) -> bool:
    """Whether a product or a DequantizeLinear reads integers of the file: then these are the weights."""
    readers = (node for node in graph.all_nodes() if node.op_type in ("DequantizeLinear", *_ROUNDED))
    read = (
        value for node in readers for value in node.inputs[:2] if value is not None and value.const_value is not None
    )
    return any(not is_single(x) and x.dtype is not None and not x.dtype.is_floating_point() for x in read)


def uses_of(value: ir.Value) -> Iterator[Use]:
    """The nodes that read a value, or what only reshapes, casts or joins it, with the input that does.

    A Where of a value or the same, as `hidden_scales` puts before a Resize, hands it on.
    """
    seen, waiting = {value}, [value]
    while waiting:
        for node, index in waiting.pop().uses():
            passes = is_standard(node, *_JOINING) or (node in HANDS_ON and index == 0)
            passes |= index > 0 and is_standard(node, "Where") and node.inputs[1] is node.inputs[2]
            if not passes or defined(node, index) is not None:
                yield node, index
            elif node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def source_of(value: ir.Value | None) -> ir.Value | None:
    """What a value was before it was reshaped or cast."""
    while value is not None and (node := value.producer()) is not None and node.op_type in HANDS_ON:
        value = node.inputs[0]
    return value


def is_single(value: ir.Value) -> bool:
    return value.shape is not None and all(length == 1 for length in value.shape)


def is_vector(value: ir.Value) -> bool:
    """Whether one axis at most is longer than 1."""
    return value.shape is not None and sum(length != 1 for length in value.shape) <= 1


def is_iterated(vector: ir.Value, weight: ir.Value) -> bool:
    """Whether a vector is u or v where a weight W is divided by u · (W v), which is how spectral_norm has its norm."""
    if vector.const_value is None or weight.const_value is None:
        return False
    array, lengths = vector.const_value.numpy(), weight.const_value.shape.numpy()
    unit = array.ndim == 1 and abs(np.linalg.norm(array.astype(np.float64)) - 1) < _ROUNDING
    if not unit or not any(length == array.size or length * array.size == prod(lengths) for length in lengths):
        return False
    products = [vector]
    for _ in range(2):
        uses = [use for value in products for use in uses_of(value)]
        products = [node.outputs[0] for node, _ in uses if is_standard(node, "MatMul")]
        readers = [use for value in products for use in value.uses()]
        if any(is_standard(node, "Div") and n == 1 and source_of(node.inputs[0]) is weight for node, n in readers):
            return True
    return False


def is_weight(value: ir.Value, node: ir.Node, index: int) -> bool:
    """Whether a node has a weight at an input: by the table, or a bias, along one axis, that is added to a product."""
    if is_standard(node, "Add"):
        other = source_of(node.inputs[1 - index])
        product = None if other is None else other.producer()
        if not is_vector(value) or product is None or product.op_type not in _LINEAR:
            return False
        return not is_single(value) or _has_one_output(value, product)
    return (_is_packed(node) and index == 5) or (node.domain == "" and index in WEIGHTS.get(node.op_type, ()))


def is_second_bias(node: ir.Node, index: int) -> bool:
    """Whether a node adds what it reads at an input to a product that has a bias."""
    other = source_of(node.inputs[1 - index]) if is_standard(node, "Add") else None
    before = None if other is None else other.producer()
    if before is None or not is_standard(before, "Add"):
        return (
            before is not None and before.op_type in _LINEAR and len(before.inputs) > 2 and before.inputs[2] is not None
        )
    return any(is_weight(x, before, n) for n, x in enumerate(before.inputs) if x is not None and x.is_initializer())


def _is_packed(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits")


def _has_one_output(value: ir.Value, product: ir.Node) -> bool:
    """Whether one number may be the bias of a product: it has an axis, and the product gives one number for it."""
    shape = product.outputs[0].shape
    if value.shape is None or not len(value.shape) or shape is None:
        return shape is None
    length = shape[1 if product.op_type in ("Conv", "ConvTranspose") else -1]
    return not isinstance(length, int) or length == 1


def stands_for_nothing(value: ir.Value, array: np.ndarray, node: ir.Node, index: int) -> str | None:
    """What a uniform tensor would be that an exporter has put where a module has none: nothing changes with it."""
    if node.domain or not is_uniform(array):
        return None
    number = float(array.flat[0])
    if node.op_type in _NORMALIZATIONS and _SCALE_AND_BIAS.get(index) == number:
        return f"{'ones' if number else 'zeros'} of {node.op_type}"
    if node.op_type in _SCATTERED and index == 0:
        return BASE
    if number == 0 and index in _STATES.get(node.op_type, ()):
        return f"initial state of {node.op_type}"
    if number == 0 and index == 2 and node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return f"zeros of {node.op_type}"
    if number == 0 and node.op_type == "Add" and not is_vector(value):
        return "zeros that are added"
    return None


def is_factor(value: ir.Value, loss: ir.Value, floats: Collection[ir.Value]) -> bool:
    """Whether a loss is linear in a tensor of one axis, or the ratio of two such sums, and has it as a factor of terms.

    So it is with the weights of classes, by the Gather of labels or beside them. Nothing trains such numbers: the loss
    falls without end. A matrix before the loss, as a critic ends with, and what is added alone are no such factors.
    """
    if not is_vector(value):
        return False
    seen, nodes, waiting = {value}, dict[ir.Node, None](), [value]
    while waiting:
        for node, index in waiting.pop().uses():
            passes = is_standard(node, *_LINEAR_IN_ALL) or (is_standard(node, "Where") and index > 0)
            passes |= index == 0 and (is_standard(node, *_LINEAR_IN_FIRST) or node in HANDS_ON)
            if not passes or node.graph is not loss.graph:
                return False
            nodes[node] = None
            if node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    if loss not in seen:
        return False
    trained = _reached(other for other in floats if other is not value and not is_single(other))
    weighs = False
    for node in nodes:
        if node.op_type not in ("Div", "MatMul", "Mul"):
            continue
        first, second = (operand in seen for operand in node.inputs)
        other = node.inputs[1 if first else 0]
        ratio = node.op_type == "Div" and (not first or (second and other in trained))
        if ratio or (first and second and node.op_type != "Div") or (node.op_type == "MatMul" and other in trained):
            return False
        weighs |= other in trained
    return weighs


def _reached(starts: Iterable[ir.Value]) -> set[ir.Value]:
    """What depends on some values of a graph, and these."""
    seen = set(starts)
    waiting = list(seen)
    while waiting:
        following = {y for node, _ in waiting.pop().uses() for y in node.outputs} - seen
        seen |= following
        waiting += following
    return seen


def makes_angles(value: ir.Value) -> bool:
    """Whether all that products with a tensor lead to is Sin and Cos, as with rotary and sinusoidal embeddings."""
    ends: set[str] = set()
    for node, _ in uses_of(value):
        products = ("Einsum", "MatMul") if is_vector(value) else ()
        if node.op_type not in ("Mul", "Div", *products):
            return False
        after = [end for end, _ in uses_of(node.outputs[0])]
        if len(after) == 1 and is_standard(after[0], "Mul"):  # as by 2π
            after = [end for end, _ in uses_of(after[0].outputs[0])]
        ends.update(end.op_type for end in after)
    return ends == {"Sin", "Cos"}


def normalising(graph: ir.Graph) -> Iterator[ir.Value]:
    """The tensors that an input is centred and scaled by, once each, before anything else happens to it.

    skl2onnx adds to centre, what it calls Ad_Addcst.
    """
    for source in graph.inputs:
        if source.is_initializer():
            continue
        steps: dict[bool, ir.Value] = {}  # whether it centres, and by what
        current = source
        while len(uses := list(current.uses())) == 1:
            node, index = uses[0]
            if index != 0 or not (is_standard(node, "Add", "Div", "Mul", "Sub") or node in HANDS_ON):
                break
            if node not in HANDS_ON:
                other, centres = source_of(node.inputs[1]), node.op_type in ("Add", "Sub")
                if node.op_type == "Add" and (other is None or not _ADDED.fullmatch(str(other.name))):
                    break
                if other is None or not other.is_initializer() or centres in steps:
                    break
                steps[centres] = other
            current = node.outputs[0]
        if True in steps:
            yield from steps.values()


def angle_tables(floats: Collection[ir.Value]) -> set[ir.Value]:
    """The tables of sines and cosines: by their rows, or two of one shape whose squares have one sum."""
    tables: defaultdict[object, dict[ir.Value, np.ndarray]] = defaultdict(dict)
    for value in floats:
        read = any(node.op_type in ("Add", "Gather", "Mul") for node, _ in uses_of(value))
        if value.const_value is not None and read and not is_vector(value):
            array = value.const_value.numpy()
            tables[array.dtype, array.shape][value] = array
    result = {value for group in tables.values() for value, array in group.items() if holds_angles(array)}
    for group in tables.values():
        for (a, first), (b, second) in combinations(group.items(), 2):
            if are_sine_and_cosine(first, second):
                result |= {a, b}
    return result
