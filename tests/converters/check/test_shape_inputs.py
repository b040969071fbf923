"""Inputs that set a shape, a position or a count are not drawn: each of them in ONNX."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, defs, helper

import onnx_backprop as ob
from onnx_backprop.converters.check.feeds import DRAWS, draw_feeds

# What ONNX calls them, whatever the operator.
NAMES = {
    *("I", "axes", "axis", "block_shape", "depth", "dft_length", "ends", "frame_length", "frame_step", "image_shape"),
    *(
        "limit",
        "delta",
        "output_shape",
        "pads",
        "repeats",
        "shape",
        "size",
        "sizes",
        "split",
        "start",
        "starts",
        "steps",
    ),
    *("sequence_lens", "tiles"),
}
OTHER_NAMES = {("ConstantOfShape", 0), ("Resize", 2), ("TopK", 1)}  # input, scales, K
# Which 0 and 1 fit, or which no gradient flows beside.
DRAWN = {
    *(("BlackmanWindow", 0), ("HammingWindow", 0), ("HannWindow", 0), ("MelWeightMatrix", 1), ("SplitToSequence", 1)),
    *(("CumProd", 1), ("GRU", 4), ("LSTM", 4), ("RNN", 4), ("Scan", 0), ("Tile", 2)),
}


def model_of(op_type: str, index: int) -> ModelProto:
    """A node that reads the vector "s", which is to be drawn."""
    node = helper.make_node(op_type, [*(f"x{n}" for n in range(index)), "s"], ["y"], name="y")
    s, y = (helper.make_tensor_value_info(name, kind, [2]) for name, kind in (("s", 7), ("y", TensorProto.FLOAT)))
    return helper.make_model(helper.make_graph([node], "g", [s], [y]))


def refused(model: ModelProto, op_type: str, rng: np.random.Generator) -> bool:
    try:
        draw_feeds(model, {}, DRAWS[0], rng)
    except ob.InvalidArgumentError as e:
        return f"'s' sets a shape, a position or a count of {op_type} 'y'" in str(e)
    return False


def test_each_that_sets_a_shape(rng: np.random.Generator) -> None:
    """By the names in ONNX's own schemas, of every version."""
    known = set(OTHER_NAMES)
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            known |= {(schema.name, n) for n, formal in enumerate(schema.inputs) if formal.name in NAMES}
    refuses = {(name, n) for name, n in known if refused(model_of(name, n), name, rng)}
    assert known - refuses == DRAWN
    assert len(refuses) >= 40
