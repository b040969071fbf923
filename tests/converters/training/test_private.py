"""DP-SGD: clipped gradients of rows beside a loop over them in NumPy, float64; the noise; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob
from tests.converters.derivatives.test_per_sample import MODELS, ROWS, drawn, feeds_of, model_of
from tests.converters.derivatives.test_per_sample import run as run_model
from tests.converters.prepare.decoders import VOCABULARY, decoder
from tests.support.training_models import classifier

Values = dict[str, np.ndarray]
CLIP = 0.7


def network() -> ModelProto:
    """One matrix in two places."""
    text = """(float[N, 4] x) => (float[N, 4] y) {
        a = Gemm(x, w, b) h = Tanh(a) t = Transpose<perm = [1, 0]>(w) s = MatMul(h, t) y = Mul(s, m) }"""
    return model_of(text, w=drawn(4, 5), b=drawn(5), m=drawn(4, seed=1))


def clipped(w: Values, x: np.ndarray, target: np.ndarray, clip: float) -> Values:
    """Σ_i g_i · min(1, C / ‖g_i‖) of the mean squares of the rows."""
    total = {name: np.zeros_like(value) for name, value in w.items()}
    for row, t in zip(x.astype(float), target.astype(float), strict=True):
        h = np.tanh(row @ w["w"] + w["b"])
        s = w["w"] @ h
        dy = 2 / 4 * (s * w["m"] - t)
        ds = dy * w["m"]
        da = w["w"].T @ ds * (1 - h**2)
        g = {"w": np.outer(row, da) + np.outer(ds, h), "b": da, "m": dy * s}
        norm = np.sqrt(sum((value**2).sum() for value in g.values()))
        for name, value in g.items():
            total[name] += value * min(1, clip / norm)
    return total


def batch(rows: int, seed: int = 0) -> Values:
    return {"x": drawn(rows, 4, seed=seed), "target": drawn(rows, 4, seed=seed + 1)}


@pytest.mark.parametrize(
    ("expected", "accumulate", "kernels"), [(None, 1, "native"), (10, 1, "onnx"), (10, 2, "native")]
)
def test_steps_of_a_loop_over_rows(expected: int | None, accumulate: int, kernels: str) -> None:
    """Momentum and clip_norm behind the clipped mean; batches of unequal size."""
    optimizer = ob.optimizers.SGD(momentum=0.9, clip_norm=0.3, accumulate=accumulate)
    graph = ob.training_graph(
        network(), loss="mse", optimizer=optimizer, per_sample_clip=CLIP, expected_batch=expected, gradient_norms=True
    )
    trainer = ob.Trainer(graph, learning_rate=0.1, kernels=kernels)
    w = {name: value.astype(float) for name, value in trainer.parameters().items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for step in range(3):
        g = {name: np.zeros_like(value) for name, value in w.items()}
        for run in range(accumulate):
            rows = batch(5 + 3 * step + run, seed=10 * step + run)
            y = run_model(ob.training_graph(network(), loss="mse").model, rows | trainer.parameters())["loss"]
            assert trainer.step(rows) == pytest.approx(float(y), rel=1e-5), "the loss is that of the batch"
            for name, value in clipped(w, **rows, clip=CLIP).items():
                g[name] += value / (expected or len(rows["x"])) / accumulate
        norm = np.sqrt(sum((value**2).sum() for value in g.values()))
        if accumulate == 1:
            for name, value in trainer.gradient_norms.items():
                assert value == pytest.approx(np.linalg.norm(g[name]), rel=1e-5), "before clip_norm"
        for name in w:
            v[name] = 0.9 * v[name] + g[name] * min(1, 0.3 / (norm + 1e-6))
            w[name] -= 0.1 * v[name]
    for name, value in trainer.parameters().items():
        np.testing.assert_allclose(value, w[name], atol=3e-6, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_operators(name: str) -> None:
    """Some rows are clipped and others not; the model that is exported and evaluated is the one that came."""
    model, shapes = MODELS[name]
    feeds = feeds_of(shapes)
    each = ob.training_graph(model, loss="mse", per_sample=True)
    feeds["target"] = drawn(*run_model(model, feeds)["y"].shape)
    outputs = run_model(each.model, feeds)
    rows = {p: outputs[g].astype(float) for p, g in each.parameters.items()}
    norms = np.sqrt(sum((g.reshape(ROWS, -1) ** 2).sum(axis=1) for g in rows.values()))
    clip = float(np.median(norms)) or 1.0
    factors = np.minimum(1, clip / np.maximum(norms, 1e-30))
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", per_sample_clip=clip)
    trainer = ob.Trainer(graph, learning_rate=1.0)
    before = trainer.parameters()
    trainer.step(feeds)
    for p, value in trainer.parameters().items():
        want = np.tensordot(factors, rows[p], 1) / ROWS
        np.testing.assert_allclose(before[p] - value, want, rtol=1e-4, atol=3e-6 * max(1, clip), err_msg=p)
    assert "gradients clipped to" in graph.summary()
    kept = graph.inference_model(before)
    assert [node.op_type for node in kept.graph.node] == [node.op_type for node in model.graph.node]
    np.testing.assert_array_equal(run_model(kept, feeds_of(shapes))["y"], run_model(model, feeds_of(shapes))["y"])


def test_an_adapter_alone_is_clipped() -> None:
    """With LoRA the norm is of the adapter; what is frozen stays."""
    adapted = ob.lora(MODELS["products"][0], targets=["w", "v"], rank=2)
    options = {"loss": "softmax_cross_entropy", "prediction": "c", "trainable": adapted.trainable}
    feeds = feeds_of({"x": (4,)}) | {"labels": np.arange(ROWS) % 3}
    each = ob.training_graph(adapted.model, per_sample=True, **options)
    outputs = run_model(each.model, feeds)
    rows = {p: outputs[g].astype(float).reshape(ROWS, -1) for p, g in each.parameters.items()}
    norms = np.sqrt(sum((g**2).sum(axis=1) for g in rows.values()))
    clip = float(np.median(norms))
    trainer = ob.Trainer(
        ob.training_graph(adapted.model, optimizer="sgd", per_sample_clip=clip, **options), learning_rate=1.0
    )
    before = trainer.parameters()
    trainer.step(feeds)
    assert len(before) == 4
    for p, value in trainer.parameters().items():
        want = (np.minimum(1, clip / norms) @ rows[p] / ROWS).reshape(value.shape)
        np.testing.assert_allclose(before[p] - value, want, atol=2e-6, err_msg=p)


def test_a_decoder_with_adapters() -> None:
    """Masks and positions that follow from the tokens; rows beside the gradients of batches of one."""
    model = decoder("GroupQueryAttention")
    matrices = [t.name for t in model.graph.initializer if len(t.dims) == 2]
    adapted = ob.lora(model, matrices, rank=2)
    options = {"loss": ob.losses.NextToken(), "trainable": adapted.trainable}
    with pytest.warns(ob.OnnxBackpropWarning, match="the model is a decoder"):
        plain = ob.training_graph(adapted.model, **options)
    with pytest.warns(ob.OnnxBackpropWarning, match="the model is a decoder"):
        graph = ob.training_graph(adapted.model, optimizer="sgd", per_sample_clip=0.05, **options)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (3, 4))
    trainer, total = ob.Trainer(graph, learning_rate=1.0), dict.fromkeys(plain.parameters, np.zeros(()))
    before = trainer.parameters()
    trainer.step(input_ids=tokens, labels=tokens)
    session = ob.session(plain.model)
    for row in tokens:
        grads = session.run([*plain.parameters.values()], {"input_ids": row[None], "labels": row[None]})
        rows = {p: np.asarray(g).astype(float) for p, g in zip(plain.parameters, grads, strict=True)}
        norm = np.sqrt(sum((g**2).sum() for g in rows.values()))
        total = {p: total[p] + g * min(1, 0.05 / norm) / 3 for p, g in rows.items()}
    assert max(np.abs(g).max() for g in total.values()) > 1e-3
    for p, value in trainer.parameters().items():
        np.testing.assert_allclose(before[p] - value, total[p], atol=1e-7, err_msg=p)


@pytest.mark.parametrize("loss", ["next_token", "softmax_cross_entropy", "weighted"])
def test_a_row_without_labels_that_count_adds_nothing(loss: str) -> None:
    text = "(int64[N, T] i) => (float[N, T, 9] y) { e = Gather(w, i) t = Tanh(e) y = MatMul(t, v) }"
    chosen = {
        "next_token": ob.losses.NextToken(ignore_index=-100),
        "softmax_cross_entropy": ob.losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100),
        "weighted": ob.losses.SoftmaxCrossEntropy(axis=-1, weight=[0.0, *[1.0] * 8]),
    }[loss]
    graph = ob.training_graph(
        model_of(text, w=drawn(9, 4), v=drawn(4, 9)),
        loss=chosen,
        optimizer="sgd",
        per_sample_clip=0.1,
        expected_batch=1,
    )
    tokens = np.random.default_rng(0).integers(1, 9, (4, 5))
    labels = tokens.copy()
    labels[2] = 0 if loss == "weighted" else -100
    labels[1, 3:] = labels[2, 0]
    after: list[Values] = []
    for rows in ([0, 1, 2, 3], [0, 1, 3]):
        trainer = ob.Trainer(graph, learning_rate=1.0)
        trainer.step(i=tokens[rows], labels=labels[rows])
        after.append(trainer.parameters())
    for name, value in after[0].items():
        np.testing.assert_allclose(value, after[1][name], atol=2e-6, err_msg=name)
        assert np.abs(value - graph.initial_values()[name]).max() > 1e-3


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_row_whose_only_label_is_ignored_adds_nothing(transposed: int) -> None:
    """The gradient of a Gemm is a product with what the loss hands back on the left or on the right, NaN here."""
    text = f"""(float[N, 4] x) => (float[N, 3] y) {{
        h = Gemm<transB = 1>(x, v, b) t = Tanh(h) y = Gemm<transB = {transposed}>(t, w, c) }}"""
    model = model_of(text, v=drawn(5, 4), b=drawn(5), w=drawn(*((3, 5) if transposed else (5, 3))), c=drawn(3))
    loss = ob.losses.SoftmaxCrossEntropy(ignore_index=-100)
    graph = ob.training_graph(model, loss=loss, optimizer="sgd", per_sample_clip=0.1, expected_batch=1)
    x, labels = drawn(4, 4), np.array([0, -100, 2, 1])
    after: list[Values] = []
    for rows in ([0, 1, 2, 3], [0, 2, 3]):
        trainer = ob.Trainer(graph, learning_rate=1.0)
        trainer.step(x=x[rows], labels=labels[rows])
        after.append(trainer.parameters())
    for name, value in after[0].items():
        np.testing.assert_allclose(value, after[1][name], atol=2e-6, err_msg=name)
        assert np.abs(value - graph.initial_values()[name]).max() > 1e-3


SIGMA = 1.5


def noise_alone(trainer: ob.Trainer, runs: int = 1) -> Values:
    """What a step adds to parameters whose gradient is 0."""
    before = trainer.parameters()
    for _ in range(runs):
        trainer.step(x=np.zeros((5, 300), "f"), target=np.tile(trainer.parameters()["b"], (5, 1)))
    return {name: (before[name] - value).ravel().astype(float) for name, value in trainer.parameters().items()}


def noisy(**options: Any) -> ob.TrainingGraph:
    text = "(float[N, 300] x) => (float[N, 200] y) { a = MatMul(x, w) y = Add(a, b) }"
    options = {"optimizer": "sgd", "per_sample_clip": CLIP, "noise": SIGMA, **options}
    return ob.training_graph(model_of(text, w=drawn(300, 200), b=drawn(200)), loss="mse", **options)


@pytest.mark.parametrize(("expected", "accumulate"), [(None, 1), (40, 1), (40, 4)])
def test_noise_is_normal_and_independent(expected: int | None, accumulate: int) -> None:
    """60,000 numbers of a step: six times the error of each statistic; N(0, (σC/B)²) of an update, whatever k."""
    trainer = ob.Trainer(
        noisy(optimizer=ob.optimizers.SGD(accumulate=accumulate), expected_batch=expected), learning_rate=1.0, seed=7
    )
    first, second = ({n: v / (SIGMA * CLIP) for n, v in noise_alone(trainer, accumulate).items()} for _ in (0, 1))
    z = first["w"] * (accumulate * expected if expected else 5)
    error = 6 / np.sqrt(z.size)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = {1: 1, 2: 2, 3: 15, 4: 96}[power]  # the variance of z^power
        assert np.mean(z**power) == pytest.approx(moment, abs=error * np.sqrt(spread)), f"z^{power}, seed 7"
    for at, share in ((1.0, 0.8413447), (2.0, 0.9772499), (3.0, 0.9986501)):
        assert np.mean(z < at) == pytest.approx(share, abs=error * np.sqrt(share * (1 - share)))
    pairs = {
        "steps": (first["w"], second["w"]),
        "neighbours": (first["w"][1:], first["w"][:-1]),
        "rows": (first["w"][200:], first["w"][:-200]),
        "parameters": (
            np.concatenate([first["b"], second["b"]]),
            np.concatenate([first["w"][:200], second["w"][:200]]),
        ),
    }
    for what, (a, b) in pairs.items():
        assert np.corrcoef(a, b)[0, 1] == pytest.approx(0, abs=6 / np.sqrt(a.size)), what
        assert np.corrcoef(a**2, b**2)[0, 1] == pytest.approx(0, abs=6 / np.sqrt(a.size)), f"squares, {what}"


def test_noise_follows_from_the_seed(tmp_path: Path) -> None:
    """Bit for bit by seed and behind a checkpoint; without a seed nobody knows it."""
    graph = noisy()
    a, b, other = (ob.Trainer(graph, learning_rate=1.0, seed=seed) for seed in (3, 3, 4))
    for trainer in (a, b, other):
        noise_alone(trainer)
    a.save(tmp_path / "state.ckpt")
    resumed = ob.Trainer(graph, learning_rate=1.0).load(tmp_path / "state.ckpt")
    next_of_a, next_of_b, again = noise_alone(a), noise_alone(b), noise_alone(resumed)
    for name, value in next_of_a.items():
        np.testing.assert_array_equal(value, next_of_b[name])
        np.testing.assert_array_equal(value, again[name])
        assert (value != noise_alone(other)[name]).mean() > 0.99
    seeds = {int(ob.Trainer(graph).state()["random_state"][0]) for _ in range(3)}
    assert len(seeds) == 3
    assert 0 not in seeds


def test_noise_beside_gradients_and_an_optimizer() -> None:
    """Of two trainings with one seed, one with noise: σC/B · z apart in the first step."""
    with_noise = ob.Trainer(
        ob.training_graph(network(), loss="mse", optimizer="sgd", per_sample_clip=CLIP, noise=0.5), seed=1
    )
    without = ob.Trainer(ob.training_graph(network(), loss="mse", optimizer="sgd", per_sample_clip=CLIP))
    for trainer in (with_noise, without):
        trainer.learning_rate = 1.0
        trainer.step(batch(6))
    apart = [
        (value - without.parameters()[n]).ravel() / (0.5 * CLIP / 6) for n, value in with_noise.parameters().items()
    ]
    z = np.concatenate(apart)
    assert z.size == 29
    assert np.abs(z).max() < 4
    assert 0.5 < z.std() < 1.5


def test_masks_of_dropout_are_of_a_row() -> None:
    """Of 64 equal rows each has a mask of its own, so that hardly a weight has the gradient 0 of all of them."""
    text = "(float[N, 50] x) => (float[N, 1] y) <float r = {0.5}> { d = Dropout(x, r) y = MatMul(d, w) }"
    graph = ob.training_graph(
        model_of(text, w=drawn(50, 1)), loss="mse", optimizer="sgd", training_mode=True, per_sample_clip=1e6
    )
    trainer = ob.Trainer(graph, learning_rate=1.0, seed=5)
    assert not [node for node in graph.model.graph.node if node.op_type == "Scan"]
    before = trainer.parameters()["w"]
    trainer.step(x=np.ones((64, 50), "f"), target=np.zeros((64, 1), "f"))
    assert (trainer.parameters()["w"] != before).mean() > 0.95
    one = ob.Trainer(graph, learning_rate=1.0, seed=5)
    one.step(x=np.ones((1, 50), "f"), target=np.zeros((1, 1), "f"))
    assert 0.2 < (one.parameters()["w"] != before).mean() < 0.8


def half() -> ModelProto:
    model = model_of("(float16[N, 3] x) => (float16[N, 2] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT16, [3, 2], [1.0] * 6))
    return model


SGD = {"optimizer": "sgd", "per_sample_clip": 1.0}
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"per_sample_clip": 1.0}, ob.InvalidArgumentError, "per_sample_clip: goes with an optimizer"),
    ({"optimizer": "sgd", "noise": 1.0}, ob.InvalidArgumentError, "noise, expected_batch: go with per_sample_clip"),
    ({**SGD, "per_sample_clip": 0}, ob.InvalidArgumentError, "per_sample_clip: expected more than 0, got 0"),
    ({**SGD, "noise": -1}, ob.InvalidArgumentError, "noise: expected 0 or more, got -1"),
    ({**SGD, "expected_batch": 0.5}, ob.InvalidArgumentError, "expected_batch: expected the number of rows"),
    ({**SGD, "precision": "bf16"}, ob.InvalidArgumentError, "do not go with precision"),
    ({**SGD, "wrt_inputs": ["x"]}, ob.InvalidArgumentError, "do not go with wrt_inputs"),
    (
        {**SGD, "optimizer": ob.optimizers.SGD(accumulate=2)},
        ob.InvalidArgumentError,
        "expected_batch: accumulate with per_sample_clip",
    ),
    (
        {**SGD, "loss": ob.losses.SoftmaxCrossEntropy(ignore_index=0) + ob.losses.SoftmaxCrossEntropy()},
        ob.UnsupportedError,
        "of a sum of losses, one leaves labels out",
    ),
    (
        {**SGD, "training_mode": True},
        ob.UnsupportedError,
        "BatchNormalization 'normal'.*no row has a gradient of its own",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_use_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ob.training_graph(classifier(), **{"loss": "softmax_cross_entropy", **options})


def test_parameters_in_half_precision_are_refused() -> None:
    with pytest.raises(ob.UnsupportedError, match="'w' is FLOAT16; expected parameters in float32"):
        ob.training_graph(half(), loss="mse", **SGD)


def test_normalization_by_running_statistics_is_trained() -> None:
    graph = ob.training_graph(classifier(), loss="softmax_cross_entropy", **SGD)
    trainer = ob.Trainer(graph)
    before = trainer.parameters()
    trainer.step(x=drawn(6, 4), labels=np.arange(6) % 3)
    assert {"scale", "w1", "b1"} <= {
        name for name, value in trainer.parameters().items() if (value != before[name]).any()
    }
