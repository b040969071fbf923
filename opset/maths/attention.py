"""Attention as both of its operators see it: which lengths agree, and scores and probabilities in float64.

Letters of shapes: batch B, heads H of the queries and G of the keys, S queries, T keys, sizes D of a key and E of a
value.
"""

import math
from collections.abc import Mapping

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input
from onnx_backprop.opset.core.shapes import Dim, merge, require_rank, show

AXES = {
    "query": "BHSD", "key": "BGTD", "value": "BGTE", "lengths": "B", "sinks": "H", "offsets": "B",
    "diff_out": "BHSE", "out": "BHSE", "log_sum_exp": "BHS",
}  # fmt: skip
MEANINGS = {
    "B": "batches", "H": "heads", "G": "heads", "S": "numbers of queries", "T": "numbers of keys",
    "D": "sizes of heads", "E": "sizes of heads",
}  # fmt: skip
TOP_LEFT, BOTTOM_RIGHT = "TOP_LEFT", "BOTTOM_RIGHT"
MASKS = """
s_ij = scale·q_i·k_j, then softcap·tanh(s_ij / softcap) if softcap > 0, then s_ij + bias_ij; -inf if the query i does
not see the key j. It sees j < n with -left <= j - (i + o) <= right. n = lengths[b], T without lengths. o = offsets[b];
without offsets n - S if diagonal_alignment is BOTTOM_RIGHT (the last query is at the last key), 0 if it is TOP_LEFT.
left and right are window_left and window_right, -1 meaning no bound; is_causal = 1 means right = 0. Head h of the
queries reads head h // (H / G) of the keys and values.
"""
ATTRIBUTES = (
    Attribute("scale", "float", "What products of queries and keys are multiplied by; 0: 1/√D.", default=0.0),
    Attribute("softcap", "float", "Scores are softcap·tanh(s / softcap), >= 0; 0: they stay.", default=0.0),
    Attribute("is_causal", "int", "1: a query sees no key after the diagonal.", default=0),
    Attribute("window_left", "int", "How many keys before the diagonal are seen, -1: all.", default=-1),
    Attribute("window_right", "int", "How many keys after it are seen, -1: all.", default=-1),
    Attribute(
        "diagonal_alignment",
        "string",
        "Where the diagonal of the window lies.",
        default=BOTTOM_RIGHT,
        choices=(TOP_LEFT, BOTTOM_RIGHT),
    ),
)
OPTIONAL = (
    Input("bias", "T1", "Added to the scores, (B, H, S, T), each length that or 1.", optional=True),
    Input("lengths", "T7", "How many keys of each batch count, (B); clipped to 0 … T.", optional=True),
    Input("sinks", "T5", "The score per head of a key without a value, (H).", optional=True),
    Input("offsets", "T7", "How many keys stand before the first query of each batch, (B).", optional=True),
)


def window(attrs: Attributes) -> tuple[int, int]:
    """How far a query sees to the left and to the right of the diagonal, -1 without end."""
    return attrs["window_left"], 0 if attrs["is_causal"] else attrs["window_right"]


def lengths_of(attrs: Attributes, given: Mapping[str, Arg | None]) -> dict[str, Dim]:
    """What is known of every letter; raises ShapeError where inputs contradict each other or an attribute is wrong."""
    op = attrs.op
    attrs.require_flags("is_causal")
    for name in ("window_left", "window_right"):
        if attrs[name] < -1:
            raise ShapeError(f"attribute {name}: expected a number >= -1, got {attrs[name]}", op_type=op)
    if not (math.isfinite(attrs["softcap"]) and attrs["softcap"] >= 0):
        raise ShapeError(f"attribute softcap: expected a number >= 0, got {attrs['softcap']}", op_type=op)
    if not math.isfinite(attrs["scale"]):
        raise ShapeError(f"attribute scale: expected a finite number, got {attrs['scale']}", op_type=op)
    lengths: dict[str, Dim] = dict.fromkeys(MEANINGS)
    first: dict[str, str] = {}
    for name, axes in AXES.items():
        arg = given.get(name)
        if arg is None or arg.dims is None:
            continue
        require_rank(arg.dims, len(axes), len(axes), op=op, subject=name)
        for letter, length in zip(axes, arg.dims, strict=True):
            subject = f"{MEANINGS[letter]} of {first.setdefault(letter, name)} and {name}"
            lengths[letter] = merge(lengths[letter], length, op=op, subject=subject)
    heads, shared = lengths["H"], lengths["G"]
    if shared == 0 or (isinstance(heads, int) and isinstance(shared, int) and heads % shared):
        raise ShapeError(f"query: expected a multiple of the {shared} heads of key, got {heads}", op_type=op)
    if lengths["T"] == 0:
        raise ShapeError("key: expected one key or more, got none", op_type=op)
    if lengths["D"] == 0:
        raise ShapeError("query: expected one column or more, got none", op_type=op)
    bias = given.get("bias")
    if bias is not None and bias.dims is not None:
        require_rank(bias.dims, 4, 4, op=op, subject="bias")
        whole = [lengths[letter] for letter in "BHST"]
        pairs = [(a, b) for a, b in zip(bias.dims, whole, strict=True) if isinstance(a, int) and isinstance(b, int)]
        if any(a not in (1, b) for a, b in pairs):
            raise ShapeError(f"bias: expected lengths of {show(whole)} or 1, got {show(bias.dims)}", op_type=op)
    return lengths


def scale_of(attrs: Attributes, size: int) -> float:
    """The number that products are multiplied by, for heads of some size."""
    return float(np.float32(attrs["scale"])) or 1 / math.sqrt(max(size, 1))


def repeat_heads(shared: Float64Array, heads: int) -> Float64Array:
    """Keys or values, each head of them once for every head of the queries that reads it."""
    return np.repeat(shared, heads // shared.shape[1], axis=1)


def sum_heads(gradient: Float64Array, heads: int) -> Float64Array:
    """The adjoint of `repeat_heads`."""
    return gradient.reshape(gradient.shape[0], heads, -1, *gradient.shape[2:]).sum(axis=2)


def masked(
    attrs: Attributes, queries: int, keys: int, lengths: Float64Array | None, offsets: Float64Array | None
) -> np.ndarray:
    """Which keys a query does not see: (B or 1, 1, S, T)."""
    count = np.array([keys]) if lengths is None else np.clip(lengths, 0, keys).astype(int)
    count = count.reshape(-1, 1, 1, 1)
    key, (left, right) = np.arange(keys), window(attrs)
    start = count - queries if attrs["diagonal_alignment"] == BOTTOM_RIGHT else 0
    start = start if offsets is None else offsets.reshape(-1, 1, 1, 1)
    ahead = key - (np.arange(queries)[:, None] + start)
    out = key >= count
    if right >= 0:
        out = out | (ahead > right)
    return out | (ahead < -left) if left >= 0 else out


def scores(
    attrs: Attributes,
    query: Float64Array,
    key: Float64Array,
    bias: Float64Array | None,
    lengths: Float64Array | None,
    offsets: Float64Array | None,
) -> tuple[Float64Array, Float64Array | None]:
    """The scores (B, H, S, T), -inf where a key is hidden; and tanh(s / softcap) where there is a softcap."""
    products = np.einsum("bhsd,bhtd->bhst", query, repeat_heads(key, query.shape[1])) * scale_of(attrs, query.shape[3])
    cap, bent = float(np.float32(attrs["softcap"])), None
    if cap > 0:
        bent = np.tanh(products / cap)
        products = bent * cap
    products = products if bias is None else products + bias
    return np.where(masked(attrs, query.shape[2], key.shape[2], lengths, offsets), -np.inf, products), bent
