"""Files of torch.export that hide what was computed: steps without a name of their own, repeated numbers, lost buffers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from tests.support.torch_files import W, exported, with_operations

DOUBTFUL = "the file does not say for sure which tensors are parameters"


def warned(file: ModelProto) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(file, loss="mse")
    return "\n".join(str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("operation", "sure"),
    [
        ("matmul.default", True),
        ("mm.default", True),
        ("prelu.default", True),
        ("group_norm.default", True),
        ("sub.Tensor", False),
        ("logaddexp.default", False),
        ("baddbmm.default", False),
        ("scaled_dot_product_attention.default", False),
    ],
)
def test_a_step_inside_an_operation_has_moved_numbers_if_that_only_moves_them(operation: str, sure: bool) -> None:
    """x - 3 w reads 3 w, and calls it val_2 as a product does the transposed weight."""
    file = exported("y = MatMul(x, val_2)", {"val_2": W}, "w", folded={"val_2": ["w", "val_1"]})
    text = warned(with_operations(file, {"y": "%x, %p_w"}, f"torch.ops.aten.{operation}"))
    assert (DOUBTFUL not in text) == sure
    assert ("'w' (val_2) (the exporter has computed it from 'w')" in text) == (not sure)


@pytest.mark.parametrize("name", ["view_1", "getitem"])
def test_one_of_several_results_is_no_moved_tensor(name: str) -> None:
    """getitem takes the values of max() or of a normalisation out, as well as a part of a split tensor."""
    file = exported(f"y = MatMul(x, {name})", {name: W}, "w", folded={name: ["w", "getitem", "val_1"]})
    assert f"'w' ({name}) (the exporter has computed it from 'w')" in warned(file)


@pytest.mark.parametrize(("name", "sure"), [("expand", False), ("repeat", False), ("index", False), ("view", True)])
@pytest.mark.parametrize("steps", [["w"], ["val_0", "w"]])
@pytest.mark.parametrize("numbers", [[0.5, 0.5, 0.5], [1, 2, 1]])
def test_equal_numbers_of_one_axis_may_be_one(name: str, sure: bool, steps: list[str], numbers: list[float]) -> None:
    """w.expand(3), w.repeat(2) and w[index] have fewer numbers to train than the file has."""
    file = exported(f"y = Mul(x, {name})", {name: np.array(numbers, np.float32)}, "w", folded={name: steps})
    assert (DOUBTFUL not in warned(file)) == sure


def test_different_numbers_of_one_axis_are_the_parameter() -> None:
    numbers = np.array([1, 2, 3], np.float32)
    file = exported("y = Mul(x, index)", {"index": numbers}, "w", folded={"index": ["val_0", "w"]})
    assert DOUBTFUL not in warned(file)


LOST = "the file has no tensor for these buffers of the module: 'start'. Nothing reads them, or the exporter has merged"


@pytest.mark.parametrize(
    ("call", "buffer", "lost"),
    [
        ("%linear_1, %linear_2", "start", True),
        ("%linear_1, %linear_1", "start", False),
        ("%linear_1, %clone", "start", False),
        ("%linear_1, %linear_2", "position_ids", False),
        ("%linear_1, %linear_2", "norm.running_mean", False),
    ],
)
def test_a_lost_buffer_beside_a_lost_operation_is_named(call: str, buffer: str, lost: bool) -> None:
    """A frozen copy of a head, as buffers, that reads what the head reads: one product is left, read twice."""
    body = "linear_1 = MatMul(x, w) y = Add(linear_1, linear_1)"
    file = with_operations(exported(body, {"w": W}, "w", buffers=buffer), {"linear_1": "%x, %p_w", "y": call})
    assert (LOST in warned(file)) == lost


def test_an_output_whose_operation_is_lost_counts_too() -> None:
    """linear + ((w - start)²).sum() is linear, while both begin with the same numbers."""
    file = exported("add = MatMul(x, w)", {"w": W}, "w", buffers="start")
    file.graph.output[0].name = "add"
    with_operations(file, {"add": "%x, %p_w"})
    entry = next(p for p in file.graph.node[0].metadata_props if p.key.endswith("fx_node"))
    entry.value = entry.value.replace("%add", "%linear")
    assert LOST in warned(file)
