"""Steps for WebGPU, run by onnxruntime on the processor: no float64, no Indices, and the losses of the default step."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.web.webgpu import webgpu_step
from tests.onnx_backprop.web.javascript import CASES, Arrays
from tests.support.lengths import fixed


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _losses(model: onnx.ModelProto, graph: ob.TrainingGraph, batches: list[Arrays], rate: float) -> list[float]:
    session = _session(model)
    state, losses = graph.initial_state(), []
    names = [graph.loss, *graph.updates.values()]
    for batch in batches:
        loss, *new = session.run(names, batch | state | {str(graph.learning_rate): np.array(rate, np.float32)})
        losses.append(float(np.asarray(loss)))
        state = dict(zip(graph.updates, map(np.asarray, new), strict=True))
    return losses


@pytest.mark.parametrize("name", ["cnn", "unet_resize"])  # all of them: make browser
def test_a_step_without_float64_and_indices(name: str) -> None:
    case = CASES[name]
    rows = case.rows(np.random.default_rng(1))
    batches = [{n: a[k : k + case.batch] for n, a in rows.items()} for k in range(0, 20 * case.batch, case.batch)]
    model = fixed(case.build(), {n: a.shape for n, a in batches[0].items()})
    graph = ob.training_graph(model, loss=case.loss, optimizer="adamw")
    step = webgpu_step(graph)
    types = {v.type.tensor_type.elem_type for v in (*step.graph.value_info, *step.graph.input, *step.graph.output)}
    assert TensorProto.DOUBLE not in types | {t.data_type for t in step.graph.initializer}
    nodes = list(all_nodes(step))
    assert not [n.name for n in nodes if n.op_type == "MaxPool" and len(n.output) > 1]
    assert not [
        n.name
        for n in nodes
        if n.op_type in ("Conv", "ConvTranspose") and "strides" not in {a.name for a in n.attribute}
    ]
    np.testing.assert_allclose(
        _losses(step, graph, batches, 1e-3), _losses(graph.model, graph, batches, 1e-3), rtol=2e-5
    )


def test_what_a_maximum_loses_is_in_the_loss(rng: np.random.Generator) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[2, 3] x) => (float[2, 1] y) {
        a = MatMul (x, w) zero = Constant <value = float {0}> () is_more = Greater (a, zero)
        h = Where (is_more, a, zero) y = MatMul (h, v) }""")
    for name, shape in {"w": (3, 4), "v": (4, 1)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    graph = ob.training_graph(model, loss="mse", optimizer="adamw")
    good, bad = ({"x": np.full((2, 3), x, np.float32), "target": np.ones((2, 1), np.float32)} for x in (1, np.nan))
    step = webgpu_step(graph)
    assert _losses(step, graph, [good], 1e-3) == pytest.approx(_losses(graph.model, graph, [good], 1e-3))
    assert np.isfinite(_losses(graph.model, graph, [bad], 1e-3))
    assert np.isnan(_losses(step, graph, [bad], 1e-3))


POOLS = [  # attributes of MaxPool, lengths of the image
    ({"kernel_shape": [2, 2], "strides": [2, 2]}, (6, 8)),
    ({"kernel_shape": [2, 2], "strides": [2, 2]}, (7, 5)),
    ({"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, (7, 8)),
    ({"kernel_shape": [3, 2], "strides": [1, 1], "pads": [2, 1, 1, 0]}, (5, 6)),
    ({"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, (8, 8)),
    ({"kernel_shape": [2, 2], "strides": [1, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}, (6, 7)),
    ({"kernel_shape": [2, 2], "strides": [3, 3]}, (8, 7)),
    ({"kernel_shape": [3], "strides": [2], "auto_pad": "SAME_UPPER"}, (9,)),
    ({"kernel_shape": [2, 2, 2], "strides": [2, 1, 2]}, (4, 3, 5)),
]


@pytest.mark.parametrize(("attributes", "lengths"), POOLS)
def test_gradients_of_pools(attributes: dict, lengths: tuple[int, ...], rng: np.random.Generator) -> None:
    """Against the body by Indices, with many equal elements, and with some as low as they may be, next to padding."""
    shape = [2, 3, *lengths]
    nodes = [helper.make_node("Add", ["x", "w"], ["h"]), helper.make_node("MaxPool", ["h"], ["y"], **attributes)]
    zeros = np.zeros(shape, np.float32)
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "pool",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(zeros, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    graph = ob.training_graph(model, loss="l1", optimizer="sgd", trainable=["w"])
    assert "MaxPoolBackward" in {n.op_type for n in graph.model.graph.node}
    plain, default, ours = map(_session, (model, graph.model, webgpu_step(graph)))
    (pooled,) = plain.run(None, {"x": zeros})
    for low in (-1.0, -3e38):
        x = rng.choice(np.array([low, 0, 0, 1], np.float32), shape)
        x[0, 0] = low
        target = rng.standard_normal(np.asarray(pooled).shape).astype(np.float32)
        feeds = {"x": x, "target": target, "learning_rate": np.array(1, np.float32)} | graph.initial_state()
        expected, actual = (np.asarray(session.run([graph.updates["w"]], feeds)[0]) for session in (default, ours))
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        assert np.count_nonzero(expected[0, 0])


def test_what_there_is_no_form_for_is_refused() -> None:
    case = CASES["unet_resize"]
    unknown = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw")
    with pytest.raises(ob.UnsupportedError, match=r"MaxPool .*: its kernel gives no Indices\. Expected known lengths"):
        webgpu_step(unknown)
    model = fixed(CASES["cnn"].build(), {"image": (8, 1, 8, 8)})
    branches = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=ob.optimizers.AdamW(accumulate=2))
    with pytest.raises(ob.UnsupportedError, match=re.escape("Leave accumulate at 1")):
        webgpu_step(branches)


@pytest.mark.parametrize("steps", [1, 600, 100_000])
def test_the_numbers_of_an_optimizer_keep_their_digits(steps: int) -> None:
    """1 - βᵗ from a series: of 1 - 0.999 float32 alone leaves four digits."""
    model = fixed(CASES["cnn"].build(), {"image": (8, 1, 8, 8)})
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=ob.optimizers.AdamW(weight_decay=0.0))
    step = webgpu_step(graph)
    name = "Gemm_1.bias"
    state = graph.initial_state() | {"optimizer_step": np.array(steps - 1)}
    rows = CASES["cnn"].rows(np.random.default_rng(0))
    feeds = state | {n: a[:8] for n, a in rows.items()} | {"learning_rate": np.array(1, np.float32)}
    moved = [
        np.asarray(_session(proto).run([graph.updates[name]], feeds)[0]) - state[name] for proto in (graph.model, step)
    ]
    assert np.abs(moved[0]).max() > 1e-3
    np.testing.assert_allclose(moved[1], moved[0], rtol=2e-6)
