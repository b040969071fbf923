"""The six convolutions; what they have in common is in the folder `convolution`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.declarations.declaration import (
    AUTO_PAD,
    DATA_FORMAT,
    INT,
    INTS,
    REQUIRED,
    STRING,
    Attributes,
    Declaration,
    Schema,
    Value,
)
from tests.operators.convolution.calls import calls
from tests.operators.convolution.examples import convolutions, forwards, transposed
from tests.operators.convolution.refusals import CD, CV, CW, REFUSED, TD, TF, TW

CONVOLUTION: dict[str, tuple[Any, ...]] = {
    "strides": (INTS, REQUIRED),
    "pads_begin": (INTS, REQUIRED),
    "pads_end": (INTS, REQUIRED),
    "dilations": (INTS, REQUIRED),
    "auto_pad": AUTO_PAD,
    "groups": (INT, 1),
    "data_format": DATA_FORMAT,
}
PLAIN = CONVOLUTION | {"weights_format": (STRING, "XIO", ("XIO", "OIX"))}
ALL_FORMATS = ("XOI", "IOX", "XIO", "OIX")
TRANSPOSED = CONVOLUTION | {"output_padding": (INTS, None), "weights_format": (STRING, "XOI", ALL_FORMATS)}
SCHEMAS = {
    CV: Schema(PLAIN, {"src": "T1", "weights": "T1", "bias": "T1?"}, {"dst": "T1"}),
    CD: Schema(
        PLAIN | {"output_padding": (INTS, None), "dst_shape": (INTS, None)},
        {"diff_dst": "T1", "weights": "T1", "dst_shape": "T2?"},
        {"diff_src": "T1"},
    ),
    CW: Schema(
        PLAIN | {"weights_shape": (INTS, None)},
        {"src": "T1", "diff_dst": "T1", "weights_shape": "T2?"},
        {"diff_weights": "T1"},
    ),
    TD: Schema(TRANSPOSED, {"diff_dst": "T1", "weights": "T1"}, {"diff_src": "T1"}),
    TW: Schema(
        TRANSPOSED | {"weights_shape": (INTS, None)},
        {"src": "T1", "diff_dst": "T1", "weights_shape": "T2?"},
        {"diff_weights": "T1"},
    ),
    TF: Schema(
        CONVOLUTION
        | {"output_padding": (INTS, None), "filter_format": (STRING, "XIO", ALL_FORMATS), "filter_shape": (INTS, None)},
        {"input_forward": "T1", "output_delta": "T1", "filter_shape": "T2?"},
        {"filter_delta": "T1"},
    ),
}

BASE: Attributes = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
VALID: dict[str, tuple[Attributes, list[Value]]] = {
    CV: ({"weights_format": "OIX"}, [(1, 4, 5), (6, 4, 3), (6,)]),
    CD: ({"weights_format": "OIX", "dst_shape": [1, 4, 5]}, [(1, 6, 3), (6, 4, 3)]),
    CW: ({"weights_format": "OIX", "weights_shape": [6, 4, 3]}, [(1, 4, 5), (1, 6, 3)]),
    TD: ({"weights_format": "IOX"}, [(1, 4, 5), (6, 4, 3)]),
    TW: ({"weights_format": "IOX", "weights_shape": [6, 4, 3]}, [(1, 6, 3), (1, 4, 5)]),
    TF: ({"filter_format": "OIX", "filter_shape": [4, 6, 3]}, [(1, 6, 3), (1, 4, 5)]),
}
PLANE: Attributes = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1]}
INFERRED = {
    CD: [(PLANE | {"dst_shape": [1, 5, 5, 2]}, [None, None], [[1, 5, 5, 2]])],
    CW: [(PLANE, [None, None, [4]], [[None, None, None, None]])],
    TD: [
        (PLANE, [None, None], [None]),
        (PLANE | {"data_format": "NCX"}, [None, [2, 2, 3, 6]], [[None, 6, None, None]]),
    ],
}
EXAMPLES = [*forwards(), *convolutions(), *transposed()]
OPERATORS = [
    Declaration(
        op=op,
        schema=schema,
        gradient_of=("ConvTranspose" if op.startswith("ConvTranspose") else "Conv",),
        calls=partial(calls, op),
        valid=(BASE | VALID[op][0], VALID[op][1]),
        refused=[bad for bad in REFUSED if bad.op == op],
        examples=[example for example in EXAMPLES if example.op == op],
        inferred=INFERRED.get(op, ()),
    )
    for op, schema in SCHEMAS.items()
]
