"""Gradients of Batch-, Group- and InstanceNormalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import SMOOTH, VARIANTS, Case, build, case, check_cases, positive

IMAGES = [(3, 2), (2, 3, 4), (2, 3, 2, 2), (2, 2, 2, 1, 2), (1, 1, 3)]
ENDS = [
    "y = Mul(mean, variance)",
    "y = Identity(mean)",
    "y = Identity(variance)",
    "u = Mul(mean, variance) y = Mul(z, u)",
]


def batch_norm(x: tuple[int, ...], attributes: str = "", **given: Any) -> Case:
    nodes = f"y = BatchNormalization {attributes} (x, s, b, m, v)"
    channels = x[1:2]
    return case(nodes, x=x, s=channels, b=channels, m=channels, v=positive(channels), **given)


def trained(x: tuple[int, ...], attributes: str = "", end: str = "", **given: Any) -> Case:
    name = "z" if end else "y"
    nodes = f"{name}, mean, variance = BatchNormalization <training_mode = 1{attributes}> (x, s, b, m, v) {end}"
    c = x[1:2]
    return case(nodes, x=x, s=c, b=c, m=c, v=positive(c), op="BatchNormalization", oracle=SMOOTH, **given)


def grouped(x: tuple[int, ...], groups: int, **given: Any) -> Case:
    nodes = f"y = GroupNormalization <num_groups = {groups}, epsilon = 0.1> (x, s, b)"
    return case(nodes, x=x, s=x[1:2], b=x[1:2], since=21, oracle=SMOOTH, **given)


CASES = [
    *(batch_norm(x) for x in IMAGES),
    batch_norm((2, 3, 4), "<epsilon = 0.1, momentum = 0.5, training_mode = 0>"),
    *(batch_norm((2, 3, 4), wrt=[name]) for name in "xsbmv"),
    *(trained(x, ", epsilon = 0.1", wrt="xsb") for x in [*IMAGES, (4, 2)]),
    trained((2, 3, 4), wrt="xsb"),
    *(trained((2, 3, 4), ", epsilon = 0.1", wrt=[name]) for name in "xsb"),
    *(trained((2, 3), ", momentum = 0.3", end, wrt="xmv" if end.startswith("y = Mul") else "x") for end in ENDS[:3]),
    trained((3, 2), ", momentum = 0.3, epsilon = 0.1", ENDS[3], wrt="xsbmv"),
    *(
        case("y = InstanceNormalization <epsilon = 0.1> (x, s, b)", x=x, s=x[1:2], b=x[1:2], since=since)
        for x in IMAGES[1:]
        for since in (18, 22)
    ),
    case("y = InstanceNormalization(x, s, b)", x=(2, 3, 4), s=(3,), b=(3,)),
    *(case("y = InstanceNormalization(x, s, b)", x=(2, 3, 4), s=(3,), b=(3,), wrt=[name]) for name in "xsb"),
    *(
        grouped(x, groups)
        for x, groups in [((2, 4, 3), 2), ((1, 6, 2, 2), 3), ((2, 3, 4), 1), ((2, 3, 4), 3), ((3, 4), 2)]
    ),
    *(grouped((2, 4, 3), 2, wrt=[name]) for name in "xsb"),
    case("y = GroupNormalization <num_groups = 2, stash_type = 1> (x, s, b)", x=(2, 4, 3), s=(4,), b=(4,), since=21,
         oracle=SMOOTH),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_group_normalization_of_opset_18_has_a_scale_per_group() -> None:
    """The operator is deprecated in that version, which the checker calls an error; onnxruntime runs it."""
    per_channel, feeds, wrt = build(grouped((2, 4, 3), 2), opset=21)
    dy = positive((2, 4, 3))
    gain, shift = np.float32([0.5, -1.5]), np.float32([0.25, 2])
    repeated = feeds | {"s": np.repeat(gain, 2), "b": np.repeat(shift, 2)}
    want = ob.session(ob.backward(per_channel, wrt=wrt)).run(None, {**repeated, "y_grad": dy})
    old = onnx.ModelProto()
    old.CopyFrom(per_channel)
    old.opset_import[0].version = 18
    for value in old.graph.input[1:]:
        value.type.tensor_type.shape.dim[0].dim_value = 2
    got = ob.session(ob.backward(old, wrt=wrt)).run(None, {"x": feeds["x"], "s": gain, "b": shift, "y_grad": dy})
    y, dx, ds, db = (np.asarray(v) for v in want)
    expected = [y, dx, ds.reshape(2, 2).sum(1), db.reshape(2, 2).sum(1)]
    for have, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(have), wanted, rtol=1e-5, atol=1e-6)
