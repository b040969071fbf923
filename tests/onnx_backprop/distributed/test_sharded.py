"""An update divided among the ranks has the bits of one that every rank makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from models import resnet, unet_conv_transpose, unet_resize
from onnx_backprop.training.checkpoint import read_checkpoint
from onnx_backprop.training.reports.profiling import profile
from tests.onnx_backprop.distributed.test_equality import Feeds, images, labelled
from tests.onnx_backprop.distributed.threads import Threads, on_ranks

GROUPS = [
    ob.optimizers.Group(parameters=["Conv_1.*"], frozen=True),
    ob.optimizers.Group(parameters=["*.bias"], rate=0.5, weight_decay=0.0),
]
CASES: dict[str, tuple[Callable[[], ob.TrainingGraph], Callable[..., Feeds], str, int]] = {
    "in place": (
        lambda: ob.training_graph(
            unet_resize.build(features=2), loss="l1", optimizer=ob.optimizers.AdamW(clip_norm=0.1, groups=GROUPS)
        ),
        images,
        "native",
        3,
    ),
    "running means": (
        lambda: ob.training_graph(
            unet_conv_transpose.build(features=2),
            loss="bce_with_logits",
            optimizer=ob.optimizers.Adam(clip_value=0.01, ema=0.9),
            gradient_norms=True,
        ),
        images,
        "native",
        2,
    ),
    "accumulated": (
        lambda: ob.training_graph(
            resnet.build(features=2, blocks=(1,)),
            loss="softmax_cross_entropy",
            optimizer=ob.optimizers.RMSProp(momentum=0.9, accumulate=2, ema=0.9, clip_norm=1),
        ),
        labelled,
        "onnx",
        5,
    ),
    "scaled": (
        lambda: ob.training_graph(
            unet_resize.build(features=2), loss="mse", optimizer=ob.optimizers.Lion(clip_norm=1), precision="fp16"
        ),
        images,
        "onnx",
        2,
    ),
}


class Gathering(Threads):
    """With an exchange of its own."""

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> None:
        shown = self._shown(array)
        self.barrier()
        for rank, end in enumerate(ends):
            start = ends[rank - 1] if rank else 0
            array[start:end] = shown[rank][start:end]


@pytest.mark.parametrize("case", CASES)
def test_same_bits(rng: np.random.Generator, tmp_path: Path, case: str) -> None:
    """Losses, norms, weights, moments, running means, what is exported; after a checkpoint on another number too."""
    make, draw, kernels, size = CASES[case]
    graph = make()
    batches = [draw(rng, rows) for rows in (5, 8, 3, 8, 5)]
    ema = graph.copies != {}

    def work(communicator: Threads, *, shard: bool) -> dict[str, Any]:
        communicator.__class__ = Gathering if communicator.size == 2 else Threads
        settings = {"kernels": kernels, "communicator": communicator, "shard_update": shard}
        trainer = ob.Trainer(graph, learning_rate=0.01, verify_every=2, **settings)
        losses = [trainer.step(batch) for batch in batches[:3]]
        if graph.gradient_norms:
            losses += trainer.gradient_norms.values()
        path = tmp_path / f"{case} {shard}.safetensors"
        trainer.save(path)
        communicator.barrier()
        trainer = ob.Trainer(graph, **settings).load(path)
        losses += [trainer.step(batch) for batch in batches[3:]]
        losses += [trainer.evaluate([batches[0], batches[1], batches[2]], ema=ema)]
        trainer.export(tmp_path / f"{case} {shard}.onnx", ema=ema)
        renewed = {f"means of {n}": a for n, a in trainer.parameters(ema=ema).items()}
        return {"losses": np.array(losses), **trainer.state(), **renewed}

    whole, divided = (on_ranks(size, lambda c, chosen=chosen: work(c, shard=chosen)) for chosen in (False, True))
    for rank in divided:
        for name, value in whole[0].items():
            np.testing.assert_array_equal(rank[name], value, err_msg=f"{case}, {name}")
    written = [
        (tmp_path / f"{case} {shard}{end}").read_bytes() for end in (".onnx", ".safetensors") for shard in (False, True)
    ]
    assert written[0] == written[1]
    assert written[2] == written[3]


OPTIMIZERS: dict[str, tuple[ob.optimizers.Optimizer, float]] = {  # rounding after a step on another number of ranks
    "onnx": (ob.optimizers.SGD(momentum=0.9, clip_norm=0.1, accumulate=2, ema=0.9, groups=GROUPS[:1]), 3e-7),
    "native": (ob.optimizers.AdamW(clip_norm=0.1, groups=GROUPS), 1e-5),  # that of gradients which are nearly 0
}


def check_checkpoints(folder: Path, kernels: str, sizes: Sequence[int]) -> None:
    """What each number of ranks has written, the update divided or not, each other one reads, and goes on with.

    With accumulation it is written in the middle of an update. Some parameters are frozen, so that tensors lie across
    the ends of parts.
    """
    optimizer, rounding = OPTIMIZERS[kernels]
    graph = ob.training_graph(unet_resize.build(features=2), loss="l1", optimizer=optimizer)
    rng = np.random.default_rng(0)
    batches = [images(rng, rows) for rows in (5, 8, 3, 4)]
    kinds = [(size, shard) for size in sizes for shard in (False, True) if size > 1 or not shard]
    paths = {kind: folder / f"{kind}.safetensors" for kind in kinds}

    def new_trainer(communicator: Threads, kind: tuple[int, bool]) -> ob.Trainer:
        group = communicator if communicator.size > 1 else None
        return ob.Trainer(graph, learning_rate=1e-3, kernels=kernels, communicator=group, shard_update=kind[1])

    def written(communicator: Threads, kind: tuple[int, bool]) -> Feeds:
        trainer = new_trainer(communicator, kind)
        for batch in batches[:3]:
            trainer.step(batch)
        trainer.save(paths[kind])
        trainer.step(batches[3])
        return trainer.state()

    def read(communicator: Threads, kind: tuple[int, bool]) -> dict[tuple[int, bool], tuple[Feeds, Feeds]]:
        trainer, result = new_trainer(communicator, kind), {}
        for source, path in paths.items():
            loaded = trainer.load(path).state()
            trainer.step(batches[3])
            result[source] = loaded, trainer.state()
        return result

    undisturbed = {kind: on_ranks(kind[0], lambda c, kind=kind: written(c, kind))[0] for kind in kinds}
    saved = {kind: read_checkpoint(path)[0] for kind, path in paths.items()}
    for kind in kinds:
        for results in on_ranks(kind[0], lambda c, kind=kind: read(c, kind)):
            for source, (loaded, after) in results.items():
                about = f"written by {source}, read by {kind} (ranks, update divided)"
                most = 0 if source[0] == kind[0] else rounding
                assert loaded.keys() == saved[source].keys()
                for name, value in loaded.items():
                    np.testing.assert_array_equal(value, saved[source][name], err_msg=f"{name}, {about}")
                    expected = undisturbed[source][name]
                    np.testing.assert_allclose(after[name], expected, rtol=0, atol=most, err_msg=f"{name}, {about}")


@pytest.mark.parametrize("kernels", OPTIMIZERS)
def test_a_checkpoint_is_that_of_any_number_of_ranks(tmp_path: Path, kernels: str) -> None:
    check_checkpoints(tmp_path, kernels, (1, 2))


def test_a_rank_keeps_a_part(rng: np.random.Generator) -> None:
    """Of the moments, evenly whatever the tensors' sizes; and of what is put in their place."""
    graph = ob.training_graph(unet_resize.build(features=4), loss="mse", optimizer="adamw")
    batch = images(rng, 4)
    names = [n for n in graph.fill if n.endswith((".mean", ".square"))]

    def work(communicator: Threads, *, shard: bool) -> tuple[int, Feeds]:
        trainer = ob.Trainer(graph, communicator=communicator, shard_update=shard)
        trainer.set_state({name: np.full_like(a, 0.5) for name, a in trainer.state().items() if a.dtype == np.float32})
        trainer.step(batch)
        if communicator.rank == 0:
            assert profile(trainer, batch, steps=1).nodes  # without the others
        return sum(trainer._buffers.state[name].numpy().size for name in names), trainer.state()

    whole, state = on_ranks(3, lambda c: work(c, shard=False))[0]
    parts = on_ranks(3, lambda c: work(c, shard=True))
    assert sum(held for held, _ in parts) == whole
    assert max(held for held, _ in parts) < whole / 3 + 100
    for name, value in state.items():
        np.testing.assert_array_equal(parts[2][1][name], value, err_msg=name)
