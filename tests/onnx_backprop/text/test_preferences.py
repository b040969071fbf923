"""Direct preference optimisation: the loss against its formula in float64, its gradient against differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.text import IGNORED, ModelFolder, Tokens, projections
from onnx_backprop.text.preferences import Pair, PairBatches, preference_loss, read_pairs

FOLDER = Path(__file__).parents[2] / "data" / "text"
BETA = 0.7
pytestmark = pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")  # that the file is a decoder


def pairs() -> list[Pair]:
    rng = np.random.default_rng(0)

    def answer(prompt: np.ndarray, length: int) -> Tokens:
        ids = np.concatenate([prompt, rng.integers(5, 320, length)])
        return Tokens(ids, np.where(np.arange(len(ids)) < len(prompt), IGNORED, ids))

    prompts = [rng.integers(5, 320, n) for n in (3, 5, 2, 4, 9)]
    return [(answer(prompt, 3 + n), answer(prompt, 6 - n)) for n, prompt in enumerate(prompts)]


def a_training(rate: float = 1e-2, *, rounds: bool = True) -> tuple[ob.Trainer, PairBatches, ob.TrainingGraph]:
    """rounds: whether products round what they read to 8 bits, as the file says."""
    base = onnx.load(FOLDER / "model.onnx")
    for node in base.graph.node:
        assign(node.attribute, [a for a in node.attribute if rounds or a.name != "accuracy_level"])
    adapted = ob.lora(base, projections(FOLDER / "model.onnx"), rank=4, alpha=8)
    graph = ob.training_graph(
        adapted.model, loss=preference_loss(BETA), trainable=adapted.trainable, optimizer=ob.optimizers.SGD()
    )
    batches = PairBatches(pairs(), 3, length=32, names=[*graph.inputs, *graph.optional], shuffle=False)
    trainer = ob.Trainer(graph, learning_rate=rate)
    rng = np.random.default_rng(1)  # away from the base, where B is zero
    trainer.set_state({n: v + 0.1 * rng.standard_normal(v.shape) for n, v in trainer.parameters().items()})
    return trainer, batches, graph


def log_p(trainer: ob.Trainer, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Of each answer, token by token."""
    y = trainer.predict(batch)["logits"].astype(np.float64)
    result = []
    for row, labels in zip(y, batch["labels"], strict=True):
        total = 0.0
        for n, label in enumerate(labels[1:]):
            if label != IGNORED:
                total += row[n][label] - np.log(np.exp(row[n]).sum())
        result.append(total)
    return np.array(result)


def test_loss_and_reference_are_those_of_the_formula() -> None:
    trainer, batches, _ = a_training()
    assert [{name: value.shape for name, value in batch.items()} for batch in batches] == [
        {"input_ids": (6, 16), "labels": (6, 16), "attention_mask": (6, 16), "reference": (3,)},
        {"input_ids": (4, 16), "labels": (4, 16), "attention_mask": (4, 16), "reference": (2,)},
    ]
    batches.refer(trainer)
    for batch in batches:
        p = log_p(trainer, batch)
        np.testing.assert_allclose(batch["reference"], p[::2] - p[1::2], rtol=1e-5, atol=1e-5)
        assert trainer.evaluate(batch) == pytest.approx(np.log(2), rel=1e-6), "as good as the model before training"
        moved = batch | {"reference": batch["reference"] - np.array([1.5, -0.5, 0.25], np.float32)[: len(p) // 2]}
        margin = BETA * (p[::2] - p[1::2] - moved["reference"])
        assert trainer.evaluate(moved) == pytest.approx(float(np.mean(np.log1p(np.exp(-margin)))), rel=1e-5)


def test_its_gradient_is_that_of_differences_of_the_forward() -> None:
    trainer, batches, _ = a_training(rate=1.0, rounds=False)
    batch = next(iter(batches))
    before = trainer.parameters()
    trainer.step(batch)
    gradient = {name: before[name].astype(np.float64) - value for name, value in trainer.parameters().items()}
    rng = np.random.default_rng(2)
    direction = {name: rng.standard_normal(value.shape) for name, value in before.items()}
    ends = []
    for sign in (1, -1):
        trainer.set_state({name: value + sign * 1e-3 * direction[name] for name, value in before.items()})
        ends.append(trainer.evaluate(batch))
    expected = sum(float(np.sum(gradient[name] * direction[name])) for name in before)
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(expected, rel=2e-3)
    assert abs(expected) > 1e-2


def test_training_prefers_the_chosen_answers() -> None:
    trainer, batches, _ = a_training(rate=0.1)
    batches.refer(trainer)
    trainer.fit(batches, epochs=10)
    for batch in batches:
        p = log_p(trainer, batch)
        assert (p[::2] - p[1::2] > batch["reference"]).all()


def test_invalid_use_is_refused() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="beta: expected a number above 0, got 0"):
        preference_loss(0)
    with pytest.raises(ob.InvalidArgumentError, match="pairs: pair 5 is longer than 13 tokens"):
        PairBatches(pairs(), 2, length=13, names=["input_ids", "labels", "reference"])


def test_lines(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    tokenizer, file = ModelFolder(FOLDER).tokenizer(), tmp_path / "pairs.jsonl"
    chat = {"prompt": [{"role": "user", "content": "x"}]}
    chat |= {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    file.write_text("\n".join(map(json.dumps, [{"prompt": "a", "chosen": "b", "rejected": "c"}, chat])))
    texts = [
        [tokenizer.decode(one.labels[one.labels != IGNORED]) for one in pair] for pair in read_pairs(file, tokenizer)
    ]
    assert texts == [["b", "c"], ["chosen\n", "rejected\n"]]
    file.write_text('{"prompt": "a", "chosen": "b"}')
    with pytest.raises(ob.InvalidArgumentError, match=r"line 1: expected \{\"prompt\": …, \"chosen\""):
        read_pairs(file, tokenizer)
