"""Attention and its gradient: loops and differences, blocks and panels, masks, PyTorch's own where it is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.ort_ops.attention.blocks import KEYS, QUERIES
from onnx_backprop.ort_ops.native_table import KERNELS as KERNELS_OF_OURS
from onnx_backprop.ort_ops.runtime.bridge import Request
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS
from tests.support import single_op
from tests.support.checks import evaluate_all

FORWARD, BACKWARD = "AttentionForwardTraining", "AttentionBackward"
f32 = np.float32
Inputs = list[np.ndarray | None]


def naive(attributes: dict[str, Any], q, k, v, bias=None, lengths=None, sinks=None, offsets=None) -> np.ndarray:
    """One query after the other, after the text."""
    (batch, heads, queries, size), (shared, keys) = q.shape, k.shape[1:3]
    scale, cap = attributes.get("scale") or size**-0.5, attributes.get("softcap", 0.0)
    left, right = attributes.get("window_left", -1), attributes.get("window_right", -1)
    right = 0 if attributes.get("is_causal") else right
    y = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(batch, heads, queries):
        count = keys if lengths is None else max(0, min(keys, int(lengths[b])))
        at = i + (count - queries if attributes.get("diagonal_alignment", "BOTTOM_RIGHT") == "BOTTOM_RIGHT" else 0)
        at = at if offsets is None else i + int(offsets[b])
        weights, total = np.zeros(keys), 0.0 if sinks is None else np.exp(sinks[h])
        for j in range(count):
            if (left >= 0 and j < at - left) or (right >= 0 and j > at + right):
                continue
            s = float(q[b, h, i] @ k[b, h * shared // heads, j]) * scale
            s = cap * np.tanh(s / cap) if cap else s
            if bias is not None:
                s += np.broadcast_to(bias, (batch, heads, queries, keys))[b, h, i, j]
            weights[j] = np.exp(s)
        total += weights.sum()
        y[b, h, i] = weights @ v[b, h * shared // heads] / total if total else 0
    return y


CASES: list[dict[str, Any]] = [
    {},
    {"is_causal": 1},
    {"is_causal": 1, "diagonal_alignment": "TOP_LEFT", "window_left": 1, "given": "lengths"},
    {"window_left": 2, "window_right": 1, "softcap": 1.5, "given": "bias lengths"},
    {"scale": 0.3, "given": "bias sinks"},
    {"is_causal": 1, "softcap": 0.75, "given": "bias lengths sinks offsets"},
]


def inputs_of(given: str, seed: int = 0, dtype: Any = np.float64) -> Inputs:
    rng = np.random.default_rng(seed)
    batch, heads, shared, queries, keys, size, width = 2, 4, 2, 3, 5, 4, 3
    shapes = [(batch, heads, queries, size), (batch, shared, keys, size), (batch, shared, keys, width)]
    bias = rng.standard_normal((1, heads, queries, keys)) if "bias" in given else None
    lengths = np.array([4, 2]) if "lengths" in given else None
    sinks = rng.standard_normal(heads) if "sinks" in given else None
    offsets = np.array([1, -1]) if "offsets" in given else None
    arrays = [rng.standard_normal(shape) for shape in shapes]
    optional = [
        None if x is None else x.astype(dtype) if x.dtype.kind == "f" else x for x in (bias, lengths, sinks, offsets)
    ]
    return [*(x.astype(dtype) for x in arrays), *optional]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_against_loops_and_their_differences(case: dict[str, Any]) -> None:
    attributes = {name: value for name, value in case.items() if name != "given"}
    inputs = inputs_of(case.get("given", ""), dtype=f32)
    wide = [None if x is None else x.astype(np.float64) for x in inputs]
    y, logarithm = evaluate_all(FORWARD, attributes, inputs)
    np.testing.assert_allclose(y, naive(attributes, *wide), rtol=0, atol=1e-6)
    dy = np.random.default_rng(9).standard_normal(y.shape).astype(f32)
    grads = evaluate_all(BACKWARD, attributes, [dy, *inputs[:3], y, logarithm, *inputs[3:]])
    step = 1e-5
    for n, got in zip((0, 1, 2, 3, 5), grads, strict=True):
        value = wide[n]
        if value is None:
            assert got.shape == (0,)
            continue
        expected = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * step
                ends.append(
                    float((naive(attributes, *[moved if m == n else x for m, x in enumerate(wide)]) * dy).sum())
                )
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * max(1, np.abs(expected).max()), err_msg=str(n))


def random_call(seed: int, *, queries: int, keys: int, **attributes: Any) -> tuple[dict[str, Any], Inputs]:
    """Several blocks; numbers are exact in no type, so that float16 is not compared."""
    rng = np.random.default_rng(seed)
    heads, shared, size, width = (int(rng.choice(n)) for n in ((2, 4), (1, 2), (8, 17, 33), (5, 16, 40)))
    batch = int(rng.integers(1, 3))
    shapes = [(batch, heads, queries, size), (batch, shared, keys, size), (batch, shared, keys, width)]
    inputs: Inputs = [rng.standard_normal(shape).astype(f32) for shape in shapes]
    bias = np.where(rng.random((1, 1, queries, keys)) < 0.5, 0, -np.inf).astype(f32)
    bias[..., : keys // 2] = rng.choice(np.array([0, -np.inf, np.finfo(f32).min]))  # blocks that nobody sees
    bias[:, :, queries // 2, :] = -np.inf
    lengths = rng.integers(0, keys + 1, batch)
    sinks = rng.standard_normal(heads).astype(f32)
    return attributes, [*inputs, *(x if rng.random() < 0.5 else None for x in (bias, lengths, sinks))]


@pytest.mark.parametrize("seed", range(12))
def test_blocks(seed: int) -> None:
    """Around the sizes of blocks and panels, every output; native and standard operators against the reference."""
    rng = np.random.default_rng(seed)
    queries = int(rng.choice([QUERIES - 1, QUERIES, QUERIES + COLUMNS + 1, COLUMNS, 3]))
    keys = int(rng.choice([KEYS - 1, KEYS, 2 * KEYS + 5, 1]))
    choices = {"is_causal": [0, 1], "window_left": [-1, -1, 0, 50], "softcap": [0.0, 3.0], "window_right": [-1, 20]}
    drawn = {name: type(options[0])(rng.choice(options)) for name, options in choices.items()}
    attributes, inputs = random_call(seed, queries=queries, keys=keys, **drawn)
    y, logarithm = evaluate_all(FORWARD, attributes, inputs)
    dy = rng.standard_normal(y.shape).astype(f32)
    behind: Inputs = [dy, *inputs[:3], y, logarithm, *inputs[3:]]
    while behind[-1] is None:
        behind.pop()
    forward = inputs[: len(behind) - 3]
    for op, given in ((FORWARD, forward), (BACKWARD, behind)):
        expected = evaluate_all(op, attributes, given)
        for kernels in ("native", "onnx"):
            session = ob.session(single_op.model(op, attributes, given), kernels=kernels)
            for got, want in zip(session.run(None, single_op.feeds(op, given)), expected, strict=True):
                scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
                np.testing.assert_allclose(
                    np.asarray(got), want, rtol=0, atol=2e-5 * scale, strict=True, err_msg=f"{op} {kernels}"
                )


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_queries_and_heads_of_no_size(kernels: str) -> None:
    q, k, v = np.ones((1, 1, 0, 2), f32), np.ones((1, 1, 3, 2), f32), np.ones((1, 1, 3, 2), f32)
    y, logarithm = ob.session(single_op.model(FORWARD, {}, [q, k, v]), kernels=kernels).run(
        None, single_op.feeds(FORWARD, [q, k, v])
    )
    assert np.asarray(y).shape == (1, 1, 0, 2)
    assert np.asarray(logarithm).shape == (1, 1, 0)
    dq, dk, dv, *_ = single_run(BACKWARD, [y, q, k, v, y, logarithm], kernels)
    assert dq.shape == q.shape
    np.testing.assert_array_equal([dk, dv], 0)


def single_run(op: str, inputs: Inputs, kernels: str, **attributes: Any) -> list[np.ndarray]:
    session = ob.session(single_op.model(op, attributes, inputs), kernels=kernels)
    return [np.asarray(x) for x in session.run(None, single_op.feeds(op, inputs))]


def test_nan_in_a_mask_is_no_hidden_key() -> None:
    q, k, v = (np.ones((1, 1, 40, 4), f32) for _ in range(3))
    bias = np.full((1, 1, 40, 40), -np.inf, f32)
    bias[0, 0, 3, 5] = np.nan
    y, _ = single_run(FORWARD, [q, k, v, bias], "native")
    assert np.isnan(y[0, 0, 3]).all()
    np.testing.assert_array_equal(y[0, 0, [0, 39]], 0)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_memory_is_linear_in_the_length(op: str) -> None:
    """Marks of a mask, a word for 96 keys of 32 queries, are the least part of it."""
    kernel = KERNELS_OF_OURS[NATIVE_PREFIX + op]

    def bytes_of(length: int) -> int:
        tensor, rows = (1, 9, length, 64), (1, 9, length)
        given = [tensor] * 3 if op == FORWARD else [*[tensor] * 5, rows]
        inputs: tuple[Any, ...] = (*given, (1, 1, length, length), None, None, None)
        attributes = Attributes(kernel.op, {})
        outputs = kernel.op.run_shapes(attributes, [None if dims is None else Arg(dims) for dims in inputs])
        return kernel.plan(Request(attributes, 1, inputs, (None,) * len(inputs), outputs)).extra_bytes(2)

    assert bytes_of(16384) <= 2.2 * bytes_of(8192)
    assert bytes_of(16384) <= 9 * 16384 * 4 * 200  # two rows of 64 numbers a key would be 128; scores 16384


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(200, 200), (50, 130)])
def test_as_pytorch(causal: bool, queries: int, keys: int) -> None:
    """PyTorch's diagonal begins at the first key."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    q, k, v, dy = (rng.standard_normal((2, 3, n, 24)).astype(f32) for n in (queries, keys, keys, queries))
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, torch.tensor(dy))]
    attributes = {"is_causal": int(causal), "diagonal_alignment": "TOP_LEFT"}
    ours, logarithm = single_run(FORWARD, [q, k, v], "native", **attributes)
    grads = single_run(BACKWARD, [dy, q, k, v, ours, logarithm], "native", **attributes)
    for got, want in zip([ours, *grads[:3]], expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=2e-5)
