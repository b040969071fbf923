"""Which float initializers a training changes: those that define the function are none, though they are floats.

An exponent that is trained makes NaN of the first negative number, the step of a Range another length, a limit of
-3.4e38 an overflow. What a tensor is follows from where it is read, in one table of operators and inputs; for what
plain arithmetic reads, from its values. A caller who names such a tensor trains it all the same.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import combinations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare import graphs

# operator -> {input: what the function has there}
DEFINES: dict[str, dict[int, str]] = {
    "BatchNormalization": {3: "running statistic", 4: "running statistic"},
    "Clip": {1: "limit", 2: "limit"},
    "DequantizeLinear": {0: "quantized number", 1: "quantization scale"},
    "Dropout": {1: "ratio"},
    "MaxRoiPool": {1: "region"},
    "MelWeightMatrix": {3: "limit", 4: "limit"},
    "Mod": {1: "divisor"},
    "NonMaxSuppression": {3: "threshold", 4: "threshold"},
    "OneHot": {2: "value"},
    "Pad": {2: "padding value"},
    "Pow": {1: "exponent"},
    "QuantizeLinear": {1: "quantization scale"},
    "Range": {0: "limit", 1: "limit", 2: "step"},
    "Resize": {1: "region", 2: "scale"},
    "RoiAlign": {1: "region"},
    "STFT": {2: "window"},
    "Upsample": {1: "scale"},
}
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
_LINEAR = ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")
_ROUNDED = ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger")
# what hands on the numbers of its first input, or of any
_PASSING = ("Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose")
_PASSING += ("ScatterND", "Trilu", "Unsqueeze")
_JOINING = ("Concat", "Sum")
SINGLE, MASK, POSITIONS, STATISTIC = "a single number", "mask or limit", "table of positions", "statistic of an input"
_PERHAPS = frozenset({SINGLE, POSITIONS, STATISTIC})  # what is a parameter where nothing else is
_HUGE = {2: 6e4, 4: 1e30, 8: 1e30}  # size of the element type -> from here on a number is a limit
_MASKED = -100.0  # what a mask adds is this or less
_HEAD, _ROWS = 256, 8  # numbers of a tensor, rows of a table, that are looked at first
_RAMP = 4  # numbers in a row that are no chance any more
_VARIED = 0.5  # how far apart the numbers of a table of angles are

Use = tuple[ir.Node, int]


def constants(graph: ir.Graph, floats: Collection[ir.Value]) -> dict[ir.Value, str]:
    """The initializers among `floats` that are no parameters, each with what it is.

    What merely looks like a constant, as a single number does that plain arithmetic reads, is a parameter where
    `floats` has no other.
    """
    normalising, angles = set(_normalising(graph)), _angles(floats)
    found = {value: what for value in floats if (what := _what(value, normalising, angles)) is not None}
    if len(found) == len(floats):
        return {value: what for value, what in found.items() if what not in _PERHAPS}
    return found


def _what(value: ir.Value, normalising: set[ir.Value], angles: set[ir.Value]) -> str | None:
    """What a tensor is that is no parameter; None for one."""
    uses = list(_uses(value))
    for node, index in uses:
        what = _defines(value, node, index)
        if what is not None:
            return what
    if value in angles:
        return "table of sines and cosines"
    if _makes_angles(value):
        return "frequency of Sin and Cos"
    array = None if value.const_value is None else value.const_value.numpy()
    if any(_is_weight(value, node, index) for node, index in uses):
        if array is None:
            return None
        is_mask = any(node.op_type == "Add" for node, _ in uses) and _by_values(array) == MASK
        return MASK if is_mask else POSITIONS if _is_ramp(array) else None
    if value in normalising and _is_vector(value):
        return STATISTIC
    if array is not None and (what := _by_values(array)) is not None:
        return what
    return SINGLE if _is_single(value) else None


def _defines(value: ir.Value, node: ir.Node, index: int) -> str | None:
    """What the table or the node says of an input, or that it rescales the product of rounded numbers."""
    what = DEFINES.get(node.op_type, {}).get(index) if node.domain == "" else None
    if what is not None:
        return f"{what} of {node.op_type}"
    stated, _, what = node.metadata_props.get(graphs.DEFINES, "").partition(": ")
    if stated == str(index):
        return what
    if node.domain == "" and node.op_type in ("Max", "Min") and _is_vector(value):
        return f"limit of {node.op_type}"
    if node.domain == "" and node.op_type == "Where" and index and _is_single(value):
        return "fill of Where"
    if node.domain == "" and node.op_type == "Mul":
        other = _source(node.inputs[1 - index])
        made_by = None if other is None else other.producer()
        if made_by is not None and made_by.op_type in _ROUNDED:
            return f"quantization scale of {made_by.op_type}"
    return None


def _uses(value: ir.Value) -> Iterator[Use]:
    """The nodes that read a value, or what only reshapes, casts or joins it, with the input that does."""
    seen, waiting = {value}, [value]
    while waiting:
        for node, index in waiting.pop().uses():
            passes = node.domain == "" and (node.op_type in _JOINING or (node.op_type in _PASSING and index == 0))
            if not passes:
                yield node, index
            elif node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def _source(value: ir.Value | None) -> ir.Value | None:
    """What a value was before it was reshaped or cast."""
    while value is not None and (node := value.producer()) is not None and node.op_type in _PASSING:
        value = node.inputs[0]
    return value


def _is_single(value: ir.Value) -> bool:
    return value.shape is not None and all(length == 1 for length in value.shape)


def _is_vector(value: ir.Value) -> bool:
    """Whether one axis at most is longer than 1."""
    return value.shape is not None and sum(length != 1 for length in value.shape) <= 1


def _is_weight(value: ir.Value, node: ir.Node, index: int) -> bool:
    """Whether a node has a weight at an input: by the table, or a bias, along one axis, that is added to a product."""
    if node.domain == "" and node.op_type == "Add":
        other = _source(node.inputs[1 - index])
        made_by = None if other is None else other.producer()
        return _is_vector(value) and made_by is not None and made_by.op_type in _LINEAR
    return node.domain == "" and index in WEIGHTS.get(node.op_type, ())


def _is_ramp(array: np.ndarray) -> bool:
    """Whether it is 0, 1, 2, … along one axis: what makes a place of a distribution over places."""
    return (
        array.size >= _RAMP and max(array.shape) == array.size and np.array_equal(array.ravel(), np.arange(array.size))
    )


def _makes_angles(value: ir.Value) -> bool:
    """Whether all that products with a tensor lead to is Sin and Cos, as with rotary and sinusoidal embeddings."""
    ends: set[str] = set()
    for node, _ in _uses(value):
        products = ("Einsum", "MatMul") if _is_vector(value) else ()
        if node.op_type not in ("Mul", "Div", *products):
            return False
        ends.update(end.op_type for end, _ in _uses(node.outputs[0]))
    return ends == {"Sin", "Cos"}


def _normalising(graph: ir.Graph) -> Iterator[ir.Value]:
    """The tensors that an input is centred and scaled by, once each, before anything else happens to it."""
    for source in graph.inputs:
        if source.is_initializer():
            continue
        steps: dict[bool, ir.Value] = {}  # whether it centres, and by what
        current = source
        while len(uses := list(current.uses())) == 1:
            node, index = uses[0]
            if node.domain != "" or index != 0 or node.op_type not in ("Div", "Mul", "Sub", *_PASSING):
                break
            if node.op_type not in _PASSING:
                other, centres = _source(node.inputs[1]), node.op_type == "Sub"
                if other is None or not other.is_initializer() or centres in steps:
                    break
                steps[centres] = other
            current = node.outputs[0]
        if True in steps:
            yield from steps.values()


def _by_values(array: np.ndarray) -> str | None:
    """What the values of a tensor in plain arithmetic tell: a mask, a limit, or positions: whole numbers and halves."""
    values = array.ravel().astype(np.float64, copy=False)
    largest = float(np.max(np.abs(values), initial=0.0))
    if not np.isfinite(largest) or largest >= _HUGE.get(array.dtype.itemsize, 1e30):
        return MASK
    if any(np.any(part != np.rint(2 * part) / 2) for part in (values[:_HEAD], values)):
        return None
    different = np.unique(values)
    if len(different) > 2:
        return POSITIONS
    if len(different) < 2 or 0 not in different:
        return None
    return MASK if different[0] <= _MASKED or (array.ndim > 1 and different[1] == 1) else None


def _angles(floats: Collection[ir.Value]) -> set[ir.Value]:
    """The tables of sines and cosines: by their rows, or two of one shape whose squares have one sum."""
    tables: defaultdict[object, dict[ir.Value, np.ndarray]] = defaultdict(dict)
    for value in floats:
        read = any(node.op_type in ("Add", "Gather", "Mul") for node, _ in _uses(value))
        if value.const_value is not None and read and not _is_vector(value):
            array = value.const_value.numpy()
            tables[array.dtype, array.shape][value] = array
    found = {value for group in tables.values() for value, array in group.items() if _holds_angles(array)}
    for group in tables.values():
        for (a, first), (b, second) in combinations(group.items(), 2):
            if _are_sine_and_cosine(first, second):
                found |= {a, b}
    return found


def _are_sine_and_cosine(a: np.ndarray, b: np.ndarray) -> bool:
    first, second = (np.ravel(v)[:_HEAD].astype(np.float64) for v in (a, b))
    sums = first**2 + second**2
    return bool(min(np.ptp(first), np.ptp(second)) > _VARIED and np.ptp(sums) <= 1e-2 * sums.mean())


def _holds_angles(array: np.ndarray) -> bool:
    """Whether the rows begin like a table of sin(pω) or cos(pω), p = 0, 1, …, in halves, in pairs or alone.

    Row 0 is of ones and zeros alone, and row p holds the sine or cosine of p times the angles of row 1.
    """
    lengths = [n for n in array.shape if n > 1]
    if len(lengths) != 2 or lengths[0] < 4 or array.ndim > 4:
        return False
    rows = array.reshape(lengths)[:_ROWS].astype(np.float64)
    starts_as_cosine = rows[0] == 1
    if not np.all(starts_as_cosine | (rows[0] == 0)) or not np.ptp(rows) > _VARIED or np.abs(rows).max() > 1:
        return False
    angles = np.where(starts_as_cosine, np.arccos(np.clip(rows[1], -1, 1)), np.arcsin(np.clip(rows[1], -1, 1)))
    steps = np.arange(len(rows))[:, None] * angles
    expected = np.where(starts_as_cosine, np.cos(steps), np.sin(steps))
    return bool(np.any(angles) and np.allclose(rows, expected, atol=2e-2))
