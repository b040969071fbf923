"""Losses of tokens on several ranks: each divides by the tokens of all, whether its logits are in blocks or whole."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.onnx_backprop.distributed.test_equality import check_equal
from tests.onnx_backprop.distributed.threads import on_ranks


def language(rng: np.random.Generator, loss: ob.losses.Loss, accumulate: int = 1) -> ob.TrainingGraph:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[B, T, 4] x) => (float[B, T, 7] y) { h = MatMul(x, m) y = MatMul(h, w) }""")
    for name, shape in {"m": (4, 4), "w": (4, 7)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    return ob.training_graph(model, loss=loss, optimizer=ob.optimizers.SGD(accumulate=accumulate))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("weights", [None, "token_weights"])
def test_tokens_are_counted_over_all_ranks(rng, rows: int, weights: str | None) -> None:
    batches = []
    for count in (5, 3, 2):
        feeds = {"x": rng.standard_normal((count, 4, 4), np.float32), "labels": rng.integers(0, 7, (count, 4))}
        feeds["labels"][:2, 1:] = -100  # all that a rank has
        feeds["labels"][2:, 2] = -100
        batches.append(feeds | ({weights: rng.random((count, 4), np.float32)} if weights else {}))
    batches[2]["labels"][1, 3] = 2
    loss = ob.losses.NextToken(block_rows=rows, weights=weights)
    check_equal(language(rng, loss), batches, (2, 3), kernels="onnx")


def test_accumulation_is_refused(rng) -> None:
    graph = language(rng, ob.losses.NextToken(block_rows=3), accumulate=2)
    with pytest.raises(UnsupportedError, match="Train this graph on one rank"):
        on_ranks(2, lambda c: ob.Trainer(graph, communicator=c))
