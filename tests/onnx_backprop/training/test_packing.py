"""Packed rows: what is in them, and that a loss of packed texts is that of the texts one by one."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob


@pytest.mark.parametrize("case", range(8))
def test_every_text_is_in_one_row_as_it_was(case: int) -> None:
    rng = np.random.default_rng(case)
    length = int(rng.integers(4, 20))
    texts = [rng.integers(1, 99, rng.integers(1, length + 1)).tolist() for _ in range(30)]
    answers = [[token if rng.random() < 0.7 else -100 for token in text] for text in texts]
    packed = ob.pack(texts, length, labels=answers, pad=0)
    rows = len(packed["input_ids"])
    assert all(array.shape == (rows, length) and array.dtype == np.int64 for array in packed.values())
    pairs = []
    for row in range(rows):
        for segment in range(1, packed["segment_ids"][row].max() + 1):
            at = np.flatnonzero(packed["segment_ids"][row] == segment)
            assert (np.diff(at) == 1).all()
            assert packed["position_ids"][row, at].tolist() == list(range(len(at)))
            assert packed["labels"][row, at[0]] == -100
            pairs.append((packed["input_ids"][row, at].tolist(), packed["labels"][row, at[1:]].tolist()))
    assert sorted(pairs) == sorted((text, answer[1:]) for text, answer in zip(texts, answers, strict=True))
    rest = packed["segment_ids"] == 0
    assert not packed["attention_mask"][rest].any()
    assert packed["attention_mask"].sum() == sum(map(len, texts))
    assert (packed["labels"][rest] == -100).all()
    assert (packed["input_ids"][rest] == 0).all()


def test_a_text_goes_into_the_first_row_with_room() -> None:
    packed = ob.pack([[1] * 6, [2] * 5, [3] * 3, [4] * 4, [5]], 10, pad=9)
    assert packed["input_ids"].tolist() == [[1] * 6 + [3] * 3 + [5], [2] * 5 + [4] * 4 + [9]]


def test_refusals() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="at most 2 tokens, got 3 in text 1. cut=True"):
        ob.pack([[1], [1, 2, 3]], 2)
    assert ob.pack([[1], [1, 2, 3]], 2, cut=True)["input_ids"].tolist() == [[1, 0], [1, 2]]
    for texts, labels in (([], None), ([[]], None), ([[1]], [[1, 2]]), ([[1]], []), ([[0.5]], None), ([[[1]]], None)):
        with pytest.raises(ob.InvalidArgumentError):
            ob.pack(texts, 4, labels=labels)
    with pytest.raises(ob.InvalidArgumentError, match="length"):
        ob.pack([[1]], 0)
    with pytest.raises(ob.InvalidArgumentError, match="Give one of them"):
        ob.packed_bias()
    with pytest.raises(ob.InvalidArgumentError, match="count up from 0"):
        ob.packed_bias(position_ids=np.array([[0, 0, 1, 1]]))
    with pytest.raises(ob.InvalidArgumentError, match=r"segment_ids: expected whole numbers of the shape"):
        ob.packed_bias(np.zeros((1, 4)))
    with pytest.raises(ob.InvalidArgumentError, match="window"):
        ob.packed_bias(np.zeros((1, 4), int), window=0)


@pytest.mark.parametrize("window", [None, 1, 2])
def test_the_mask_against_its_definition(window: int | None) -> None:
    packed = ob.pack([[1] * n for n in (3, 2, 4, 1, 1)], 6)
    segments = packed["segment_ids"]
    mask = ob.packed_bias(segments, window=window, dtype=bool)
    bias = ob.packed_bias(segments, window=window, dtype=np.float16)
    assert bias.dtype == np.float16
    for b, _, i, j in np.ndindex(mask.shape):
        read = j <= i and segments[b, i] == segments[b, j] and (window is None or i - j < window)
        assert mask[b, 0, i, j] == read
        assert bias[b, 0, i, j] == (0 if read else -65504)
    texts = segments > 0
    by_positions = ob.packed_bias(position_ids=packed["position_ids"], window=window, dtype=bool)
    assert (by_positions == mask)[:, 0][texts].all()


def test_a_packed_loss_is_that_of_the_texts_alone(rng) -> None:
    """One layer of attention with positions and a mask: values, and the gradients of all weights."""
    width, classes = 4, 9
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (int64[B, T] input_ids, int64[B, T] position_ids, float[B, 1, T, T] bias) => (float[B, T, {classes}] y)
        <int64[1] one = {{1}}> {{
            a = Gather(e, input_ids) p = Gather(q, position_ids) x = Add(a, p)
            t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) u = Squeeze(bias, one) m = Add(s, u)
            w = Softmax(m) h = MatMul(w, x) y = MatMul(h, v) }}""")
    for name, shape in {"e": (classes, width), "q": (8, width), "v": (width, classes)}.items():
        values = rng.standard_normal(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    texts = [rng.integers(0, classes, n).tolist() for n in (5, 3, 6, 2, 4)]
    totals = []
    for length, rows in ((8, 0), (8, 3), (6, 0)):
        parts = [texts] if length == 8 else [[text] for text in texts]
        graph = ob.training_graph(
            model, loss=ob.losses.NextToken(reduction="sum", block_rows=rows), trainable=["e", "q", "v"]
        )
        session = ob.session(graph.model)
        sums = 0
        for part in parts:
            packed = ob.pack(part, length)
            feeds = {name: packed[name] for name in ("input_ids", "position_ids", "labels")}
            got = session.run(
                [graph.loss, *graph.parameters.values()], feeds | {"bias": ob.packed_bias(packed["segment_ids"])}
            )
            sums = [np.add(a, b) for a, b in zip(sums, got, strict=True)] if sums else got
        totals.append(sums)
    for other in totals[:2]:
        for a, b in zip(other, totals[2], strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)
