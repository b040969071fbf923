"""Cross entropies of a last matrix product, in blocks of rows and whole, against float64 NumPy."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.loops.rows import ROWS
from onnx_backprop.converters.training.split import step_alone
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.training.reports.history import TokenLoss
from tests.support.numeric import outputs

losses = ob.losses
WIDTH, CLASSES = 6, 11
CASES = 40


def head(kind: str, rng: np.random.Generator, dims: str = "B, T") -> ModelProto:
    """x · m, and logits of it: in float64 `logits` computes the same."""
    shapes: dict[str, tuple[int, ...]] = {"m": (WIDTH, WIDTH), "w": (WIDTH, CLASSES), "b": (CLASSES,)}
    nodes = {
        "MatMul": "y = MatMul(h, w)",
        "bias": "a = MatMul(h, w) y = Add(b, a)",
        "tied": "wt = Transpose<perm = [1, 0]>(e) y = MatMul(h, wt)",
        "softcap": "a = MatMul(h, w) c = Div(a, cap) d = Tanh(c) y = Mul(d, cap)",
        "scale": "a = MatMul(h, w) y = Mul(a, cap)",
        "lora": "a = MatMul(h, w) p = MatMul(h, la) q = MatMul(p, lb) r = Mul(q, cap) y = Add(a, r)",
        "Gemm": "f = Reshape(h, rows) a = Gemm<transB = 1, alpha = 0.5>(f, e, b) s = Shape(h) n = Slice(s, zero, two) "
        "k = Concat<axis = 0>(n, last) y = Reshape(a, k)",
    }[kind]
    wanted = {
        "MatMul": "w", "bias": "w b", "tied": "e", "softcap": "w", "scale": "w", "lora": "w la lb", "Gemm": "e b",
    }[kind].split()  # fmt: skip
    shapes |= {"e": (CLASSES, WIDTH), "la": (WIDTH, 2), "lb": (2, CLASSES)}
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{dims}, {WIDTH}] x) => (float[{dims}, {CLASSES}] y) <float cap = {{2.5}}, int64[2] rows = {{-1, {WIDTH}}},
        int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] last = {{{CLASSES}}}> {{ h = MatMul(x, m) {nodes} }}""")
    for name in ["m", *wanted]:
        values = rng.standard_normal(shapes[name]).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:
        model.graph.initializer.remove(tensor)
    return model


def logits(kind: str, x: np.ndarray, p: dict[str, np.ndarray]) -> np.ndarray:
    h = x @ p["m"]
    if kind in ("tied", "Gemm"):
        return h @ p["e"].T if kind == "tied" else 0.5 * (h @ p["e"].T) + p["b"]
    a = h @ p["w"]
    if kind == "lora":
        return a + 2.5 * (h @ p["la"] @ p["lb"])
    return {"MatMul": a, "bias": a + p.get("b", 0), "softcap": 2.5 * np.tanh(a / 2.5), "scale": 2.5 * a}[kind]


def next_token(y: np.ndarray, labels: np.ndarray, loss: Any, weights: np.ndarray | None = None) -> float:
    """The formula of NextToken in float64."""
    w = np.ones(labels.shape) if weights is None else weights.astype(np.float64)
    if loss.shift:
        y, labels, w = y[..., :-1, :], labels[..., 1:], w[..., 1:]
    y, labels, w = y.reshape(-1, y.shape[-1]), labels.reshape(-1), w.reshape(-1)
    kept = labels != loss.ignore_index
    y, labels, w = y[kept], labels[kept], w[kept]
    if not len(labels):
        return 0.0
    largest = y.max(1, keepdims=True)
    lse = largest[:, 0] + np.log(np.exp(y - largest).sum(1))
    log_p = y - lse[:, None]
    each = -(1 - loss.label_smoothing) * log_p[np.arange(len(labels)), labels] - loss.label_smoothing * log_p.mean(1)
    total = float((w * (each + loss.z_loss * lse**2)).sum())
    divisor = w.sum() if loss.reduction == "mean" else 1.0
    return total / divisor if divisor else 0.0


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


KINDS = ("MatMul", "bias", "tied", "softcap", "scale", "lora", "Gemm")


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
    found = []
    for rows in (0, 1, 5, 50):
        graph = ob.training_graph(model, loss=losses.SoftmaxCrossEntropy(block_rows=rows, **options))
        assert bool(graph.options.blocks) == bool(rows)
        found.append(outputs(graph.model, {"x": x, "labels": labels}))
    for other in found[1:]:
        for name in ("loss", "m_grad", "w_grad", "b_grad"):
            np.testing.assert_allclose(other[name], found[0][name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("nodes", ["y = Softmax<axis = 2>(a)", "y = Softmax(a)", "y = LogSoftmax(a)"])
def test_the_classes_of_a_softmax_are_found(rng, nodes: str) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[B, T, 2] x) => (float[B, T, 3] y) <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ a = MatMul(x, w) {nodes} }}""")
    x, labels = rng.standard_normal((2, 4, 2), np.float32), rng.integers(0, 3, (2, 4))
    found = []
    for axis in (None, -1):
        loss = losses.NLL(axis=axis, log_probabilities="Log" in nodes)
        found.append(outputs(ob.training_graph(model, loss=loss, trainable=["w"]).model, {"x": x, "labels": labels}))
    assert found[0]["loss"] == found[1]["loss"]
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
        found = []
        for rows in (0, 3):
            graph = ob.training_graph(model, loss=make(rows))
            names = list(graph.options.loss_inputs)
            found.append(outputs(graph.model, {"x": x, **dict.fromkeys(names, labels)}))
        for name in ("loss", "m_grad", "w_grad"):
            np.testing.assert_allclose(found[1][name], found[0][name], rtol=2e-5, atol=1e-6)


def test_gradients_by_token_weights(rng) -> None:
    found = []
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
        found.append(outputs(again.model, {"x": x, "labels": labels, "scores": np.full((2, 4), 0.5, np.float32)}))
    np.testing.assert_allclose(found[1]["scores_grad"], found[0]["scores_grad"], rtol=1e-5, atol=1e-7)
    assert found[0]["scores_grad"].any()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the peak of memory")
def test_the_peak_of_memory_is_that_of_two_blocks() -> None:
    """Logits of 2048 tokens and 65,536 classes are 512 MB, those of a block 64 MB."""
    options = ("--rows", "2048", "--classes", "65536", "--width", "8", "--repeats", "1", "--frozen")
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--contender", "blocks", *options]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 64 < found["megabytes"] < 256


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
    found = []
    for rows in (0, 3):
        loss = losses.NextToken(block_rows=rows)
        converted = ob.training_graph(adapted.model, loss=loss, trainable=adapted.trainable, wrt_inputs=["x"])
        assert bool(converted.options.blocks) == bool(rows)
        found.append(outputs(converted.model, {"x": x, "labels": labels}))
    for name in ("loss", "x_grad", *converted.parameters.values()):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["bias", "tied", "Gemm"])
def test_an_adapter_of_the_head(rng, kind: str) -> None:
    """Its zeros are read by the head and by the blocks, which is no sharing to warn of."""
    adapted = ob.lora(head(kind, rng), ["*"], rank=2)
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))
    found = []
    for rows in (0, 3):
        loss = losses.NextToken(block_rows=rows)
        graph = ob.training_graph(adapted.model, loss=loss, trainable=adapted.trainable, optimizer="adamw")
        assert bool(graph.options.blocks) == bool(rows)
        trainer = ob.Trainer(graph, learning_rate=0.01)
        found.append([trainer.step(x=x, labels=labels) for _ in range(4)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_no_gradient_passes_a_stop_inside_the_head(rng) -> None:
    """No gradient passes it; behind a stop in front of the head, blocks are as ever."""
    model = head("bias", rng)
    x, labels = rng.standard_normal((2, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (2, 4))
    for stop, blocks in (("a", False), ("h", True)):
        found = []
        for rows in (0, 3):
            with pytest.warns(ob.OnnxBackpropWarning, match="zero"):
                graph = ob.training_graph(
                    model, loss=losses.NextToken(block_rows=rows), stop=[stop], trainable=["b"], wrt_inputs=["x"]
                )
            assert bool(graph.options.blocks) == (blocks and rows > 0)
            found.append(outputs(graph.model, {"x": x, "labels": labels}))
        assert not found[1]["x_grad"].any()
        np.testing.assert_allclose(found[1]["b_grad"], found[0]["b_grad"], rtol=1e-5, atol=1e-6)


def test_second_derivatives_go_through_the_steps(rng) -> None:
    x, labels = rng.standard_normal((1, 4, WIDTH), np.float32), rng.integers(0, CLASSES, (1, 4))
    model = head("bias", rng)
    found = []
    for rows in (0, 3):
        graph = ob.training_graph(model, loss=losses.NextToken(block_rows=rows))
        product = ob.hvp(graph.eval_model(outputs=()), wrt=["b"], of=[graph.loss])
        direction = np.linspace(-1, 1, CLASSES, dtype=np.float32)
        found.append(outputs(product, {"x": x, "labels": labels, "b_direction": direction}))
    assert np.abs(found[0]["b_hvp"]).max() > 1e-3
    np.testing.assert_allclose(found[1]["b_hvp"], found[0]["b_hvp"], rtol=1e-4, atol=1e-6)


def test_the_model_for_evaluation_computes_no_gradient(rng) -> None:
    graph = ob.training_graph(head("bias", rng), loss=losses.NextToken(block_rows=3), optimizer="adamw")
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
    graph = ob.training_graph(head(kind, rng), loss=losses.NextToken(block_rows=3), optimizer="adamw")
    assert "y" in {name for node in graph.model.graph.node for name in node.output}
    made = {name for node in step_alone(graph, graph.model).graph.node for name in node.output}
    assert "h" in made
    assert made.isdisjoint({"y", "a", "d", "r"})
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
    found = []
    for rows in (0, 3):
        graph = ob.training_graph(model, loss=losses.NextToken(block_rows=rows))
        found.append(outputs(graph.model, {"x": x, "labels": labels}))
        assert {found[-1][g].dtype for g in graph.parameters.values()} == {np.dtype(dtype)}
    for name in ("loss", "m_grad", "w_grad", "b_grad"):
        np.testing.assert_allclose(
            found[1][name],
            found[0][name],
            rtol=3e-3 if dtype == np.float16 else 1e-9,
            atol=2e-3 if dtype == np.float16 else 1e-12,
        )


def test_accumulation_divides_by_the_tokens_of_all_batches(rng) -> None:
    """Three batches, one of them without a token that counts, are one of all rows."""
    model = head("bias", rng)
    x, labels = rng.standard_normal((6, 5, WIDTH), np.float32), rng.integers(0, CLASSES, (6, 5))
    labels[0, 1:4] = labels[1] = labels[2:4] = -100
    for rows in (0, 3):
        found = []
        for batches, count in (((slice(0, 2), slice(2, 4), slice(4, 6)), 3), ((slice(0, 6),), 1)):
            optimizer = ob.optimizers.SGD(accumulate=count)
            graph = ob.training_graph(model, loss=losses.NextToken(block_rows=rows), optimizer=optimizer)
            trainer = ob.Trainer(graph, learning_rate=0.5)
            for _ in range(2):
                for batch in batches:
                    trainer.step(x=x[batch], labels=labels[batch])
            assert trainer.updates == 2
            found.append(trainer.parameters())
        for name in found[0]:
            np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)
    named = ob.training_graph(model, loss={"y": "next_token"}, optimizer=ob.optimizers.SGD(accumulate=3))
    assert any("counted" in name for name in named.updates)
    plain = ob.training_graph(model, loss=2 * losses.NextToken(), optimizer=ob.optimizers.SGD(accumulate=3))
    assert not any("counted" in name for name in plain.updates)  # of a sum of losses it is the mean


def test_evaluation_weighs_tokens_and_gives_perplexity(rng, tmp_path) -> None:
    model = head("bias", rng)
    x, labels = rng.standard_normal((5, 6, WIDTH), np.float32), rng.integers(0, CLASSES, (5, 6))
    labels[0, 1:], labels[3, 2] = -100, -100
    for weights in (None, "w2"):
        graph = ob.training_graph(model, loss=losses.NextToken(block_rows=4, weights=weights), optimizer="sgd")
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
    loss = losses.NextToken(target="input_ids", block_rows=4)
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
            loss = losses.NextToken(block_rows=4, reduction=reduction, label_smoothing=smoothing)
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
    trainer = ob.Trainer(ob.training_graph(model, loss=losses.NextToken(), optimizer=optimizer), learning_rate=1.0)
    for n in range(3):
        trainer.step(x=x[n : n + 1], labels=labels[n : n + 1])
    for name, g in zip(p, gradients, strict=True):
        np.testing.assert_allclose(values[name] - trainer.parameters()[name], g, rtol=1e-4, atol=1e-5)
