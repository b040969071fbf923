"""Whatever a graph holds, and whatever is done to a trainer, on a device beside the CPU, on which operators lose NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.providers import choose, memory
from onnx_backprop.training import trainer as trainers

Batch = dict[str, np.ndarray]
WITHIN = 1e-4
EVERYTHING = """everything (int64[B, T] ids, uint8[B, 6] pixels, bool[B, 6] mask, float[B, 6] x) => (float[B, 3] y) {
    embedded = Gather (table, ids)
    one = Constant <value = int64[1] {1}> ()
    mean = ReduceMean <keepdims = 0> (embedded, one)
    bright = Cast <to = 1> (pixels)
    share = Mul (bright, small)
    picked = Where (mask, share, x)
    h = Add (mean, picked)
    total = ReduceSum <keepdims = 0> (h)
    zero = Constant <value = float {0}> ()
    up = Greater (total, zero)
    branch = If (up) <then_branch = then () => (float[B, 6] p) { p = Tanh (h) },
                      else_branch = other () => (float[B, 6] q) { q = Mul (h, w) }>
    three = Constant <value = int64 {3}> ()
    looped = Loop (three, , branch) <body = b (int64 i, bool go, float[B, 6] s) => (bool on, float[B, 6] t)
        { on = Identity (go) product = MatMul (s, u) t = Tanh (product) }>
    steps = Transpose <perm = [1, 0, 2]> (embedded)
    last, all = Scan (looped, steps) <num_scan_inputs = 1, body = c (float[B, 6] s, float[B, 6] e)
        => (float[B, 6] t, float[B, 6] o) { sum = Add (s, e) t = Tanh (sum) o = Identity (t) }>
    y = Gemm (last, v, bias) }"""
# a maximum that loses NaN on every device
LOSES = """loses (float[B, 4] x) => (float[B, 3] y) {
    a = Gemm (x, w, b) zero = Constant <value = float {0}> () is_more = Greater (a, zero)
    h = Where (is_more, a, zero) y = Gemm (h, v, c) }"""
MASKS = """masks (float[B, 4] x) => (float[B, 3] y) {
    zero = Constant <value = float {0}> () missing = IsNaN (x) known = Where (missing, zero, x)
    a = Gemm (known, w, b) h = Relu (a) y = Gemm (h, v, c) }"""


def model_of(text: str, rng: np.random.Generator, **shapes: tuple[int, ...]) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) / 2
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def perceptron(rng: np.random.Generator, text: str = LOSES, **options: Any) -> ob.TrainingGraph:
    model = model_of(text, rng, w=(4, 16), b=(16,), v=(16, 3), c=(3,))
    return ob.training_graph(model, loss="softmax_cross_entropy", **{"optimizer": "adamw", **options})


def points(rng: np.random.Generator, *sizes: int) -> list[Batch]:
    return [{"x": rng.standard_normal((n, 4)).astype(np.float32), "labels": rng.integers(0, 3, n)} for n in sizes]


def deep(rng: np.random.Generator) -> ob.TrainingGraph:
    layers = " ".join(f"a{n} = MatMul (h{n}, w{n}) h{n + 1} = Tanh (a{n})" for n in range(4))
    model = model_of(
        f"deep (float[B, 4] x) => (float[B, 3] y) {{ h0 = Tanh (x) {layers} y = MatMul (h4, v) }}",
        rng, **{f"w{n}": (4 if n == 0 else 8, 8) for n in range(4)}, v=(8, 3),
    )  # fmt: skip
    return ob.training_graph(model, loss="softmax_cross_entropy", optimizer="adamw", memory="85%", lengths={"B": 6})


def everything(rng: np.random.Generator) -> ob.TrainingGraph:
    shapes = {"table": (9, 6), "w": (6,), "u": (6, 6), "v": (6, 3), "bias": (3,), "small": ()}
    optimizer = ob.optimizers.AdamW(accumulate=2, clip_norm=1.0)
    model = model_of(EVERYTHING, rng, **shapes)
    return ob.training_graph(model, loss="mse", optimizer=optimizer, frozen=["small"])


def mixed(rng: np.random.Generator) -> list[Batch]:
    """Both branches, tokens from the end, and a last batch of fewer rows."""
    return [
        {
            "ids": rng.integers(-9, 9, (rows, length)),
            "pixels": rng.integers(0, 256, (rows, 6)).astype(np.uint8),
            "mask": rng.random((rows, 6)) < 0.5,
            "x": (sign * np.abs(rng.standard_normal((rows, 6)))).astype(np.float32) * 200,
            "target": rng.standard_normal((rows, 3)).astype(np.float32),
        }
        for rows, length, sign in ((4, 3, 1), (4, 3, -1), (4, 3, 1), (4, 3, -1), (2, 5, 1), (2, 5, -1))
    ]


def depthwise(rng: np.random.Generator) -> ob.TrainingGraph:
    """And more parts than a shader can write at once, and read."""
    parts = ", ".join(f"p{n}" for n in range(24))
    text = f"""depthwise (float[B, 6, 16, 16] x) => (float[B, 24, 7] y) {{
        a = Conv <group = 6, kernel_shape = [5, 5], pads = [2, 2, 2, 2], strides = [2, 2]> (x, w) lengths = Constant <value = int64[3] {{0, 24, -1}}> ()
        b = Reshape (a, lengths) c = Slice (b, zero, end, two) {parts} = Split <axis = 1, num_outputs = 24> (c)
        together = Concat <axis = 1> ({parts}) y = Tanh (together) }}"""
    model = model_of(text, rng, w=(6, 1, 5, 5))
    for name, value in {"zero": 0, "end": 7, "two": 2}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    return ob.training_graph(model, loss="mse", optimizer="adamw")


def pictures(rng: np.random.Generator) -> list[Batch]:
    return [
        {
            "x": rng.standard_normal((rows, 6, 16, 16)).astype(np.float32),
            "target": rng.standard_normal((rows, 24, 7)).astype(np.float32),
        }
        for rows in (2, 2, 1)
    ]


CASES: dict[str, tuple[Callable[..., ob.TrainingGraph], Callable[..., list[Batch]]]] = {
    "tokens, bytes, masks, If, Loop, Scan, accumulate": (everything, mixed),
    "many parts": (depthwise, pictures),
    "memory": (deep, lambda rng: points(rng, 6, 6, 6)),
    "fp16": (lambda rng: perceptron(rng, precision="fp16"), lambda rng: points(rng, 6, 6, 6)),
    "gradients of inputs, norms": (
        lambda rng: perceptron(rng, wrt_inputs=["x"], gradient_norms=True),
        lambda rng: points(rng, 6, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_parameters_are_those_of_the_cpu(name: str, device: str, rng: np.random.Generator) -> None:
    build, batches = CASES[name]
    graph, given = build(rng), batches(rng)
    ours, there = (
        ob.Trainer(graph, learning_rate=1e-2, kernels="onnx"),
        ob.Trainer(graph, learning_rate=1e-2, device=device),
    )
    for batch in given:
        np.testing.assert_allclose(there.step(batch), ours.step(batch), atol=WITHIN)
    assert there._placed is not None
    assert not there._placed._moved, "no kernel fails"
    for parameter, value in ours.parameters().items():
        np.testing.assert_allclose(there.parameters()[parameter], value, atol=WITHIN, err_msg=parameter)
    for x, gradient in ours.input_gradients.items() if graph.input_gradients else ():
        np.testing.assert_allclose(there.input_gradients[x], gradient, atol=WITHIN)
        np.testing.assert_allclose([*there.gradient_norms.values()], [*ours.gradient_norms.values()], atol=WITHIN)


def test_indices_outside_of_a_table_are_refused(device: str, rng: np.random.Generator) -> None:
    """A shader reads some row or other for them, and OpenVINO what lies beyond the tensor: neither says anything."""
    text = """tokens (int64[B, T] ids) => (float[B, T, 3] y) { e = Gather (table, ids) y = MatMul (e, w) }"""
    graph = ob.training_graph(model_of(text, rng, table=(9, 4), w=(4, 3)), loss="mse", optimizer="adamw")
    ours, there = (ob.Trainer(graph, kernels="onnx"), ob.Trainer(graph, device=device))
    ids = rng.integers(-9, 9, (2, 5))
    batch = {"ids": ids, "target": rng.standard_normal((2, 5, 3)).astype(np.float32)}
    for outside in (9, -10, 2**32):
        with pytest.raises(ob.InvalidArgumentError, match="'ids'.*out of (data bounds|range)"):
            there.step({**batch, "ids": np.where(np.arange(5) == 2, outside, ids)})
        np.testing.assert_allclose(there.step(batch), ours.step(batch), atol=WITHIN)
    assert there._placed is not None
    assert not there._placed._moved


def test_two_trainers_take_turns_and_are_measured_meanwhile(device: str, rng: np.random.Generator) -> None:
    graph = perceptron(rng)
    pairs = [
        (ob.Trainer(graph, learning_rate=rate, kernels="onnx"), ob.Trainer(graph, learning_rate=rate, device=device))
        for rate in (1e-2, 1e-1)
    ]
    for batch in points(rng, 6, 6, 4, 6):
        for ours, there in pairs:
            np.testing.assert_allclose(there.step(batch), ours.step(batch), atol=WITHIN)
            np.testing.assert_allclose(there.evaluate(batch), ours.evaluate(batch), atol=WITHIN)
            np.testing.assert_allclose(there.predict(batch)["y"], ours.predict(batch)["y"], atol=WITHIN)
    assert pairs[0][0].parameters()["w"] != pytest.approx(pairs[1][0].parameters()["w"])


def test_threads_wait_for_one_another(webgpu: str, rng: np.random.Generator) -> None:
    """Without that the sessions write into one list of commands, and fail."""
    graph, given = perceptron(rng), points(rng, 6, 6, 4)
    ours = ob.Trainer(graph, kernels="onnx")
    expected = [ours.step(batch) for batch in given]
    product = ob.value_and_grad(parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float e) '
        "{ c = Mul (x, x) e = ReduceSum <keepdims = 0> (c) }"
    ), ["x"], device=webgpu)  # fmt: skip
    losses: list[list[float]] = []

    def work() -> None:
        for _ in range(2):
            there = ob.Trainer(graph, device=webgpu)
            losses.append([there.step(batch) for batch in given])
            there.evaluate(given[0])
            np.testing.assert_allclose(product(np.arange(3.0))[1], [0, 2, 4])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 6
    np.testing.assert_allclose(losses, [expected] * 6, atol=WITHIN)


@pytest.mark.parametrize("optimizer", ["lion", ob.optimizers.AdamW(accumulate=2)])
def test_what_is_no_number_is_noticed(optimizer: Any, device: str, rng: np.random.Generator) -> None:
    """Though the loss is one, since an operator has lost the other."""
    there = ob.Trainer(perceptron(rng, optimizer=optimizer), device=device)
    (batch,) = points(rng, 6)
    there.step(batch)
    before = there.state()
    bad = {**batch, "x": batch["x"].copy()}
    for value in (np.nan, np.inf):
        bad["x"][2, 1] = value
        with pytest.raises(FloatingPointError, match=rf"the loss is nan in step 2: 'x' holds {value} at \(2, 1\)"):
            there.step(bad)
    for name, value in there.state().items():
        np.testing.assert_array_equal(value, before[name])
    assert np.isfinite(there.step(batch))


def test_what_is_no_number_is_not_measured(device: str, rng: np.random.Generator) -> None:
    """But for a model that asks for NaN itself, of which it then trains."""
    (batch,) = points(rng, 6)
    bad = {**batch, "x": batch["x"].copy()}
    bad["x"][2, 1] = np.nan
    pattern = r"(WebGpu|CUDA|CPU) may lose what is no number"
    there = ob.Trainer(perceptron(rng), device=device)
    with pytest.raises(FloatingPointError, match=rf"{pattern}: 'x' holds nan at \(2, 1\)"):
        there.predict(bad)
    with pytest.raises(FloatingPointError, match=rf"{pattern}: .*row 2 of the data of the evaluation"):
        there.evaluate(ob.Batches(bad, 6, shuffle=False))
    graph = perceptron(rng, MASKS)
    ours, there = ob.Trainer(graph, kernels="onnx"), ob.Trainer(graph, device=device)
    np.testing.assert_allclose(
        [there.step(bad), there.evaluate(bad)], [ours.step(bad), ours.evaluate(bad)], atol=WITHIN
    )


@pytest.mark.usefixtures("limited")
def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    there = ob.Trainer(perceptron(rng), device="webgpu")
    (batch,) = points(rng, 6)
    there.step(batch)

    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to wait for the operation: Device lost")

    monkeypatch.setattr(trainers.Buffers, "run", fails)
    with pytest.raises(ob.KernelError, match=r"the device is lost, .*: Failed to wait .* from the last checkpoint"):
        there.step(batch)


def test_memory_that_cannot_be_read(limited: choose.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def device_name(self) -> str:
            return "gpu"

        def shape(self) -> list[int]:
            return [2]

        def element_type(self) -> int:
            return 1

        def numpy(self) -> np.ndarray:
            raise RuntimeError("no such buffer")

    def fails(*_: Any) -> None:
        raise RuntimeError("the queue is lost")

    monkeypatch.setattr(memory.onnxruntime, "copy_tensors", fails)
    with pytest.raises(ob.KernelError, match=r"the device is lost, .*: the queue is lost"):
        memory.Memory(limited).fetched(Gone())


def test_strings_are_refused_on_every_device(rng: np.random.Generator) -> None:
    text = """g (string[B] word, float[B, 4] x) => (float[B, 3] y) {
        ends = StringNormalizer <case_change_action = "LOWER"> (word) y = MatMul (x, w) }"""
    model = model_of(text, rng, w=(4, 3))
    graph = ob.training_graph(model, loss="mse", optimizer="adamw")
    with pytest.raises(ob.InvalidArgumentError, match="'word' holds strings, which no step is fed"):
        ob.Trainer(graph)
