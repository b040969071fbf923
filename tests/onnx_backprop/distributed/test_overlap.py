"""Sums beside the backward pass have the bits of sums behind it, begin before its end, and end with a step that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_backprop as ob
from models import resnet, unet_resize
from onnx_backprop.distributed import overlap, replica
from onnx_backprop.opset.core.errors import ReplicaError
from tests.onnx_backprop.distributed.test_equality import Feeds, images, labelled
from tests.onnx_backprop.distributed.threads import Threads, on_ranks


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "BUCKET_BYTES", 512)


CASES: dict[str, tuple[Callable[[], ob.TrainingGraph], Callable[..., Feeds], dict[str, Any]]] = {
    "clipped": (
        lambda: ob.training_graph(
            unet_resize.build(features=2), loss="l1", optimizer=ob.optimizers.AdamW(clip_norm=0.1, ema=0.9)
        ),
        images,
        {},
    ),
    "accumulated": (
        lambda: ob.training_graph(
            unet_resize.build(features=2), loss="mse", optimizer=ob.optimizers.SGD(momentum=0.9, accumulate=3)
        ),
        images,
        {},
    ),
    "standardised": (
        lambda: ob.training_graph(
            resnet.build(features=2, blocks=(1, 1)), loss=ob.losses.SoftmaxCrossEntropy(ignore_index=3), optimizer="sgd"
        ),
        labelled,
        {"sync_batch_norm": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_behind(rng: np.random.Generator, case: str) -> None:
    """Three ranks, of which some have uneven parts, no rows, or no labels that count; a save between two updates."""
    make, draw, settings = CASES[case]
    graph = make()
    batches = [draw(rng, rows) for rows in (5, 5, 2, 2, 5, 5, 2)]
    for batch in batches[1::2] if draw is labelled else ():
        batch["labels"][: len(batch["labels"]) // 2] = 3

    def work(communicator: Threads, *, beside: bool) -> tuple[list[float], list[Feeds], int]:
        trainer = ob.Trainer(graph, learning_rate=0.01, communicator=communicator, overlap=beside, **settings)
        losses, states = [], []
        for n, batch in enumerate(batches):
            losses.append(trainer.step(batch))
            if n in (3, len(batches) - 1):
                states.append(trainer.state())
        return losses, states, len(communicator.began)

    behind, beside = (on_ranks(3, lambda c, chosen=chosen: work(c, beside=chosen)) for chosen in (False, True))
    assert behind[0][2] == 0
    assert beside[0][2] == beside[1][2] == beside[2][2] > 10
    for rank in beside:
        assert rank[0] == behind[0][0]
        for state, expected in zip(rank[1], behind[0][1], strict=True):
            for name, value in expected.items():
                np.testing.assert_array_equal(state[name], value, err_msg=f"{case}, {name}")


@pytest.mark.parametrize("beside", [False, True])
def test_gradients_that_wait(rng: np.random.Generator, tmp_path: Path, *, beside: bool) -> None:
    """A step whose loss is no number leaves them as they were, be it the last of an update or not; loading forgets."""
    optimizer = ob.optimizers.SGD(momentum=0.9, accumulate=2)
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer=optimizer)
    batches = [images(rng, 4) for _ in range(4)]
    wrong = {name: np.full_like(array, np.nan) for name, array in batches[0].items()}

    def trained(communicator: Threads, *, disturbed: bool) -> Feeds:
        trainer = ob.Trainer(graph, learning_rate=0.01, communicator=communicator, overlap=beside)
        if disturbed:
            trainer.save(tmp_path / "first.safetensors")
            trainer.step(batches[3])
            trainer.load(tmp_path / "first.safetensors")
        for batch in batches:
            if disturbed:
                with pytest.raises(FloatingPointError, match="the loss is nan"):
                    trainer.step(wrong)
            trainer.step(batch)
        return trainer.state()

    (whole, _), (state, _) = (on_ranks(2, lambda c, d=d: trained(c, disturbed=d)) for d in (False, True))
    for name, value in whole.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_sums_begin_before_the_backward_pass_ends(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for shapes whose kernels may not be compiled: that run may take place twice."""
    graph = ob.training_graph(resnet.build(features=16), loss="softmax_cross_entropy", optimizer="sgd")
    batch = labelled(rng, 16)
    monkeypatch.setattr(replica, "BUCKET_BYTES", 2**18)

    def work(communicator: Threads) -> list[int]:
        ends: list[float] = []
        trainer = ob.Trainer(graph, communicator=communicator)
        assert trainer._ranks is not None
        session = trainer._ranks.replica._session
        once = session.run_with_iobinding

        def timed(*arguments: Any) -> None:
            once(*arguments)
            ends.append(time.perf_counter())

        monkeypatch.setattr(session, "run_with_iobinding", timed)
        early = []
        for n in range(4):
            communicator.began.clear()
            trainer.step(batch)
            end = ends.pop() if ends else 0.0
            early.append(sum(began < end for began in communicator.began))
            assert len(communicator.began) > 2
            assert (n == 0) == (end == 0)
        return early

    for early in on_ranks(2, work):
        assert early[0] == 0
        assert max(early[1:]) > 0, early


def test_a_step_that_fails_sends_no_more(rng: np.random.Generator) -> None:
    """Where it fails on every rank, and somebody goes on, the trainer refuses: sums may be under way."""
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer="sgd")
    batch = images(rng, 4)

    def work(communicator: Threads) -> None:
        trainer = ob.Trainer(graph, communicator=communicator)
        trainer.step(batch)
        assert trainer._ranks is not None

        def failing(*_: object) -> None:
            raise MemoryError

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(trainer._ranks.replica._session, "run_with_iobinding", failing)
            with pytest.raises(MemoryError):
                trainer.step(batch)
        trainer.step(batch)

    with pytest.raises(ReplicaError, match="a step has failed on this rank while gradients were being summed"):
        on_ranks(2, work)


def test_what_an_engine_raises_is_raised(rng: np.random.Generator) -> None:
    class Broken(Threads):
        def start(self, array: np.ndarray) -> Callable[[], bool]:
            raise OSError(f"{array.nbytes} bytes are too many")

    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer="sgd")

    def work(communicator: Threads) -> None:
        communicator.__class__ = Broken
        ob.Trainer(graph, communicator=communicator).step(images(rng, 4))

    with pytest.raises(OSError, match="bytes are too many"):
        on_ranks(2, work)


def test_gradients_that_no_run_changes(rng: np.random.Generator) -> None:
    """Constants: onnxruntime writes them before the run, or a sum would be overwritten when it ends."""
    names = [f"w{n}" for n in range(4)]
    nodes = [helper.make_node("Concat", names, ["w"], axis=0), helper.make_node("ReduceSum", ["w"], ["a"], keepdims=0)]
    nodes += [helper.make_node("Mul", ["x", "v"], ["b"]), helper.make_node("ReduceMean", ["b"], ["c"], keepdims=0)]
    nodes += [helper.make_node("Add", ["a", "c"], ["loss"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["N", 300]), ("loss", [])))
    weights = [numpy_helper.from_array(rng.random(300, np.float32), name) for name in (*names, "v")]
    model = helper.make_model(
        helper.make_graph(nodes, "constant", [x], [y], weights),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    graph = ob.training_graph(model, loss=None, optimizer=ob.optimizers.SGD())
    batches = [{"x": rng.random((rows, 300), np.float32)} for rows in (4, 4, 3, 4)]

    def work(communicator: Threads) -> tuple[Feeds, int]:
        trainer = ob.Trainer(graph, communicator=communicator, learning_rate=0.1)
        for batch in batches:
            trainer.step(batch)
        return trainer.parameters(), len(communicator.began)

    before = graph.initial_values()
    for after, sums in on_ranks(2, work):
        assert sums > 12
        for name in names:
            np.testing.assert_allclose(after[name], before[name] - 0.4, atol=1e-6, err_msg=name)


def test_buckets() -> None:
    """Of consecutive gradients, each of the size wanted or more but the last."""
    assert overlap.filled([1, 1, 5, 2, 2, 3, 1], 4) == [(0, 3), (3, 5), (5, 7)]
    assert overlap.filled([9, 1], 4) == [(0, 1), (1, 2)]
    assert overlap.filled([], 4) == []
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in ("c", "a", "b")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "a", "b", "c")]
    model = helper.make_model(helper.make_graph(nodes, "order", values[:1], values[1:]))
    assert overlap.in_order(model, {"a", "b", "c"}) == ["c", "a", "b"]
    assert overlap.announce(model, [["c", "a"], ["b"]]) == ["bucket_ready", "bucket_ready_2"]
    assert [node.output[0] for node in model.graph.node] == ["c", "a", "bucket_ready", "b", "bucket_ready_2"]
