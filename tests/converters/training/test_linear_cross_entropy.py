"""Cross entropies of a last matrix product, in blocks of rows and whole, against float64 NumPy."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.support.linear_heads import CLASSES, KINDS, WIDTH, head, logits, next_token
from tests.support.numeric import outputs

losses = ob.losses
CASES = 40


def differences(kind: str, x: np.ndarray, p: dict[str, np.ndarray], of: Any) -> dict[str, np.ndarray]:
    """Central differences in float64, of x too."""
    at = {"x": x, **p}
    result = {}
    for name, value in at.items():
        g = np.zeros(value.shape)
        for i in np.ndindex(value.shape):
            moved = []
            for step in (1e-5, -1e-5):
                changed = {**at, name: value.copy()}
                changed[name][i] += step
                moved.append(of(logits(kind, changed.pop("x"), changed)))
            g[i] = (moved[0] - moved[1]) / 2e-5
        result[name] = g
    return result


@pytest.mark.parametrize("case", range(CASES))
def test_next_token_against_the_formula(case: int) -> None:
    rng = np.random.default_rng([case, 7])
    kind = KINDS[case % len(KINDS)]
    batch, time = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    rows = [0, 1, 2, 3, batch * time - 1, batch * time, 100][int(rng.integers(7))]
    model = head(kind, rng, "B, T" if rng.random() < 0.5 else f"{batch}, {time}")
    loss = losses.NextToken(
        reduction=("mean", "sum")[int(rng.integers(2))],
        shift=bool(rng.integers(2)),
        weights="token_weights" if rng.random() < 0.3 else None,
        label_smoothing=float(rng.choice([0, 0.1])),
        z_loss=float(rng.choice([0, 0.01])),
        ignore_index=int(rng.choice([-100, 3])),
        block_rows=rows,
    )
    x = rng.standard_normal((batch, time, WIDTH)).astype(np.float32)
    labels = rng.integers(0, CLASSES, (batch, time))
    labels[rng.random(labels.shape) < rng.choice([0, 0.3, 1])] = loss.ignore_index
    feeds = {"x": x, "labels": labels}
    weights = rng.random(labels.shape, np.float32) if loss.weights else None
    if weights is not None:
        feeds["token_weights"] = weights
    frozen = rng.random() < 0.3  # all but m
    graph = ob.training_graph(model, loss=loss, wrt_inputs=["x"], **({"trainable": ["m"]} if frozen else {}))
    assert bool(graph.options.blocks) == bool(rows)
    got = outputs(graph.model, feeds)
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    p = {name: tensors[name].astype(np.float64) for name in tensors if name in ("m", "w", "b", "e", "la", "lb")}
    assert set(graph.parameters) == ({"m"} if frozen else set(p))

    def of(y: np.ndarray) -> float:
        return next_token(y, labels, loss, weights)

    np.testing.assert_allclose(got[graph.loss], of(logits(kind, x.astype(np.float64), p)), rtol=2e-6, atol=1e-6)
    wanted = differences(kind, x.astype(np.float64), p, of)
    for name in ("x", *graph.parameters):
        np.testing.assert_allclose(
            got[f"{name}_grad"], wanted[name], rtol=1e-4, atol=3e-6 * max(1, of(logits(kind, x, p)))
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"weight": True}, {"weight": True, "ignore_index": 2},
                                     {"label_smoothing": 0.2, "ignore_index": -1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("dims", ["B, T", "N"])
def test_softmax_cross_entropy_in_blocks_is_that_of_whole_logits(
    rng, dims: str, options: dict[str, Any], reduction
) -> None:
    model = head("bias", rng, dims)
    options = {**options, "reduction": reduction}
    if options.pop("weight", False):
        options["weight"] = rng.random(CLASSES)
    shape = (3, 4) if dims == "B, T" else (7,)
    x, labels = rng.standard_normal((*shape, WIDTH), np.float32), rng.integers(0, CLASSES, shape)
    results = []
    for rows in (0, 1, 5, 50):
        graph = ob.training_graph(model, loss=losses.SoftmaxCrossEntropy(block_rows=rows, **options))
        assert bool(graph.options.blocks) == bool(rows)
        results.append(outputs(graph.model, {"x": x, "labels": labels}))
    for other in results[1:]:
        for name in ("loss", "m_grad", "w_grad", "b_grad"):
            np.testing.assert_allclose(other[name], results[0][name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("nodes", ["y = Softmax<axis = 2>(a)", "y = Softmax(a)", "y = LogSoftmax(a)"])
def test_the_classes_of_a_softmax_are_found(rng, nodes: str) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[B, T, 2] x) => (float[B, T, 3] y) <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ a = MatMul(x, w) {nodes} }}""")
    x, labels = rng.standard_normal((2, 4, 2), np.float32), rng.integers(0, 3, (2, 4))
    results = []
    for axis in (None, -1):
        loss = losses.NLL(axis=axis, log_probabilities="Log" in nodes)
        results.append(outputs(ob.training_graph(model, loss=loss, trainable=["w"]).model, {"x": x, "labels": labels}))
    assert results[0]["loss"] == results[1]["loss"]
    first = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[B, 3, T] x) => (float[B, 3, T] y) { y = Softmax<axis = 1>(x) }""")
    graph = ob.training_graph(first, loss="nll", wrt_inputs=["x"])
    assert outputs(graph.model, {"x": x.transpose(0, 2, 1).repeat(2, 1)[:, :3], "labels": labels})["loss"] > 0


def test_a_batch_without_a_token_that_counts_is_zero(rng) -> None:
    for rows in (0, 4):
        graph = ob.training_graph(head("bias", rng), loss=losses.NextToken(block_rows=rows))
        x = rng.standard_normal((2, 3, WIDTH), np.float32)
        got = outputs(graph.model, {"x": x, "labels": np.full((2, 3), -100)})
        assert got["loss"] == 0
        assert all(not got[g].any() for g in graph.parameters.values())


def test_labels_out_of_range_fail_the_run(rng) -> None:
    graph = ob.training_graph(head("MatMul", rng), loss=losses.NextToken(block_rows=2), optimizer="sgd")
    x = rng.standard_normal((1, 3, WIDTH), np.float32)
    for label in (CLASSES, -1):
        labels = np.array([[0, label, 1]])
        with pytest.raises(ob.InvalidArgumentError, match="expected classes"):
            ob.Trainer(graph).step(x=x, labels=labels)
        with pytest.raises(Exception, match="(?i)indices|bounds|range"):
            ob.session(graph.eval_model()).run(None, {"x": x, "labels": labels})


def test_a_loss_among_others_and_in_a_function(rng) -> None:
    """The factor is known before the blocks, or depends on what they add up to."""
    model = head("softcap", rng)
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))

    def square(op: Any, outputs: Any, rows: int) -> Any:
        loss = losses.NextToken(block_rows=rows)(op, outputs["y"])
        return op.Mul(loss, loss)

    for make in (
        lambda rows: 0.3 * losses.NextToken(block_rows=rows) + 2 * losses.NextToken(block_rows=rows),
        lambda rows: partial(square, rows=rows),
    ):
        results = []
        for rows in (0, 3):
            graph = ob.training_graph(model, loss=make(rows))
            names = list(graph.options.loss_inputs)
            results.append(outputs(graph.model, {"x": x, **dict.fromkeys(names, labels)}))
        for name in ("loss", "m_grad", "w_grad"):
            np.testing.assert_allclose(results[1][name], results[0][name], rtol=2e-5, atol=1e-6)


def test_gradients_by_token_weights(rng) -> None:
    results = []
    model = head("MatMul", rng)
    model.graph.input.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["B", "T"]))
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))
    for rows in (0, 3):
        loss = losses.NextToken(block_rows=rows, weights="scores")
        with pytest.raises(ob.InvalidArgumentError, match="name that is free"):
            ob.training_graph(model, loss=loss)
        graph = ob.training_graph(
            head("MatMul", np.random.default_rng(1)), loss=losses.NextToken(block_rows=rows, weights="scores")
        )
        with pytest.raises(ob.InvalidArgumentError):
            ob.training_graph(graph.eval_model(), wrt_inputs=["labels"])
        again = ob.training_graph(graph.eval_model(outputs=()), wrt_inputs=["scores", "x"], frozen=["m", "w"])
        results.append(outputs(again.model, {"x": x, "labels": labels, "scores": np.full((2, 4), 0.5, np.float32)}))
    np.testing.assert_allclose(results[1]["scores_grad"], results[0]["scores_grad"], rtol=1e-5, atol=1e-7)
    assert results[0]["scores_grad"].any()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the peak of memory")
def test_the_peak_of_memory_is_that_of_two_blocks() -> None:
    """Logits of 2048 tokens and 65,536 classes are 512 MB, those of a block 64 MB."""
    options = ("--rows", "2048", "--classes", "65536", "--width", "8", "--repeats", "1", "--frozen")
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--contender", "blocks", *options]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 64 < measured["megabytes"] < 256


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_head_with_an_adapter(rng, bits: int) -> None:
    width = 32
    packed = rng.integers(0, 256, (CLASSES, 1, width * bits // 8)).astype(np.uint8)
    scales, m = rng.random(CLASSES, np.float32) / 2**bits, rng.standard_normal((width, width), np.float32) / 6
    attributes = {"K": width, "N": CLASSES, "bits": bits, "block_size": 32}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "m"], ["h"]),
         helper.make_node("MatMulNBits", ["h", "q", "s"], ["y"], domain="com.microsoft", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "T", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "T", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in (("q", packed), ("s", scales), ("m", m))],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    adapted = ob.lora(helper.make_model(graph, opset_imports=imports, ir_version=10), ["*"], rank=2)
    x, labels = rng.standard_normal((2, 5, width), np.float32), rng.integers(0, CLASSES, (2, 5))
    results = []
    for rows in (0, 3):
        loss = losses.NextToken(block_rows=rows)
        converted = ob.training_graph(adapted.model, loss=loss, trainable=adapted.trainable, wrt_inputs=["x"])
        assert bool(converted.options.blocks) == bool(rows)
        results.append(outputs(converted.model, {"x": x, "labels": labels}))
    for name in ("loss", "x_grad", *converted.parameters.values()):
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["bias", "tied", "Gemm"])
def test_an_adapter_of_the_head(rng, kind: str) -> None:
    """Its zeros are read by the head and by the blocks, which is no sharing to warn of."""
    adapted = ob.lora(head(kind, rng), ["*"], rank=2)
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))
    curves = []
    for rows in (0, 3):
        loss = losses.NextToken(block_rows=rows)
        graph = ob.training_graph(adapted.model, loss=loss, trainable=adapted.trainable, optimizer="adamw")
        assert bool(graph.options.blocks) == bool(rows)
        trainer = ob.Trainer(graph, learning_rate=0.01)
        curves.append([trainer.step(x=x, labels=labels) for _ in range(4)])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_no_gradient_passes_a_stop_inside_the_head(rng) -> None:
    """No gradient passes it; behind a stop in front of the head, blocks are as ever."""
    model = head("bias", rng)
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))
    for stop, blocks in (("a", False), ("h", True)):
        results = []
        for rows in (0, 3):
            with pytest.warns(ob.OnnxBackpropWarning, match="zero"):
                graph = ob.training_graph(
                    model, loss=losses.NextToken(block_rows=rows), stop=[stop], trainable=["b"], wrt_inputs=["x"]
                )
            assert bool(graph.options.blocks) == (blocks and rows > 0)
            results.append(outputs(graph.model, {"x": x, "labels": labels}))
        assert not results[1]["x_grad"].any()
        np.testing.assert_allclose(results[1]["b_grad"], results[0]["b_grad"], rtol=1e-5, atol=1e-6)


def test_second_derivatives_go_through_the_steps(rng) -> None:
    x, labels = rng.standard_normal((1, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (1, 4))
    model = head("bias", rng)
    results = []
    for rows in (0, 3):
        graph = ob.training_graph(model, loss=losses.NextToken(block_rows=rows))
        product = ob.hvp(graph.eval_model(outputs=()), wrt=["b"], of=[graph.loss])
        direction = np.linspace(-1, 1, CLASSES, dtype=np.float32)
        results.append(outputs(product, {"x": x, "labels": labels, "b_direction": direction}))
    assert np.abs(results[0]["b_hvp"]).max() > 1e-3
    np.testing.assert_allclose(results[1]["b_hvp"], results[0]["b_hvp"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classes", [131_072, 100_003])
def test_sums_over_many_classes(rng, classes: int) -> None:
    """Equal numbers, whose roundings all go the same way: e⁻¹ · C + 1."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[B, T, 2] x) => (float[B, T, {classes}] y) {{ y = MatMul(x, w) }}""")
    w = np.zeros((2, classes), np.float32)
    w[0], w[1, 5] = 1, 1
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    x = np.array([[[0, 1.3], [0, 0.7], [0, 11.1]]], np.float32)
    graph = ob.training_graph(model, loss=losses.NextToken(shift=False), wrt_inputs=["x"])
    assert graph.options.blocks
    got = outputs(graph.model, {"x": x, "labels": np.array([[5, 1, 2]])})
    loss = losses.NextToken(shift=False)
    np.testing.assert_allclose(
        got["loss"], next_token(x.astype(np.float64) @ w, np.array([[5, 1, 2]]), loss), rtol=1e-6
    )
    p = np.exp(x[..., 1:].astype(np.float64))
    p = p / (p + classes - 1)  # of class 5
    wanted = (p - np.array([[[1], [0], [0]]])) / 3
    np.testing.assert_allclose(got["x_grad"][..., 1:], wanted, rtol=3e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types(rng, dtype: Any) -> None:
    model = head("bias", rng)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for tensor in list(model.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    x, labels = rng.standard_normal((2, 5, WIDTH)).astype(dtype), rng.integers(0, CLASSES, (2, 5))
    results = []
    for rows in (0, 3):
        graph = ob.training_graph(model, loss=losses.NextToken(block_rows=rows))
        results.append(outputs(graph.model, {"x": x, "labels": labels}))
        assert {results[-1][g].dtype for g in graph.parameters.values()} == {np.dtype(dtype)}
    for name in ("loss", "m_grad", "w_grad", "b_grad"):
        np.testing.assert_allclose(
            results[1][name],
            results[0][name],
            rtol=3e-3 if dtype == np.float16 else 1e-9,
            atol=2e-3 if dtype == np.float16 else 1e-12,
        )
