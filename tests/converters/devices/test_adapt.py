"""Graphs for limited kernels: every form beside onnxruntime's own operator, float64 where digits matter."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.devices.adapt import adapted
from onnx_backprop.converters.devices.bounds import REFUSES
from onnx_backprop.converters.devices.expand import FORMS
from onnx_backprop.converters.devices.limits import HOST, NO_LIMITS, Limits
from onnx_backprop.opset.graphs.edit import without_tensors
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.providers.table import CUDA, WEBGPU
from tests.onnx_backprop.web.javascript import CASES
from tests.support.training_models import classifier, data

Arrays = dict[str, Any]


def model_of(text: str, **tensors: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    return model


def outputs(model: ModelProto, feeds: Arrays) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


def operators(model: ModelProto) -> set[str]:
    return {node.op_type for node in all_nodes(model.graph)}


VALUES = "v = Constant <value = float[2] {-2.0, 3.0}> ()"
DEPTH = "d = Constant <value = int64 {4}> ()"
LOSS = "SoftmaxCrossEntropyLoss"
NORM = "BatchNormalization <training_mode = 1, momentum = 0.7, epsilon = 0.01>"
FORMS_OF = {  # a graph with the operator, what it is fed
    "LogSoftmax": ("g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = LogSoftmax <axis = 1> (x) }", "x"),
    "Sign": ("g (float[2, 3] x) => (float[2, 3] y) { y = Sign (x) }", "x"),
    "Split": (
        f"g (float[2, 17, 3] x) => ({', '.join(f'y{n}' for n in range(9))}) "
        f"{{ {', '.join(f'y{n}' for n in range(9))} = Split <axis = -2, num_outputs = 9> (x) }}",
        "x",
    ),
    "Split, sizes": (
        f"g (float[2, 12, 3] x) => ({', '.join(f'y{n}' for n in range(8))}) "
        f"{{ k = Constant <value = int64[8] {{1, 2, 3, 1, 1, 0, 2, 2}}> () "
        f"{', '.join(f'y{n}' for n in range(8))} = Split <axis = 1> (x, k) }}",
        "x",
    ),
    "Sum": ("g (float[2, 3] x, float[3] s, float[2, 1] b) => (float[2, 3] y) { y = Sum (x, s, b) }", "x s b"),
    "OneHot": (f"g (int64[2, 3] i) => (float[2, 4, 3] y) {{ {DEPTH} {VALUES} y = OneHot <axis = 1> (i, d, v) }}", "i"),
    "OneHot, last": (f"g (int64[2, 3] i) => (float[2, 3, 4] y) {{ {DEPTH} {VALUES} y = OneHot (i, d, v) }}", "i"),
    LOSS: (f"g (float[2, 5, 3] z, int64[2, 3] c) => (float y, float[2, 5, 3] p) {{ y, p = {LOSS} (z, c) }}", "z c"),
    f"{LOSS}, weights": (
        f"g (float[2, 5, 3] z, int64[2, 3] c, float[5] w) => (float y) {{ y = {LOSS} <ignore_index = 1> (z, c, w) }}",
        "z c w",
    ),
    f"{LOSS}, each": (
        f"g (float[2, 5, 3] z, int64[2, 3] c) => (float[2, 3] y) "
        f"{{ y = {LOSS} <reduction = 'none', ignore_index = 1> (z, c) }}".replace("'", '"'),
        "z c",
    ),
    f"{LOSS}, sum": (
        f"g (float[2, 5, 3] z, int64[2, 3] c) => (float y) {{ y = {LOSS} <reduction = 'sum'> (z, c) }}".replace(
            "'", '"'
        ),
        "z c",
    ),
    "BatchNormalization": (
        f"g (float[2, 3, 4] x, float[3] s, float[3] b, float[3] m, float[3] r) => (float[2, 3, 4] y, float[3] n, "
        f"float[3] q) {{ y, n, q = {NORM} (x, s, b, m, r) }}",
        "x s b m r",
    ),
}


@pytest.mark.parametrize("name", FORMS_OF)
def test_forms_are_the_operators(name: str, rng: np.random.Generator) -> None:
    text, inputs = FORMS_OF[name]
    model = model_of(text)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds: Arrays = {}
    for value in inputs.split():
        feeds[value] = rng.standard_normal(shapes[value]).astype(np.float32)
        if value in "ic":
            feeds[value] = rng.integers(-4 if value == "i" else 0, 4 if value == "i" else 5, shapes[value])
        if value == "r":
            feeds[value] = np.abs(feeds[value])
    if "x" in feeds:
        feeds["x"].flat[:2] = 0, -0.0
    if name == f"{LOSS}, weights":
        feeds["c"].flat[0], feeds["c"].flat[1] = 1, 2
    operator = name.partition(",")[0]
    converted = adapted(model, Limits(lacks=frozenset({operator})))
    assert operator not in operators(converted.model)
    assert {*converted.host.values()} <= {REFUSES}
    onnx.checker.check_model(converted.model, full_check=True)
    for actual, expected in zip(outputs(converted.model, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


def test_all_forms_are_compared() -> None:
    compared = {name.partition(",")[0] for name in FORMS_OF}
    assert compared | {"MaxPoolBackward"} == set(FORMS), "of pools: tests/onnx_backprop/web/test_webgpu.py"


INDEXED = {  # what indexes x (4, 5), indices within, and one that is not; z, c: logits and labels
    "Gather": ("y = Gather <axis = 1> (x, i)", [[0, -5], [4, 2]], 5),
    "Gather, below": ("y = Gather (x, i)", [1, -4], -5),
    "GatherElements": ("y = GatherElements <axis = -2> (x, i)", [[3, -4, 0, 1, 2]], 4),
    "GatherND": ("y = GatherND (x, i)", [[3, 4], [-4, -5]], 5),
    "GatherND, batches": ("y = GatherND <batch_dims = 1> (x, i)", [[1], [4], [-5], [0]], 5),
    "ScatterElements": ("y = ScatterElements <axis = 1> (x, i, i_as_float)", [[0, -5], [4, 2]], -6),
    "ScatterND": ("y = ScatterND (x, i, x_rows)", [[3], [-4]], 4),
    f"{LOSS}": (f"y = {LOSS} (x, i)", [0, 4, 2, 1], -1),
    f"{LOSS}, ignored": (f"y = {LOSS} <ignore_index = -100> (x, i)", [0, -100, 2, 4], 5),
    "NegativeLogLikelihoodLoss": ("y = NegativeLogLikelihoodLoss <ignore_index = 7> (x, i)", [0, 7, 2, 4], 5),
}


@pytest.mark.parametrize("limits", [WEBGPU, CUDA], ids=["annotated", "operator of the CPU alone"])
@pytest.mark.parametrize("name", INDEXED)
def test_indices_outside_are_refused_by_the_cpu(name: str, limits: Limits, rng: np.random.Generator) -> None:
    """By the node in front of the one that a device runs, which gives the same for those within."""
    text, within, outside = INDEXED[name]
    model = model_of(
        f"g (float[4, 5] x, int64{list(np.shape(within))} i) => (y) {{ i_as_float = Cast <to = 1> (i) "
        f"x_rows = Gather (x, two) {text} }}",
        two=np.array([0, 1]),
    )
    converted = adapted(model, limits)
    onnx.checker.check_model(converted.model, full_check=True)
    checks = [node for node in converted.model.graph.node if node.name in converted.host]
    assert any(node.metadata_props for node in checks) == limits.annotations
    assert {*converted.host.values()} == {REFUSES}
    assert len(checks) == 1 + (name == "GatherND"), "one for each axis; the indices of x_rows are constant"
    x = rng.standard_normal((4, 5)).astype(np.float32)
    feeds: Arrays = {"x": x, "i": np.array(within)}
    for actual, expected in zip(outputs(converted.model, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)
    feeds["i"].flat[-1] = outside
    with pytest.raises(Exception, match=f"Name:'({'|'.join(map(re.escape, converted.host))})'"):
        outputs(converted.model, feeds)


@pytest.mark.parametrize("limits", [WEBGPU, CUDA])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_indices_of_any_shape_are_looked_up(kind: str, shape: tuple[int, ...], limits: Limits) -> None:
    model = model_of(f"g (float[4, 5] x, {kind}{list(shape) or ''} i) => (y) {{ y = Gather (x, i) }}")
    feeds = {"x": np.arange(20, dtype=np.float32).reshape(4, 5), "i": np.full(shape, -1, kind)}
    for actual, expected in zip(outputs(adapted(model, limits).model, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("limits", [WEBGPU, CUDA])
def test_indices_into_a_value_of_the_graph_around_are_looked_up(limits: Limits) -> None:
    """Two graphs deep: the length had not been known, and a device reads elsewhere without an error."""
    model = model_of("""g (float[4, 5] x, int64[N] i, bool c) => (float[N, 5] y) {
        y = If (c) <
            then_branch = then () => (float[N, 5] a) {
                w = Relu (x)
                a = If (c) <
                    then_branch = inner () => (float[N, 5] b) { b = Gather (w, i) },
                    else_branch = other () => (float[N, 5] d) { d = Neg (x) }>
            },
            else_branch = none () => (float[N, 5] e) { e = Neg (x) }>
    }""")
    assert [*adapted(model, limits).host.values()] == [REFUSES]


def test_names_of_constants_in_another_branch() -> None:
    """Branches may have equal names: what is a constant in one is data in the other."""
    model = model_of("""g (float[4, 5] x, int64[N] j, bool c) => (float[M, 5] y) {
        y = If (c) <
            then_branch = then () => (float[2, 5] a) { i = Constant <value_ints = [0, 1]> () a = Gather (x, i) },
            else_branch = other () => (float[N, 5] b) { i = Neg (j) b = Gather (x, i) }>
    }""")
    assert [*adapted(model, WEBGPU).host.values()] == [REFUSES]


def test_what_has_no_form_goes_to_the_host(rng: np.random.Generator) -> None:
    model = model_of(
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y, int64[1, 1, 2, 2] k) "
        "{ y, k = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }"
    )
    converted = adapted(model, WEBGPU)
    (node,) = converted.model.graph.node
    assert converted.host == {node.name: "its kernel gives no Indices"}
    assert [(e.key, e.value) for e in node.metadata_props] == [("layer_ann", HOST)]
    feeds = {"x": rng.standard_normal((1, 1, 4, 4)).astype(np.float32)}
    for actual, expected in zip(outputs(converted.model, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_array_equal(actual, expected)
    again = adapted(model, NO_LIMITS, host={node.name: "it failed"})
    assert again.host == {node.name: "it failed"}
    text = 'g (float[1, 1, 4] x) => (y) { y = Resize <mode = "linear", antialias = 1> (x, , s) }'
    smooth = model_of(text, s=np.array([1, 1, 0.5], np.float32))
    assert list(adapted(smooth, WEBGPU).host.values()) == ["its kernel has no antialias"]
    unknown = model_of(f"g (float[N] x, float[N] s) => (y) {{ z = Expand (x, k) y = {NORM} (z, s, s, s, s) }}")
    unknown.graph.input.append(onnx.helper.make_tensor_value_info("k", TensorProto.INT64, ["R"]))
    assert list(adapted(unknown, WEBGPU).host.values()) == ["its kernel has no training mode"]


def test_half_goes_to_the_host_where_there_is_none() -> None:
    model = model_of("g (float16[2] x, float[2] z) => (float16[2] y, float[2] q) { y = Relu (x) q = Relu (z) }")
    converted = adapted(model, Limits(float16=False))
    assert list(converted.host.values()) == ["the device has no arithmetic in float16"]
    assert not adapted(model, NO_LIMITS).host


def steps_of(model: ModelProto, graph: ob.TrainingGraph, batches: list[Arrays], rate: float = 1e-2) -> list[float]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    state: Arrays = graph.initial_state()
    losses: list[float] = []
    for batch in batches:
        loss, *new = session.run(
            [graph.loss, *graph.updates.values()],
            batch | state | {str(graph.learning_rate): np.array(rate, np.float32)},
        )
        losses.append(float(np.asarray(loss)))
        state = dict(zip(graph.updates, new, strict=True))
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("known", [True, False], ids=["fixed", "symbolic"])
def test_a_training_is_the_same(accumulate: int, known: bool, rng: np.random.Generator) -> None:
    """A classifier with BatchNormalization in training mode; branches where updates wait for several batches."""
    graph = ob.training_graph(
        classifier(), loss="softmax_cross_entropy", optimizer=ob.optimizers.AdamW(accumulate=accumulate)
    )
    rows = data()
    batches = [{name: array[k : k + 10] for name, array in rows.items()} for k in range(0, 60, 10)]
    lengths = {name: array.shape for name, array in batches[0].items()} if known else None
    converted = adapted(graph.model, WEBGPU, lengths=lengths)
    assert {*converted.host.values()} == {REFUSES}, "labels"
    assert ("If" in operators(converted.model)) == (accumulate > 1)
    losses = steps_of(converted.model, graph, batches)
    np.testing.assert_allclose(losses, steps_of(graph.model, graph, batches), rtol=2e-5)
    assert losses[0] != losses[-1]
    assert graph.model.functions, "the graph stays as it was"


def test_lengths_leave_no_arithmetic_on_shapes() -> None:
    case = CASES["unet_resize"]
    graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw")
    rows = {n: a[: case.batch] for n, a in case.rows(np.random.default_rng(1)).items()}
    converted = adapted(graph.model, WEBGPU, lengths={name: array.shape for name, array in rows.items()})
    assert not converted.host
    shapes = {"Shape", "Size", "NonZero", "Range", "ConstantOfShape"}
    assert shapes & operators(adapted(graph.model, NO_LIMITS).model)
    assert not shapes & operators(converted.model)
    wide = [v.name for v in converted.model.graph.value_info if v.type.tensor_type.elem_type == TensorProto.DOUBLE]
    assert not wide
    names = [node.name for node in all_nodes(converted.model.graph)]
    assert len(set(names)) == len(names)
    assert all(names)
    np.testing.assert_allclose(
        steps_of(converted.model, graph, [rows] * 3), steps_of(graph.model, graph, [rows] * 3), rtol=2e-5
    )


def test_what_constants_decide_keeps_its_digits() -> None:
    """(1 - 0.9999999)·x: in float32 alone that is 0 or 1.2e-7; and the coordinates that shapes decide are exact."""
    model = model_of(
        "g (float[3] x) => (float[3] y) { one = Constant <value = double {1}> () "
        "b = Constant <value = double {0.9999999}> () r = Sub (one, b) w = Cast <to = 11> (x) "
        "p = Mul (r, w) y = Cast <to = 1> (p) }"
    )
    converted = adapted(model, WEBGPU)
    (actual,) = outputs(converted.model, {"x": np.ones(3, np.float32)})
    np.testing.assert_allclose(actual, 1e-7, rtol=1e-6)
    kinds = {v.name: v.type.tensor_type.elem_type for v in converted.model.graph.value_info}
    assert TensorProto.DOUBLE not in kinds.values()


def test_numbers_in_float64_at_the_door_stay_so() -> None:
    model = model_of(
        "g (double d, float[2] x) => (double e, float[2] y) { e = Add (d, d) c = Cast <to = 1> (e) y = Mul (x, c) }"
    )
    converted = adapted(model, WEBGPU).model
    assert [v.type.tensor_type.elem_type for v in (*converted.graph.input, *converted.graph.output)] == [11, 1, 11, 1]
    e, y = outputs(converted, {"d": np.array(1.5), "x": np.ones(2, np.float32)})
    assert (e.dtype, float(e), y.tolist()) == (np.float64, 3.0, [3.0, 3.0])


def test_a_model_in_float64_stays_so() -> None:
    model = model_of("g (double[3] x) => (double[3] y) { y = Exp (x) }")
    converted = adapted(model, WEBGPU)
    x = np.array([0.1, 1, 2])
    np.testing.assert_array_equal(outputs(converted.model, {"x": x})[0], outputs(model, {"x": x})[0])


def test_defaults_that_nobody_feeds_are_constants_and_weights_stay() -> None:
    graph = ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer="adamw")
    converted = adapted(without_tensors(graph.model, graph.updates), NO_LIMITS).model
    inputs = {value.name for value in converted.graph.input}
    assert inputs == {*graph.inputs, *graph.updates, str(graph.learning_rate)}
