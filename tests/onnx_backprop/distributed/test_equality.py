"""Ranks that share a batch come to what one comes to on the whole of it; between themselves, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from models import resnet, unet_conv_transpose, unet_resize
from models.graphs import Network
from onnx_backprop.distributed import Shard
from onnx_backprop.opset.core.errors import ReplicaError
from tests.onnx_backprop.distributed.threads import Threads, on_ranks

Feeds = dict[str, np.ndarray]


def images(rng: np.random.Generator, rows: int, channels: int = 1) -> Feeds:
    image = rng.standard_normal((rows, channels, 8, 8)).astype(np.float32)
    return {"image": image, "target": (image[:, :1] > 0.3).astype(np.float32)}


def labelled(rng: np.random.Generator, rows: int) -> Feeds:
    return {"image": rng.standard_normal((rows, 3, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, rows)}


def frozen_statistics(model: ModelProto) -> ModelProto:
    """BatchNormalization in inference mode, so that rows do not depend on each other."""
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            del node.attribute[:], node.output[1:]
    return model


def small_resnet() -> ModelProto:
    return frozen_statistics(resnet.build(features=2, blocks=(1, 1)))


def trained(graph: ob.TrainingGraph, batches: list[Feeds], **settings: Any) -> tuple[list[float], Feeds]:
    trainer = ob.Trainer(graph, learning_rate=0.01, **settings)
    return [trainer.step(batch) for batch in batches], trainer.state()


def check_equal(graph: ob.TrainingGraph, batches: list[Feeds], sizes: tuple[int, ...], **settings: Any) -> None:
    """Losses and state of several ranks are those of one; the ranks' are the same."""
    of_several = ("sync_batch_norm", "shard_update")
    losses, state = trained(graph, batches, **{n: value for n, value in settings.items() if n not in of_several})
    for size in sizes:
        ranks = on_ranks(size, lambda c: trained(graph, batches, communicator=c, **settings))
        for other_losses, other in ranks:
            assert other_losses == ranks[0][0]
            for name, value in other.items():
                np.testing.assert_array_equal(value, ranks[0][1][name], err_msg=name)
        np.testing.assert_allclose(ranks[0][0], losses, rtol=2e-6)
        for name, value in state.items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(ranks[0][1][name], value, atol=1e-6, rtol=1e-6, err_msg=f"{name}, {size}")
            else:
                np.testing.assert_array_equal(ranks[0][1][name], value, err_msg=name)


OPTIMIZERS: dict[str, Callable[[], ob.optimizers.Optimizer]] = {
    "plain": ob.optimizers.SGD,
    "clipped": lambda: ob.optimizers.SGD(momentum=0.9, clip_norm=0.1, ema=0.9),
    "accumulated": lambda: ob.optimizers.SGD(clip_norm=0.1, accumulate=3),
}


def test_statistics_that_other_nodes_read(rng: np.random.Generator) -> None:
    """Both ranks have the batch of one, so that statistics of each are those of the whole; y adds the renewed mean."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[N, 3, 4] x) => (float[N, 3, 4] y)
            <float[3] w = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] mean = {1, 0, 2}, float[3] var = {1, 2, 4}, int64[2] k = {3, 1}>
            { n, m, v = BatchNormalization<training_mode = 1>(x, w, b, mean, var) r = Reshape(m, k) y = Add(n, r) }"""
    )
    graph = ob.training_graph(model, loss="mse", optimizer="sgd")
    feeds = {name: rng.standard_normal((5, 3, 4), np.float32) for name in ("x", "target")}
    losses, state = trained(graph, [feeds, feeds])
    for other_losses, other in on_ranks(2, lambda c: trained(graph, [Shard(feeds), Shard(feeds)], communicator=c)):
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6)
        for name, value in state.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_u_net(rng: np.random.Generator, optimizer: str) -> None:
    """Batches of which the third rank has an uneven part or none; kernels whose updates overwrite, and others."""
    kernels = "onnx" if optimizer == "accumulated" else "native"
    model = unet_conv_transpose.build(features=2)
    graph = ob.training_graph(model, loss="bce_with_logits", optimizer=OPTIMIZERS[optimizer]())
    check_equal(graph, [images(rng, rows) for rows in (5, 2, 8, 1)], (3,), kernels=kernels)


@pytest.mark.parametrize(
    ("model", "loss", "draw"),
    [
        (lambda: unet_resize.build(features=2), "l1", images),
        (small_resnet, "softmax_cross_entropy", labelled),
        (small_resnet, ob.losses.SoftmaxCrossEntropy(reduction="sum"), labelled),
        (
            small_resnet,
            ob.losses.SoftmaxCrossEntropy(ignore_index=3, weight=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], label_smoothing=0.1),
            labelled,
        ),
    ],
)
def test_losses(rng: np.random.Generator, model: Any, loss: Any, draw: Any) -> None:
    """Means over what counts: rows, elements, weights of labels; sums; ranks whose labels are all ignored."""
    graph = ob.training_graph(model(), loss=loss, optimizer=ob.optimizers.SGD())
    batches = [draw(rng, rows) for rows in (6, 3, 4)]
    for batch in batches if draw is labelled else ():
        batch["labels"][:2] = 3
    check_equal(graph, batches, (3,), kernels="onnx")


def test_private_steps(rng: np.random.Generator) -> None:
    """Rows are clipped where they are, also where a rank has none, and noise is added once, on whole tensors."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 6] x) => (float[N, 3] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }""")
    for name, shape in {"w": (6, 5), "v": (5, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    batches = [
        {"x": rng.standard_normal((n, 6)).astype(np.float32), "target": np.zeros((n, 3), np.float32)}
        for n in (5, 2, 8, 1)
    ]
    private = {"loss": "mse", "per_sample_clip": 0.3}
    for accumulate in (1, 2):
        optimizer = ob.optimizers.SGD(momentum=0.9, accumulate=accumulate)
        graph = ob.training_graph(model, optimizer=optimizer, noise=0.5, expected_batch=6, **private)
        for shard_update in (False, True):
            check_equal(graph, batches, (3,), kernels="onnx", seed=4, shard_update=shard_update)
    check_equal(graph, batches, (2,), kernels="native", seed=4)
    graph = ob.training_graph(model, optimizer="sgd", **private)
    with pytest.raises(ob.InvalidArgumentError, match="Make the graph with expected_batch"):
        on_ranks(2, lambda c: ob.Trainer(graph, communicator=c))


@pytest.mark.parametrize("ignored", [None, 3])
def test_sync_batch_norm(rng: np.random.Generator, ignored: int | None) -> None:
    """Statistics and their gradients are those of the whole batch; a rank has no rows, or none with a label."""
    loss = ob.losses.SoftmaxCrossEntropy(ignore_index=ignored)
    graph = ob.training_graph(resnet.build(features=2, blocks=(1, 1)), loss=loss, optimizer=ob.optimizers.SGD())
    batches = [labelled(rng, rows) for rows in ((4, 2) if ignored is None else (4, 5))]
    for batch in batches if ignored is not None else ():
        batch["labels"][:2] = 3  # all that rank 0 has
    check_equal(graph, batches, (3,), kernels="onnx", sync_batch_norm=True)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_row_has_the_bits_of_one_rank(rng: np.random.Generator, size: int) -> None:
    """Every row has parameters of its own, whose gradient comes through BatchNormalization: nothing else is in it."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (int64[N] row, float[15,192] images, float[4,3,3,3] w, float[4] scale, float[4] bias, float[4] mean,
           float[4] variance, float[5,4] v) => (float[N,5] logits) {
            taken = Gather(images, row)
            shape = Constant<value_ints = [-1, 3, 8, 8]>()
            x = Reshape(taken, shape)
            conv = Conv<pads = [1, 1, 1, 1]>(x, w)
            y, mean_new, variance_new = BatchNormalization<training_mode = 1>(conv, scale, bias, mean, variance)
            z = Relu(y)
            pooled = GlobalAveragePool(z)
            flat = Flatten(pooled)
            logits = Gemm<transB = 1>(flat, v)
        }""")
    for value in list(model.graph.input)[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = np.zeros(shape) if value.name == "mean" else 1 + rng.standard_normal(shape)
        array = np.abs(array) if value.name == "variance" else array
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), value.name))
        model.graph.input.remove(value)
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=ob.optimizers.SGD())
    batch = {"row": rng.permutation(15), "labels": rng.integers(0, 5, 15)}
    _, one = trained(graph, [batch])
    _, several = on_ranks(size, lambda c: trained(graph, [batch], communicator=c, sync_batch_norm=True))[0]
    assert (one["images"] != graph.initial_state()["images"]).any()
    np.testing.assert_array_equal(several["images"], one["images"])
    for name in ("mean", "variance", *graph.parameters):
        np.testing.assert_allclose(several[name], one[name], atol=1e-7, rtol=1e-6, err_msg=name)


def test_batch_statistics_of_each_rank(rng: np.random.Generator) -> None:
    """Without synchronisation: gradients by the statistics of a rank's rows, the running ones are their mean."""
    graph = ob.training_graph(resnet.build(features=2, blocks=(1,)), loss="softmax_cross_entropy", optimizer="sgd")
    batch = labelled(rng, 4)

    def work(feeds: Feeds, communicator: Threads | None = None) -> Feeds:
        trainer = ob.Trainer(graph, kernels="onnx", communicator=communicator, learning_rate=0.0)
        trainer.step(feeds)
        return trainer.state()

    halves = [work({name: array[part] for name, array in batch.items()}) for part in (slice(0, 2), slice(2, 4))]
    together = on_ranks(2, lambda c: work(batch, c))
    for name in graph.updates:
        if name not in graph.parameters and halves[0][name].dtype.kind == "f":
            np.testing.assert_array_equal(together[0][name], together[1][name])
            mean = (halves[0][name] + halves[1][name]) / 2
            np.testing.assert_allclose(together[0][name], mean, rtol=1e-6, err_msg=name)


def test_gradient_norms_and_mixed_precision(rng: np.random.Generator) -> None:
    """Scaled losses: a gradient that is not finite on one rank leaves the update out on all."""
    graph = ob.training_graph(
        unet_resize.build(features=2),
        loss="mse",
        optimizer=ob.optimizers.SGD(accumulate=2),
        precision="fp16",
        gradient_norms=True,
    )
    batches = [images(rng, 4) for _ in range(4)]
    batches[1]["target"][3] = 1e5  # whose gradient overflows in float16, on the last rank alone

    def steps(communicator: Threads | None) -> tuple[list[int], dict[str, float], Feeds]:
        trainer = ob.Trainer(graph, learning_rate=0.01, kernels="onnx", communicator=communicator)
        skipped = []
        for batch in batches:
            trainer.step(batch)
            skipped.append(trainer.skipped_steps)
        return skipped, trainer.gradient_norms, trainer.state()

    alone, ranks = steps(None), on_ranks(2, steps)
    assert alone[0] == ranks[0][0] == ranks[1][0] == [0, 1, 1, 1]
    assert ranks[0][1] == ranks[1][1]
    for name, value in alone[2].items():
        np.testing.assert_allclose(ranks[0][2][name], value, atol=3e-4, err_msg=name)
        np.testing.assert_array_equal(ranks[0][2][name], ranks[1][2][name])


def test_accumulation_sends_once_an_update(rng: np.random.Generator) -> None:
    model = unet_resize.build(features=2)
    batches = [images(rng, 4) for _ in range(6)]

    def sent(accumulate: int) -> int:
        graph = ob.training_graph(model, loss="mse", optimizer=ob.optimizers.SGD(accumulate=accumulate))

        def work(communicator: Threads) -> int:
            trainer = ob.Trainer(graph, kernels="onnx", communicator=communicator, verify_every=0)
            before = communicator.bytes
            for batch in batches:
                trainer.step(batch)
            return communicator.bytes - before

        return on_ranks(2, work)[0]

    assert sent(1) > 5 * sent(6)


def test_accumulation_resumes_between_updates(rng: np.random.Generator, tmp_path: Any) -> None:
    """A checkpoint holds the sum over all ranks, and goes on alone, on as many ranks and on others."""
    optimizer = ob.optimizers.SGD(momentum=0.9, accumulate=3)
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer=optimizer)
    batches = [images(rng, 4) for _ in range(6)]
    path = tmp_path / "c.safetensors"

    def undisturbed(communicator: Threads | None) -> Feeds:
        trainer = ob.Trainer(graph, kernels="onnx", learning_rate=0.01, communicator=communicator)
        for n, batch in enumerate(batches):
            trainer.step(batch)
            if n == 3:
                trainer.save(path)
        return trainer.state()

    def resumed(communicator: Threads | None) -> Feeds:
        trainer = ob.Trainer(graph, kernels="onnx", communicator=communicator).load(path)
        for batch in batches[4:]:
            trainer.step(batch)
        assert trainer.steps == 6
        return trainer.state()

    whole = on_ranks(2, undisturbed)[0]
    others = [on_ranks(2, resumed)[1], on_ranks(3, resumed)[2], resumed(None)]
    for name, value in whole.items():
        np.testing.assert_array_equal(others[0][name], value, err_msg=name)
        for other in others[1:]:
            np.testing.assert_allclose(other[name], value, atol=3e-7, err_msg=name)


def test_masks_differ_between_ranks(rng: np.random.Generator) -> None:
    """Those of rank 0 are those of a training alone, and a step draws new ones; the state is the same on all."""
    net = Network("dropping", seed=0)
    model = net.model("output", net.relu(net.input("image", 1)))
    del model.graph.node[:]
    dropped = helper.make_node("Dropout", ["image", "", "training"], ["dropped"], name="drop")
    scaled = helper.make_node("Mul", ["dropped", "weight"], ["output"])
    model.graph.node.extend([dropped, scaled])
    weight = np.ones((1, 1, 8, 8), np.float32)
    for name, array in (("weight", weight), ("training", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    graph = ob.training_graph(model, loss="mse", optimizer=ob.optimizers.SGD())
    ones = {"image": np.ones((1, 1, 8, 8), np.float32), "target": np.zeros((1, 1, 8, 8), np.float32)}

    def losses(communicator: Threads | None) -> tuple[list[float], Feeds]:
        trainer = ob.Trainer(graph, kernels="onnx", learning_rate=0.0, communicator=communicator)
        mine = ones if communicator is None else Shard(ones if communicator.rank == reader else {})
        return [trainer.step(mine) for _ in range(3)], trainer.state()

    reader = 0
    alone, first = losses(None)[0], on_ranks(2, losses)
    reader = 1
    second = on_ranks(2, losses)
    assert first[0][0] == alone
    assert len({*first[0][0], *second[0][0]}) == 6
    for name, value in first[0][1].items():
        np.testing.assert_array_equal(value, second[1][1][name])


def test_ranks_make_the_graph_of_rank_0_their_own(rng: np.random.Generator) -> None:
    """Weights and seed are rank 0's; another graph is refused, by its rank, on all."""
    batch = images(rng, 4)

    def work(communicator: Threads) -> Feeds:
        graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer="sgd")
        tensors = {t.name: t for t in graph.model.graph.initializer}
        for name in graph.parameters if communicator.rank else ():
            array = numpy_helper.to_array(tensors[name])
            tensors[name].CopyFrom(numpy_helper.from_array(array + 1, name))
        trainer = ob.Trainer(graph, kernels="onnx", seed=communicator.rank, communicator=communicator, verify_every=1)
        trainer.step(batch)
        return trainer.state()

    first, second = on_ranks(2, work)
    assert all((first[name] == second[name]).all() for name in first)

    def other(communicator: Threads) -> None:
        loss = "mse" if communicator.rank != 1 else "l1"
        graph = ob.training_graph(unet_resize.build(features=2), loss=loss, optimizer="sgd")
        ob.Trainer(graph, kernels="onnx", communicator=communicator)

    with pytest.raises(ReplicaError, match="rank 1 has another training graph than rank 0"):
        on_ranks(3, other)


def test_a_rank_that_has_gone_astray_is_found(rng: np.random.Generator) -> None:
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer="sgd")
    batch = images(rng, 4)

    def work(communicator: Threads) -> None:
        trainer = ob.Trainer(graph, kernels="onnx", communicator=communicator, verify_every=3)
        for n in range(4):
            if n == 1 and communicator.rank == 1:
                name = next(iter(graph.parameters))
                trainer.set_state({name: np.nextafter(trainer.state()[name], np.float32(9))})
            trainer.step(batch)

    with pytest.raises(ReplicaError, match="rank 1 has after step 3 another state than rank 0"):
        on_ranks(2, work)


def test_shards_are_not_divided_again(rng: np.random.Generator) -> None:
    """Rows that a rank has read itself, in a loader too; a rank may have none."""
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer=ob.optimizers.SGD())
    batches = [images(rng, 5) for _ in range(3)]
    losses, state = trained(graph, batches, kernels="onnx")

    def work(communicator: Threads) -> tuple[list[float], Feeds]:
        cut = [slice(0, 4), slice(4, 4), slice(4, 5)][communicator.rank]
        shards = [Shard({name: array[cut] for name, array in batch.items()}) for batch in batches]
        trainer = ob.Trainer(graph, kernels="onnx", learning_rate=0.01, communicator=communicator)
        return [record.loss for record in trainer.fit(shards, 1)], trainer.state()

    for other_losses, other in on_ranks(3, work):
        np.testing.assert_allclose(other_losses, losses, rtol=1e-6)
        for name in graph.parameters:
            np.testing.assert_allclose(other[name], state[name], atol=1e-7)


def test_fit_evaluates_and_writes_once(rng: np.random.Generator, tmp_path: Any) -> None:
    """`Batches` read a rank's rows alone; the log, the checkpoint and the model are rank 0's."""
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer=ob.optimizers.SGD())
    data = images(rng, 11)

    def work(communicator: Threads | None, name: str) -> tuple[list[float], list[float | None]]:
        folder = tmp_path / f"{name}{communicator.rank if communicator else ''}"
        folder.mkdir()
        trainer = ob.Trainer(graph, kernels="onnx", learning_rate=0.1, communicator=communicator)
        records = trainer.fit(
            ob.Batches(data, 4, seed=3),
            2,
            evaluation=ob.Batches(data, 3),
            checkpoint=folder / "c.safetensors",
            log=folder / "log.csv",
            callbacks=[lambda _, record: communicator is not None and communicator.rank == 1 and record.step == 4],
        )
        trainer.export(folder / "m.onnx")
        return [r.loss for r in records], [r.evaluation for r in records]

    alone = work(None, "alone")
    ranks = on_ranks(2, lambda c: work(c, "rank"))
    assert ranks[0] == ranks[1]
    assert len(ranks[0][0]) == 5  # a callback on rank 1 has ended the training on both
    np.testing.assert_allclose(ranks[0][0], alone[0][:5], rtol=1e-6)
    assert ranks[0][1][2] == pytest.approx(alone[1][2], rel=1e-6)
    assert sorted(p.suffix for p in (tmp_path / "rank0").iterdir()) == [".csv", ".onnx", ".safetensors"]
    assert not list((tmp_path / "rank1").iterdir())


def test_what_cannot_be_divided_is_refused(rng: np.random.Generator) -> None:
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer="sgd")
    batch = images(rng, 4)

    def work(feeds: Feeds) -> Callable[[Threads], None]:
        def step(communicator: Threads) -> None:
            ob.Trainer(graph, kernels="onnx", communicator=communicator).step(feeds)

        return step

    with pytest.raises(ob.InvalidArgumentError, match="expected inputs with one number of rows along axis 0"):
        on_ranks(2, work({"image": batch["image"], "target": batch["target"][:3]}))
    with pytest.raises(ob.InvalidArgumentError, match="1 row or more on all ranks together"):
        on_ranks(2, work({name: array[:0] for name, array in batch.items()}))
    batch["image"][3, 0, 0, 0] = np.nan  # on rank 1
    with pytest.raises(FloatingPointError, match="the loss is nan in step 1"):
        on_ranks(2, work(batch))
    with pytest.raises(ob.InvalidArgumentError, match="expected one of mpi4py"):
        ob.Trainer(graph, communicator=object())
