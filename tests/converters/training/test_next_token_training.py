"""Training by the loss of a next token in blocks: what a step computes, accumulation, evaluation, beside PyTorch."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.loops.rows import ROWS
from onnx_backprop.converters.training.split import step_alone
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.training.reports.history import TokenLoss
from tests.support.linear_heads import CLASSES, KINDS, WIDTH, head, next_token
from tests.support.numeric import outputs


def test_the_model_for_evaluation_computes_no_gradient(rng) -> None:
    graph = ob.training_graph(head("bias", rng), loss=ob.losses.NextToken(block_rows=3), optimizer="adamw")
    (loop,) = [node for node in graph.model.graph.node if node.op_type == "Loop"]
    assert len(loop.output) == 1 + 2 + 1  # w and b added up, rows of h stacked
    assert not any(node.op_type == "Mul" and loop.output[1] in node.input for node in graph.model.graph.node)
    (loop,) = [node for node in graph.eval_model().graph.node if node.op_type == "Loop"]
    assert (len(loop.output), len(loop.input)) == (1, 3)
    assert not any(node.op_type == "ScatterElements" for node in all_nodes([loop]))
    assert "added" not in json.loads(next(e.value for e in loop.metadata_props if e.key == ROWS))
    onnx.checker.check_model(graph.eval_model())
    assert not any(node.op_type == "Loop" for node in graph.inference_model().graph.node)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_computes_no_logits(rng, kind: str) -> None:
    """What they are compared with has the shape of what the product reads."""
    graph = ob.training_graph(head(kind, rng), loss=ob.losses.NextToken(block_rows=3), optimizer="adamw")
    assert "y" in {name for node in graph.model.graph.node for name in node.output}
    computed = {name for node in step_alone(graph, graph.model).graph.node for name in node.output}
    assert "h" in computed
    assert computed.isdisjoint({"y", "a", "d", "r"})
    trainer = ob.Trainer(graph)
    x, labels = rng.standard_normal((2, 3, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 3))
    assert trainer.step(x=x, labels=labels) > 0
    assert trainer.predict(x=x, labels=labels)["y"].shape == (2, 3, CLASSES)
    with pytest.raises(ob.InvalidArgumentError, match="must have the shape of 'y'|expected the shape"):
        trainer.step(x=x, labels=labels.reshape(3, 2))


def test_what_is_computed_in_blocks_by_default(rng) -> None:
    def blocks(shape: str, classes: int, more: str = "y = MatMul(x, w)") -> dict[str, int]:
        model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
            g (float[{shape}, 2] x) => (float[{shape}, {classes}] y) {{ {more} }}""")
        model.graph.node[0].name = "head"
        values = numpy_helper.from_array(rng.standard_normal((2, classes), np.float32), "w")
        model.graph.initializer.append(values)
        return ob.training_graph(model, loss="next_token").options.blocks

    assert blocks("1, 4", 1000) == {}
    assert blocks("1, 1024", 1024) == {"head": 2**14}
    assert blocks("B, T", 5000) == {"head": 2**24 // 5000}
    assert blocks("B, T", 200_000) == {"head": 128}
    assert blocks("B, T", 4000) == {}
    assert blocks("B, T", 5000, "a = MatMul(x, w) y = Relu(a)") == {}
    assert "head in blocks of 3355 rows" in ob.training_graph(
        parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[B, T, 2] x) => (float[B, T, 5000] y)
            <float[2, 1] one = {1, 2}, int64[2] n = {2, 5000}> { w = Expand(one, n) y = MatMul(x, w) }"""),
        loss="next_token", trainable=["one"],
    ).summary().replace("'", "").replace("node_MatMul_1", "head").replace("y in", "head in")  # fmt: skip


def test_accumulation_divides_by_the_tokens_of_all_batches(rng) -> None:
    """Three batches, one of them without a token that counts, are one of all rows."""
    model = head("bias", rng)
    x, labels = rng.standard_normal((6, 5, WIDTH), np.float32), rng.integers(0, CLASSES, (6, 5))
    labels[0, 1:4] = labels[1] = labels[2:4] = -100
    for rows in (0, 3):
        results = []
        for batches, count in (((slice(0, 2), slice(2, 4), slice(4, 6)), 3), ((slice(0, 6),), 1)):
            optimizer = ob.optimizers.SGD(accumulate=count)
            graph = ob.training_graph(model, loss=ob.losses.NextToken(block_rows=rows), optimizer=optimizer)
            trainer = ob.Trainer(graph, learning_rate=0.5)
            for _ in range(2):
                for batch in batches:
                    trainer.step(x=x[batch], labels=labels[batch])
            assert trainer.updates == 2
            results.append(trainer.parameters())
        for name in results[0]:
            np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5, atol=1e-6)
    named = ob.training_graph(model, loss={"y": "next_token"}, optimizer=ob.optimizers.SGD(accumulate=3))
    assert any("counted" in name for name in named.updates)
    plain = ob.training_graph(model, loss=2 * ob.losses.NextToken(), optimizer=ob.optimizers.SGD(accumulate=3))
    assert not any("counted" in name for name in plain.updates)  # of a sum of losses it is the mean


def test_evaluation_weighs_tokens_and_gives_perplexity(rng, tmp_path) -> None:
    model = head("bias", rng)
    x, labels = rng.standard_normal((5, 6, WIDTH), np.float32), rng.integers(0, CLASSES, (5, 6))
    labels[0, 1:], labels[3, 2] = -100, -100
    for weights in (None, "w2"):
        graph = ob.training_graph(model, loss=ob.losses.NextToken(block_rows=4, weights=weights), optimizer="sgd")
        feeds = {"x": x, "labels": labels} | ({"w2": rng.random((5, 6), np.float32)} if weights else {})
        trainer = ob.Trainer(graph, learning_rate=0.0)
        whole = trainer.evaluate(feeds)
        parts = trainer.evaluate([{name: a[n : n + 1] for name, a in feeds.items()} for n in range(5)])
        np.testing.assert_allclose(parts, whole, rtol=1e-6)
        assert isinstance(parts, TokenLoss)
        assert parts.perplexity == pytest.approx(math.exp(whole), rel=1e-6)
        kept = labels[:, 1:] != -100
        assert parts.tokens == pytest.approx(feeds["w2"][:, 1:][kept].sum() if weights else kept.sum())
        with pytest.raises(ob.InvalidArgumentError, match="holds no token that counts"):
            trainer.evaluate([{name: a[:1] for name, a in feeds.items()}])
    logged: list[dict[str, Any]] = []
    records = trainer.fit([feeds], 1, evaluation=[feeds], log=logged.append)
    assert records[-1].perplexity == pytest.approx(math.exp(records[-1].evaluation))
    assert logged[-1]["perplexity"] == records[-1].perplexity
    trainer.fit([feeds], 2, evaluation=[feeds], log=tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text().splitlines()[0].endswith(",perplexity")


def test_labels_are_the_input_ids_themselves(rng) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (int64[B, T] input_ids) => (float[B, T, {CLASSES}] y) {{
            h = Gather(e, input_ids) wt = Transpose<perm = [1, 0]>(e) y = MatMul(h, wt) }}""")
    e = rng.standard_normal((CLASSES, WIDTH), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(e, "e"))
    loss = ob.losses.NextToken(target="input_ids", block_rows=4)
    trainer = ob.Trainer(ob.training_graph(model, loss=loss, optimizer="sgd"))
    assert trainer.graph.inputs == ("input_ids",)
    ids = rng.integers(0, CLASSES, (3, 4))
    e = e.astype(np.float64)
    np.testing.assert_allclose(trainer.step(ids), next_token(e[ids] @ e.T, ids, loss), rtol=1e-6)


def test_beside_torch_and_transformers(rng) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    model = head("bias", rng)
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    x, labels = rng.standard_normal((3, 6, WIDTH), np.float32), rng.integers(0, CLASSES, (3, 6))
    labels[1, 2:4] = -100
    p = {n: torch.tensor(values[n], dtype=torch.float64, requires_grad=True) for n in ("m", "w", "b")}
    y = torch.tensor(x, dtype=torch.float64) @ p["m"] @ p["w"] + p["b"]
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum"):
            wanted = functional.cross_entropy(
                y[:, :-1].reshape(-1, CLASSES), torch.tensor(labels[:, 1:].reshape(-1)), reduction=reduction,
                label_smoothing=smoothing,
            )  # fmt: skip
            gradients = torch.autograd.grad(wanted, list(p.values()), retain_graph=True)
            loss = ob.losses.NextToken(block_rows=4, reduction=reduction, label_smoothing=smoothing)
            got = outputs(ob.training_graph(model, loss=loss).model, {"x": x, "labels": labels})
            np.testing.assert_allclose(got["loss"], wanted.item(), rtol=1e-6)
            for name, g in zip(p, gradients, strict=True):
                np.testing.assert_allclose(got[f"{name}_grad"], g, rtol=2e-5, atol=2e-6)
    utils = pytest.importorskip("transformers.loss.loss_utils")
    counted = int((labels[:, 1:] != -100).sum())
    parts = [utils.ForCausalLMLoss(y[n : n + 1], torch.tensor(labels[n : n + 1]), CLASSES, num_items_in_batch=counted)
             for n in range(3)]  # fmt: skip
    gradients = torch.autograd.grad(sum(parts), list(p.values()))
    optimizer = ob.optimizers.SGD(accumulate=3)
    trainer = ob.Trainer(ob.training_graph(model, loss=ob.losses.NextToken(), optimizer=optimizer), learning_rate=1.0)
    for n in range(3):
        trainer.step(x=x[n : n + 1], labels=labels[n : n + 1])
    for name, g in zip(p, gradients, strict=True):
        np.testing.assert_allclose(values[name] - trainer.parameters()[name], g, rtol=1e-4, atol=1e-5)
