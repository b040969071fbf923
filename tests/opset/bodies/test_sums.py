"""BiasAddBackward over 2²⁵ elements, on every route: exact to 1e-6 where one float32 sum is off by 1e-3 and more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support.numeric import outputs

# data format and lengths
LARGE = [("NCX", (4, 2, 2**22)), ("NCX", (2**19, 1, 64)), ("NXC", (2**19, 64)), ("NXC", (4, 2**22, 2))]
SMALL = [
    *(("NXC", shape) for shape in [(0, 8), (128, 0), (3, 0, 8), (97, 8), (130, 1), (5, 77, 4), (0, 256, 8)]),
    *(("NCX", shape) for shape in [(0, 8, 3), (5, 8, 0), (5, 0, 300), (2, 3, 257), (1, 3, 11, 37), (70, 4, 1, 1), (9, 3)]),
]  # fmt: skip


def model(data_format: str, lengths: Any) -> ModelProto:
    node = helper.make_node("BiasAddBackward", ["x"], ["y"], domain=ob.DOMAIN, data_format=data_format)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", lengths), ("y", [None]))
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=imports, ir_version=10)


def others(data_format: str, rank: int) -> tuple[int, ...]:
    channel = 1 if data_format == "NCX" else rank - 1
    return tuple(axis for axis in range(rank) if axis != channel)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("data_format", "shape"), LARGE)
def test_exact(data_format: str, shape: tuple[int, ...], kernels: str) -> None:
    """Of equal numbers, all of whose roundings go the same way."""
    lengths = shape if kernels == "onnx" and data_format == "NCX" else ["N", *shape[1:]]
    session = ob.session(model(data_format, lengths), kernels=kernels)
    got = np.asarray(session.run(None, {"x": np.full(shape, 0.1, np.float32)})[0])
    expected = 2**25 / len(got) * np.float64(np.float32(0.1))
    assert np.abs(got / expected - 1).max() <= 1e-6


@pytest.mark.parametrize("known", ["all", "some", "rank", "none"])
@pytest.mark.parametrize(("data_format", "shape"), SMALL)
def test_every_shape(rng: np.random.Generator, data_format: str, shape: tuple[int, ...], known: str) -> None:
    """Lengths that are prime, one or zero, and what conversion knows of them."""
    x = rng.integers(-9, 9, shape).astype(np.float32)
    lengths = {"all": shape, "some": [None, *shape[1:]], "rank": [None] * len(shape), "none": None}[known]
    (got,) = outputs(ob.use_kernels(model(data_format, lengths), "onnx"), {"x": x}).values()
    np.testing.assert_array_equal(got, x.sum(axis=others(data_format, x.ndim)))
