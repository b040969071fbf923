"""Weights of a few bits and linear quantisation of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.adjoint import Adjoint, check_adjoints
from tests.support.fused_checks import (
    Fused,
    Kernel,
    check_all_fused,
    check_fused,
    check_gradient,
    check_kernel_gradients,
    forward_session,
    fused,
    one_node,
)

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
def test_mat_mul_n_bits(dtype: type) -> None:
    cases = []
    forms = [(4, ""), (4, "packed"), (4, "float"), (8, ""), (8, "packed"), (2, "")]
    for (bits, points), (k, size), bias in product(forms, [(64, 32), (48, 16), (40, 32)], [False, True]):
        feeds = packed(k, 6, bits, size, points, dtype)
        feeds |= {"g_idx": None, "bias": RNG.standard_normal(6).astype(dtype) if bias else None}
        wrt = [] if dtype == np.float16 else ["a"]
        constants = [n for n in ("w", "scales", "points", "bias") if feeds[n] is not None]
        settings = {"K": k, "N": 6, "bits": bits, "block_size": size, "constants": constants}
        tolerance = 1e-4 if dtype == np.float32 else 3e-2
        cases.append(fused("MatMulNBits", feeds, wrt, tolerance=tolerance, **settings))
    check_all_fused(cases)


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
def test_gather_block_quantized(dtype: type) -> None:
    cases = []
    sizes = [(4, 40, 16), (4, 32, 32), (8, 24, 16), (2, 40, 32)]
    for points, (bits, width, size), shape in product([False, True], sizes, [(), (2, 3)]):
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
        cases.append(fused("GatherBlockQuantized", feeds, ["scales"] if dtype == np.float32 else [], **settings))
    check_all_fused(cases)


FORMS = [
    ((5, 40), 0, -1),
    ((5, 33), -2, 1),
    ((33, 5), 0, 0),
    ((5, 40), 1, 1),
    ((6, 20), 1, 0),
    ((3, 4, 32), 0, 2),
    ((3, 4, 32), 1, 2),
    ((3, 20, 4), 2, 1),
    ((3, 20, 4), 0, 1),
]
_8_BIT_FLOATS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")


def narrow(kind: str, form, points: bool, size: int, *, shared: bool = False, dtype: type = np.float32):
    """A model that reads a table of a narrow type, its feeds: ids and scales."""
    shape, along, blocked = form
    blocks = list(shape)
    blocks[blocked] = -(-shape[blocked] // size) if size else 1
    along = along % len(shape)
    scales = RNG.uniform(0.1, 1, blocks).astype(dtype)
    scales = scales.take([0], axis=along) if shared else scales
    feeds = {"ids": RNG.integers(-shape[along], shape[along], (2, 3)).astype(np.int32 if points else np.int64)}
    feeds["s"] = scales
    settings = {"block_size": size, "gather_axis": form[1], "quantize_axis": blocked}
    model = one_node("GatherBlockQuantized", feeds, opset=21, **settings)
    model.graph.node[0].input[:] = ["q", "ids", "s", *(["z"] if points else [])]
    for name, dims in (("q", shape), *([("z", blocks)] if points else [])):
        low = -8 if kind == "INT4" else 0
        values = RNG.integers(low, low + 16, dims) if "INT" in kind else RNG.standard_normal(dims)
        tensor = helper.make_tensor(name, getattr(TensorProto, kind), dims, values.reshape(-1))
        model.graph.initializer.append(tensor)
    model.graph.output[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model, feeds


def check_narrow(cases, dtype: type = np.float32) -> None:
    """cases: names, with arguments of `narrow`."""
    drawn = {name: narrow(*arguments, dtype=dtype, **settings) for name, arguments, settings in cases}
    tolerance = 1e-6 if dtype == np.float32 else 1e-2
    check_all_fused([Fused(name, *one, tolerance=tolerance) for name, one in drawn.items()])
    if dtype == np.float32:  # y is linear in the scales
        check_adjoints([Adjoint(name, *one, ["s"]) for name, one in drawn.items()])


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT8E5M2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_axis_of_a_table_of_narrow_numbers(kind: str, dtype: type) -> None:
    forms = product(FORMS, (False, True) if kind != "FLOAT8E5M2" else (False,))
    check_narrow([(f"{form} {points}", (kind, form, points, 16), {}) for form, points in forms], dtype)


@pytest.mark.parametrize("kind", _8_BIT_FLOATS)
def test_tables_of_8_bit_floats(kind: str) -> None:
    forms = product([0, 16], [False, True])
    check_narrow([(f"{size} {one}", (kind, FORMS[0], False, size), {"shared": one}) for size, one in forms])


def test_packed_tables_of_three_axes() -> None:
    cases = []
    for bits, points in product([2, 4, 8], [False, True]):
        feeds = {
            "q": RNG.integers(0, 256, (5, 3, 40 * bits // 8)).astype(np.uint8),
            "ids": RNG.integers(-5, 5, (2, 3)),
            "scales": RNG.uniform(0.05, 0.2, (5, 3, 3)).astype(np.float32),
            "points": RNG.integers(0, 256, (5, 3, -(-3 * bits // 8))).astype(np.uint8) if points else None,
        }
        constants = ["q", "points"] if points else ["q"]
        settings = {"bits": bits, "block_size": 16, "quantize_axis": 2, "constants": constants}
        cases.append(fused("GatherBlockQuantized", feeds, ["scales"], tolerance=1e-6, **settings))
    check_all_fused(cases)


NOT_GATHERED = [
    ({"gather_axis": 1}, "gather_axis=0"),
    ({"quantize_axis": 0}, "quantize_axis=-1"),
    ({"bits": 3}, "of uint8, 2, 4"),
]


@pytest.mark.parametrize(("more", "sentence"), NOT_GATHERED)
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


def test_mat_mul_bnb4() -> None:
    """FP4 and NF4."""
    cases, kernels = [], []
    sizes = [(16, 16, 16), (40, 3, 64), (15, 3, 16), (7, 3, 32), (32, 8, 256)]
    for kind, (k, n, size) in product([0, 1], sizes):
        feeds = {
            "a": RNG.standard_normal((2, 3, k) if n == 3 else (k,)).astype(np.float32),
            "w": RNG.integers(0, 256, -(-n * k // 2)).astype(np.uint8),
            "absmax": RNG.uniform(0.1, 1, -(-n * k // size)).astype(np.float32),
        }
        settings = {"N": n, "K": k, "block_size": size, "quant_type": kind, "constants": ["w"]}
        cases.append(fused("MatMulBnb4", feeds, tolerance=1e-5, **settings))
        kernels.append(Kernel("MatMulBnb4", feeds, ["a", "absmax"], settings))
        kernels.append(Kernel("MatMulBnb4", feeds, ["a"], settings, half=True))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


NOT_BNB4 = [({"transB": 0}, "transB=0 is not handled"), ({"quant_type": 2}, "FP4, and 1, NF4, are handled, got 2")]


@pytest.mark.parametrize(("more", "sentence"), NOT_BNB4)
def test_what_mat_mul_bnb4_refuses(more: dict[str, int], sentence: str) -> None:
    feeds = {"a": np.zeros((2, 16), np.float32), "w": np.zeros(128, np.uint8), "absmax": np.ones(16, np.float32)}
    settings = {"N": 16, "K": 16, "block_size": 16, "quant_type": 1, **more}
    model = one_node("MatMulBnb4", feeds, constants=["w", "absmax"], **settings)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(UnsupportedError, match=f"com.microsoft::MatMulBnb4 .*{sentence}"):
        ob.backward(model, wrt=["a"])
