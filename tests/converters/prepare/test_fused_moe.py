"""Mixtures of experts of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.fused_checks import (
    Kernel,
    check_all_fused,
    check_fused,
    check_kernel_gradient,
    check_kernel_gradients,
    fused,
    one_node,
)

RNG = np.random.default_rng(6)
T, H, N, E = 7, 6, 5, 4
STEP = 2e-4  # few numbers pass a corner of relu and clip
GATED = {"activation_type": "swiglu", "swiglu_fusion": 1}
ACTIVATIONS = [
    {},
    {"activation_type": "gelu"},
    {"activation_type": "silu", "use_sparse_mixer": 1},
    {"activation_type": "identity", "activation_alpha": 3.0},
    GATED,
    {**GATED, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7},
]


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def dense(more, *, bias: bool, x: tuple[int, ...] = (T, H)) -> dict[str, np.ndarray | None]:
    rows = N * (2 if more.get("activation_type") == "swiglu" else 1)
    return {
        "x": draw(*x),
        "router": draw(T, E),
        "w1": draw(E, rows, H),
        "b1": draw(E, rows) if bias else None,
        "w2": draw(E, H, N),
        "b2": draw(E, H) if bias else None,
    }


def test_moe() -> None:
    cases, kernels = [], []
    for more, k, normalised in product(ACTIVATIONS, [1, 2, E], [0, 1]):
        if "use_sparse_mixer" in more and k != 2:
            continue  # onnxruntime refuses it
        feeds = dense(more, bias=k != 1, x=(T, H) if normalised else (1, T, H))
        wrt = [name for name, array in feeds.items() if array is not None]
        settings = {"k": k, "normalize_routing_weights": normalised, **more}
        cases.append(fused("MoE", feeds, tolerance=1e-5, **settings))
        kernels.append(Kernel("MoE", feeds, wrt, settings, step=STEP))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


def test_of_equal_experts_the_last_are_chosen() -> None:
    feeds = dense({}, bias=True)
    feeds["router"] = np.float32(
        [[1, 1, 1, 1], [0, 2, 2, 2], [2, 2, 0, 1], [0, 0, 0, 1], [1000, 0, 0, 0], [0, 0, -200, -300], [3, 3, 3, 0]]
    )
    for k in (1, 2, 3):
        check_fused("MoE", feeds, k=k, tolerance=1e-5)


@pytest.mark.parametrize("more", [{"activation_type": "silu"}, {**GATED, "swiglu_limit": 0.7}])
def test_moe_in_float16(more) -> None:
    """onnxruntime casts, having a kernel for float32 alone."""
    feeds = dense(more, bias=True)
    coarse = {name: None if x is None else x.astype(np.float16) for name, x in feeds.items()}
    check_fused("MoE", coarse, k=2, **more)
    check_kernel_gradient("MoE", feeds, list(feeds), k=2, step=STEP, half=True, **more)


def test_weights_in_the_layout_of_before_are_read_as_the_kernel_reads_them() -> None:
    """(E, H, N) and (E, N, H): the numbers in their order, not transposed."""
    feeds = dense({}, bias=True) | {"w1": draw(E, H, N), "w2": draw(E, N, H)}
    check_fused("MoE", feeds, k=2, tolerance=1e-5)
    check_kernel_gradient("MoE", feeds, ["x", "w1", "w2"], k=2, step=STEP)


def packed(more, bits: int, block: int, points: bool, dtype: type = np.float32, *, h: int = 64, inner: int = 32):
    rows = inner * (2 if more.get("activation_type") == "swiglu" else 1)

    def of(n: int, k: int) -> tuple[np.ndarray | None, ...]:
        blocks = -(-k // block) if block else 1
        q = RNG.integers(0, 256, (E, n, k * bits // 8)).astype(np.uint8)
        size = 4 / (1 << bits) / np.sqrt(k)
        scales = (size * RNG.uniform(0.5, 1, (E, n, blocks) if block else (E, n))).astype(dtype)
        shape = (E, n, -(-blocks * bits // 8)) if block else (E, -(-n * bits // 8))
        return q, scales, RNG.integers(0, 256, shape).astype(np.uint8) if points else None

    (q1, s1, z1), (q2, s2, z2) = of(rows, h), of(h, inner)
    feeds = {"x": draw(T, h, dtype=dtype), "router": draw(T, E, dtype=dtype)}
    feeds |= {"q1": q1, "s1": s1, "b1": draw(E, rows, dtype=dtype)}
    feeds |= {"q2": q2, "s2": s2, "b2": draw(E, h, dtype=dtype), "q3": None, "s3": None, "b3": None}
    feeds |= {"z1": z1, "z2": z2, "z3": None, "weights": None}
    settings = {"k": 2, "expert_weight_bits": bits, **({"block_size": block} if block else {}), **more}
    return feeds, settings, ["q1", "q2", *(["z1", "z2"] if points else [])]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime rounds x to 8 bits where the weights have 8, unless told not to."""
    monkeypatch.setenv("ORT_QMOE_CPU_QNBIT_GEMM", "0")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_q_moe(dtype: type) -> None:
    cases, kernels = [], []
    silu = {"activation_type": "silu", "accuracy_level": 4, "weights_prepacked": 0}
    blocks = [(4, 0), (4, 16), (4, 32), (8, 0), (8, 16), (2, 0), (2, 16)]
    for more, (bits, block), points in product([silu, GATED], blocks, [False, True]):
        feeds, settings, constants = packed(more, bits, block, points, dtype)
        settings["constants"] = constants
        cases.append(fused("QMoE", feeds, tolerance=1e-4 if dtype == np.float32 else 2e-2, **settings))
        if dtype == np.float32 and bits != 2:
            wrt = ["x", "router", "s1", "b1", "s2", "b2"]
            kernels.append(Kernel("QMoE", feeds, wrt, settings, half="silu" in more, step=STEP))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


@pytest.mark.usefixtures("exact")
def test_lengths_that_are_no_multiple_of_16() -> None:
    cases, kernels = [], []
    more = {**GATED, "activation_beta": 1.0}  # without a corner
    lengths = [(4, 6, 10), (8, 9, 7), (2, 12, 20), (4, 48, 6), (4, 6, 80)]
    for (bits, h, inner), points in product(lengths, [False, True]):
        feeds, settings, constants = packed(more, bits, 0, points, h=h, inner=inner)
        feeds |= {"x": draw(1, T, h), "b1": None, "b2": None}
        settings["constants"] = constants
        cases.append(fused("QMoE", feeds, tolerance=1e-4, **settings))
        kernels.append(Kernel("QMoE", feeds, ["x", "router", "s1", "s2"], settings, step=STEP))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


def test_weights_beside_the_router() -> None:
    cases, kernels = [], []
    for sign, normalised in product(["any", "positive", "sums of 0"], [0, 1]):
        feeds, settings, constants = packed({"activation_type": "silu"}, 4, 32, False)
        weights = draw(T, E)
        if sign == "positive":
            weights = np.abs(weights) + 0.1
        elif sign == "sums of 0":
            weights[:3] = 0
            weights[3] = [1e-9, 1e-8, 2e-8, 0]
        feeds["weights"] = weights
        settings |= {"normalize_routing_weights": normalised, "constants": constants}
        cases.append(fused("QMoE", feeds, tolerance=1e-4, **settings))
        wrt = ["x", "s1"] if sign == "sums of 0" else ["x", "weights", "s1"]
        step = 2e-4 if normalised else 2e-3
        kernels.append(Kernel("QMoE", feeds, wrt, settings, half=sign == "positive", step=step))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


REFUSED = [
    ("MoE", {"activation_type": "swiglu"}, "swiglu_fusion=1 is handled.* got 0"),
    ("MoE", {"activation_type": "swiglu", "swiglu_fusion": 2}, "swiglu_fusion=1 is handled.* got 2"),
    ("MoE", {**GATED, "swiglu_limit": -1.0}, "'swiglu_limit': expected 0 or more"),
    ("MoE", {**GATED, "swiglu_limit_after_activation": 1}, "swiglu_limit_after_activation is not handled"),
    ("MoE", {"activation_type": "geglu"}, "'geglu' is not handled; relu, gelu, silu, identity and swiglu are"),
    ("MoE", {"k": 0}, "'k': expected a number of 1 or more"),
    ("MoE", {"some_day": 1}, "'some_day' is not handled"),
    ("QMoE", {"activation_type": "swiglu"}, "swiglu_fusion=1 is handled.* got 0"),
    ("QMoE", {"activation_type": "silu", "swiglu_fusion": 1}, "swiglu_fusion is for activation_type='swiglu'"),
    ("QMoE", {"expert_weight_bits": 3}, "2, 4 and 8 bits with quant_type 'int' are handled"),
    ("QMoE", {"quant_type": "nvfp4"}, "2, 4 and 8 bits with quant_type 'int' are handled"),
    ("QMoE", {"fc2_expert_weight_bits": 8}, "one number of bits for all products is handled"),
    ("QMoE", {"weights_prepacked": 1}, "weights_prepacked=0"),
]


@pytest.mark.parametrize(("op_type", "more", "sentence"), REFUSED)
def test_invalid_use_is_refused(op_type: str, more, sentence: str) -> None:
    if op_type == "MoE":
        feeds, settings, constants = dense(more, bias=False), {"k": 2, **more}, []
    else:
        feeds, settings, constants = packed({}, 4, 32, False)
    model = one_node(op_type, feeds, constants=constants, **(settings | more))
    model.graph.output[0].type.tensor_type.elem_type = 1
    with pytest.raises(UnsupportedError, match=f"com.microsoft::{op_type} .*{sentence}") as error:
        ob.backward(model, wrt=["x"])
    assert "'node'" in str(error.value)


@pytest.mark.parametrize("op_type", ["MoE", "QMoE"])
def test_a_third_product_is_refused(op_type: str) -> None:
    feeds, settings, constants = packed({}, 4, 32, False)
    if op_type == "MoE":
        feeds, settings, constants = dense({}, bias=False) | {"w3": draw(E, N, H)}, {"k": 2}, []
    else:
        feeds |= {"q3": feeds["q1"], "s3": feeds["s1"]}
    model = one_node(op_type, feeds, constants=constants, **settings)
    model.graph.output[0].type.tensor_type.elem_type = 1
    with pytest.raises(UnsupportedError, match=f"com.microsoft::{op_type} .*fc3 is not handled"):
        ob.backward(model, wrt=["x"])


def test_what_a_training_graph_trains() -> None:
    """The experts of MoE; of QMoE the biases, not what a quantiser has added."""
    feeds = dense({}, bias=True)
    model = one_node("MoE", feeds, k=2, constants=["w1", "b1", "w2", "b2"])
    assert sorted(ob.training_graph(model, loss="mse").parameters) == ["b1", "b2", "w1", "w2"]
    feeds, settings, constants = packed({}, 4, 32, True)
    model = one_node("QMoE", feeds, constants=[*constants, "s1", "s2", "b1", "b2"], **settings)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'s1' \(256, quantization scale of MatMulNBits"):
        assert sorted(ob.training_graph(model, loss="mse").parameters) == ["b1", "b2"]


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("points", [False, True])
def test_packed_experts_stay_packed(block: int, points: bool) -> None:
    feeds, settings, constants = packed(GATED, 4, block, points)
    model = one_node("QMoE", feeds, constants=[*constants, "s1", "s2", "b1", "b2"], **settings)
    graph = ob.backward(model, wrt=["x", "router"], of=["y0"])
    products = [node.op_type for node in graph.graph.node if node.op_type.startswith("MatMulNBits")]
    assert sorted(products) == ["MatMulNBits"] * 2 + ["MatMulNBitsBackwardData"] * 2
    assert not [node for node in graph.graph.node if node.op_type in ("BitShift", "BitwiseAnd") and not points]
