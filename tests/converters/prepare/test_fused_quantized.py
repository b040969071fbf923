"""Weights of a few bits and linear quantisation of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.fused_checks import check_fused, check_gradient, compare, expanded, forward_session, one_node, run

RNG = np.random.default_rng(3)


def packed(k: int, n: int, bits: int, size: int, points: str, dtype: type) -> dict[str, np.ndarray | None]:
    blocks = -(-k // size)
    feeds: dict[str, np.ndarray | None] = {
        "a": RNG.standard_normal((2, 3, k)).astype(dtype),
        "w": RNG.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8),
        "scales": RNG.uniform(0.05, 0.2, (n, blocks)).astype(dtype),
        "points": None,
    }
    if points == "packed":
        feeds["points"] = RNG.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif points == "float":
        feeds["points"] = RNG.uniform(0, 1 << bits, (n, blocks)).astype(dtype)
    return feeds


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("bits", "points"), [(4, ""), (4, "packed"), (4, "float"), (8, ""), (8, "packed"), (2, "")])
@pytest.mark.parametrize(("k", "size"), [(64, 32), (48, 16), (40, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_mat_mul_n_bits(dtype: type, bits: int, points: str, k: int, size: int, bias: bool) -> None:
    feeds = packed(k, 6, bits, size, points, dtype)
    feeds |= {"g_idx": None, "bias": RNG.standard_normal(6).astype(dtype) if bias else None}
    wrt = ["a"]
    if dtype == np.float16:
        wrt = []
    constants = [n for n in ("w", "scales", "points", "bias") if feeds[n] is not None]
    settings = {"K": k, "N": 6, "bits": bits, "block_size": size, "constants": constants}
    tolerance = 1e-4 if dtype == np.float32 else 3e-2
    check_fused("MatMulNBits", feeds, wrt, tolerance=tolerance, **settings)


def test_the_gradient_by_scales_bias_and_float_zero_points() -> None:
    feeds = packed(48, 6, 4, 16, "float", np.float32)
    feeds |= {"g_idx": None, "bias": RNG.standard_normal(6).astype(np.float32)}
    model = one_node("MatMulNBits", feeds, K=48, N=6, bits=4, block_size=16)  # onnxruntime asks for the bias's length
    check_gradient(model, {n: x for n, x in feeds.items() if x is not None}, ["a", "scales", "points", "bias"])


REFUSED = [
    ({"weight_prepacked": 1}, "weight_prepacked=0"),
    ({"bits": 3}, "2, 4 and 8 bits are handled, got 3"),
    ({"some_day": 1}, "the attribute 'some_day' is not handled"),
]


@pytest.mark.parametrize(("more", "sentence"), REFUSED)
def test_what_mat_mul_n_bits_refuses(more, sentence: str) -> None:
    feeds = packed(32, 6, 4, 16, "", np.float32)
    settings = {"K": 32, "N": 6, "bits": 4, "block_size": 16, **more}
    model = one_node("MatMulNBits", feeds, constants=["w", "scales"], **settings)
    with pytest.raises(UnsupportedError, match=f"com.microsoft::MatMulNBits .*{sentence}") as error:
        ob.backward(model, wrt=["a"])
    assert "'node'" in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(("bits", "width", "size"), [(4, 40, 16), (4, 32, 32), (8, 24, 16), (2, 40, 32)])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_gather_block_quantized(
    dtype: type, points: bool, bits: int, width: int, size: int, shape: tuple[int, ...]
) -> None:
    blocks = -(-width // size)
    feeds: dict[str, np.ndarray | None] = {
        "q": RNG.integers(0, 256, (5, width * bits // 8)).astype(np.uint8),
        "ids": RNG.integers(-5, 5, shape),
        "scales": RNG.uniform(0.05, 0.2, (5, blocks)).astype(dtype),
        "points": RNG.integers(0, 256, (5, -(-blocks * bits // 8))).astype(np.uint8) if points else None,
    }
    constants = ["q", "points"] if points else ["q"]
    tolerance = 1e-6 if dtype == np.float32 else 1e-2
    settings = {"bits": bits, "block_size": size, "constants": constants, "tolerance": tolerance}
    check_fused("GatherBlockQuantized", feeds, ["scales"] if dtype == np.float32 else [], **settings)


@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
@pytest.mark.parametrize("points", [False, True])
def test_gather_block_quantized_of_four_bits(kind: str, points: bool) -> None:
    low = -8 if kind == "INT4" else 0
    element = getattr(TensorProto, kind)
    lengths = {"q": (5, 40), "z": (5, 3)} if points else {"q": (5, 40)}
    model = one_node("GatherBlockQuantized", {"ids": np.int64([[0, 4], [-2, 4]])}, opset=21, block_size=16)
    model.graph.node[0].input[:] = ["q", "ids", "s", *list(lengths)[1:]]
    for name, dims in lengths.items():
        values = RNG.integers(low, low + 16, dims).reshape(-1)
        model.graph.initializer.append(helper.make_tensor(name, element, dims, values))
    model.graph.initializer.append(numpy_helper.from_array(RNG.uniform(0.1, 1, (5, 3)).astype(np.float32), "s"))
    feeds = {"ids": np.int64([[0, 4], [-2, 4]])}
    compare(run(forward_session(model), feeds), run(forward_session(expanded(model)), feeds), 1e-6)


@pytest.mark.parametrize(("more", "sentence"), [({"gather_axis": 1}, "gather_axis=0"), ({"bits": 3}, "got 3")])
def test_what_gather_block_quantized_refuses(more: dict[str, int], sentence: str) -> None:
    feeds = {"q": np.zeros((5, 8), np.uint8), "ids": np.int64([1]), "scales": np.ones((5, 1), np.float32)}
    model = one_node("GatherBlockQuantized", feeds, constants=["q"], block_size=16, **more)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedError, match=f"com.microsoft::GatherBlockQuantized .*{sentence}"):
        ob.backward(model, wrt=["scales"])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("point", [False, True])
def test_linear_quantisation(dtype: type, axis: int | None, point: bool) -> None:
    shape = () if axis is None else (3,)
    settings = {} if axis is None else {"axis": axis}
    numbers = {"scale": RNG.uniform(0.02, 0.1, shape).astype(np.float32)}
    numbers["point"] = RNG.integers(0, 100, shape).astype(dtype) if point or dtype == np.int8 else None
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    check_fused("QuantizeLinear", {"x": x, **numbers}, **settings)
    q = RNG.integers(0, 100, (2, 3, 4)).astype(dtype)
    check_fused("DequantizeLinear", {"q": q, **numbers}, ["scale"], opset=19, **settings)


def test_qlinear_concat_is_named() -> None:
    """Its first input is a scale, a float, and its result has the type of the zero point: no invalid model."""
    scaled = ["c", "s", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node(
            "QLinearConcat", ["s", "z", "q", "s", "z", "q", "s", "z"], ["c"], "both", domain="com.microsoft", axis=1
        ),
        helper.make_node("DequantizeLinear", scaled, ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, n]) for name, n in (("x", 6), ("y", 12)))
    tensors = [numpy_helper.from_array(np.float32(0.05), "s"), numpy_helper.from_array(np.uint8(128), "z")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets, ir_version=8)
    forward_session(model)  # onnxruntime takes it
    with pytest.raises(ob.UnsupportedOpError, match="com.microsoft::QLinearConcat .it computes in integers.*'both'"):
        ob.backward(model, wrt=["x"], straight_through=True)
    assert "com.microsoft::QLinearConcat" in str(ob.explain_gradients(model))
