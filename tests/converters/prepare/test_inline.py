"""Files without functions: the same numbers, nothing of ours left, the lowest opset and IR version; and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, checker, defs, helper, numpy_helper, parser

import onnx_backprop as ob
from models import super_resolution, unet_resize
from onnx_backprop import artifacts
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.converters.prepare.writing.inline import inlined
from onnx_backprop.converters.training.optimizers import AdamW, Group
from onnx_backprop.opset.functions.overloads import NEEDED, NEEDS_DOMAIN, REFUSAL, REQUIREMENT
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.converters.training import classifier
from tests.support.gradient_checks import session_run

HEAD = '<ir_version: 10, opset_import: ["": 18]>'


def steps(graph: ob.TrainingGraph, feeds: dict[str, np.ndarray], count: int = 3) -> dict[str, np.ndarray]:
    """All outputs of the last of some steps."""
    run, state, results = session_run(graph.model), graph.initial_state(), {}
    names = [value.name for value in graph.model.graph.output]
    for _ in range(count):
        rate = {} if graph.learning_rate is None else {graph.learning_rate: np.array(0.01, np.float32)}
        results = dict(zip(names, run(feeds | state | rate), strict=True))
        state = {name: results[new] for name, new in graph.updates.items()}
    return results


def check_standard_operators(model: ModelProto) -> None:
    checker.check_model(model, full_check=True)
    assert not model.functions
    assert {o.domain for o in model.opset_import} == {node.domain for node in all_nodes(model)} == {""}


def as_low_as_it_goes(model: ModelProto) -> None:
    """One opset less would make another operator of some node."""
    version = model.opset_import[0].version
    since = {defs.get_schema(node.op_type, version).since_version for node in all_nodes(model)}
    assert version == max(since)
    assert model.ir_version == helper.find_min_ir_version_for(list(model.opset_import))


def images(channels: int, *names: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = [(2, channels, 8, 8), (2, channels, 16, 16) if "low" in names else (2, channels, 8, 8)]
    return {name: rng.random(shape).astype(np.float32) for name, shape in zip(names, shapes, strict=True)}


GRAPHS: dict[str, tuple[Callable[..., ob.TrainingGraph], dict[str, np.ndarray]]] = {
    "super resolution": (
        lambda **more: ob.training_graph(super_resolution.build(features=4), loss="mse", optimizer="adam", **more),
        images(1, "low", "target"),
    ),
    "u-net": (
        lambda **more: ob.training_graph(unet_resize.build(features=4), loss="bce_with_logits", **more),
        images(1, "image", "target"),
    ),
    "state of every kind, functions inside branches": (
        lambda **more: ob.training_graph(
            classifier.network(),
            loss="softmax_cross_entropy",
            optimizer=AdamW(accumulate=2, ema=0.9, clip_norm=1.0, groups=[Group(parameters=["head.*"], rate=0.5)]),
            training_mode=True,
            **more,
        ),
        classifier.batch(),
    ),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_the_same_numbers_in_standard_operators(case: str, tmp_path: Path) -> None:
    build, feeds = GRAPHS[case]
    plain, graph = build(), build(inline=True)
    check_standard_operators(graph.model)
    as_low_as_it_goes(graph.model)
    expected = steps(plain, feeds)
    for name, value in steps(graph, feeds).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
    graph.save(tmp_path / "inlined.onnx")
    read = ob.TrainingGraph.load(tmp_path / "inlined.onnx")
    assert read == graph
    stated = [field.name for field in dataclasses.fields(read) if field.name != "model"]
    assert {name: getattr(read, name) for name in stated} == {name: getattr(plain, name) for name in stated}
    keys = {entry.key: entry.value for entry in read.model.metadata_props}
    assert keys == {e.key: e.value for e in plain.model.metadata_props if e.key != REQUIREMENT}
    for part in (read.eval_model(), read.inference_model()):
        check_standard_operators(part)


def test_what_a_training_loop_takes_out_of_it() -> None:
    """Dropout and statistics go into inference mode; a Trainer and training_info take it as any other."""
    build, feeds = GRAPHS["state of every kind, functions inside branches"]
    plain, graph = build(), build(inline=True)
    x = {"x": feeds["x"]}
    for part in ("inference_model", "eval_model"):
        fed = x if part == "inference_model" else feeds
        want, got = (session_run(getattr(g, part)())(fed) for g in (plain, graph))
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-6)
    losses = [[ob.Trainer(g, seed=2).step(feeds) for _ in range(2)] for g in (plain, graph)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    held = ob.to_training_info(graph)
    assert not held.functions
    checker.check_model(held, full_check=True)
    assert ob.from_training_info(held).updates == graph.updates


def test_training_nodes_of_the_standard() -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        g (float R, int64 T, float[2] x, float[2] v, float[2] w) => (float[2] x1, float[2] v1, float[2] w1) {
            y = Mul(x, x)
            dx = ai.onnx.preview.training.Gradient<xs = ["x"], y = "y">(x)
            x1, v1, w1 = ai.onnx.preview.training.Adam<alpha = 0.5>(R, T, x, dx, v, w)
        }"""
    feeds = {name: np.array([1.0, -2.0], np.float32) ** 2 for name in "xvw"}
    feeds |= {"R": np.array(0.1, np.float32), "T": np.array(3)}
    plain, model = (ob.expand_gradients(parser.parse_model(text), inline=inline) for inline in (False, True))
    check_standard_operators(model)
    for a, b in zip(session_run(plain)(feeds), session_run(model)(feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_old_opset_comes_back() -> None:
    """What is converted to opset 18 first, and needs nothing of it, ends in an older one."""
    model = parser.parse_model('<ir_version: 3, opset_import: ["": 8]> g (float[2] x) => (float[2] y) { y = Tanh(x) }')
    result = ob.backward(model, wrt=["x"], inline=True)
    check_standard_operators(result)
    as_low_as_it_goes(result)
    assert (result.opset_import[0].version, result.ir_version) == (14, 7)  # Mul and Sub of bfloat16
    assert session_run(result)({"x": np.zeros(2, np.float32), "y_grad": np.ones(2, np.float32)})[1].tolist() == [1, 1]


def test_operators_of_others_keep_their_version() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "somebody": 3, "nobody": 2, "ai.onnx.ml": 5]>
        g (float[2] x) => (float[2] z, float[2] b) { y = somebody.Own(x)  z = Neg(y)  b = ai.onnx.ml.Binarizer(x) }"""
    )
    result = inlined(model)
    assert {o.domain: o.version for o in result.opset_import} == {"": 13, "somebody": 3, "ai.onnx.ml": 1}
    assert result.ir_version == 10  # nobody knows what somebody's operator needs


def test_training_info_has_a_say() -> None:
    model = parser.parse_model(f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Neg(x) }}")
    assert inlined(model).opset_import[0].version == 13
    step = parser.parse_graph("step (float[2] x) => (float[1] m) { m = ReduceMean(x)  g = unknown.Gradient(m) }")
    model.training_info.add().algorithm.CopyFrom(step)
    result = inlined(model)
    assert result.training_info == model.training_info
    assert {o.domain: o.version for o in result.opset_import} == {"": 18}


def test_large_weights_are_not_copied_on_the_way() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "own": 1]>
        g (float[2, 80] x) => (float[2, 80] y) { y = own.product(x, w) }
        <domain: "own", opset_import: ["": 18]> product (a, b) => (c) { c = MatMul(a, b) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((80, 80), np.float32), "w"))
    before = model.SerializeToString()
    result = inlined(model)
    assert model.SerializeToString() == before
    assert [(n.op_type, *n.input) for n in result.graph.node] == [("MatMul", "x", "w")]
    assert (result.graph.initializer, [v.name for v in result.graph.input]) == (model.graph.initializer, ["x"])


@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_code_of_this_package_is_refused(kernels: str) -> None:
    model = unet_resize.build(features=2)
    message = rf"inline: kernels '{kernels}' .* Use kernels 'onnx'"
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.backward(model, kernels=kernels, inline=True)
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(model, loss="mse", kernels=kernels, inline=True)
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.expand_gradients(model, kernels=kernels, inline=True)


def test_artifacts(tmp_path: Path) -> None:
    artifacts.generate_artifacts(
        classifier.network(), loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path, inline=True,
    )  # fmt: skip
    for name in ("training_model", "eval_model", "optimizer_model"):
        check_standard_operators(onnx.load(tmp_path / f"{name}.onnx"))


# --- files with overloads


def test_overloads_state_what_they_need() -> None:
    """The last function of a name is what older versions of onnxruntime run for each node; nothing else calls it."""
    model = ob.training_graph(super_resolution.build(features=4), loss="mse", optimizer="adam").model
    checker.check_model(model, full_check=True)
    assert {e.key: e.value for e in model.metadata_props}[REQUIREMENT] == ">=1.27"
    last = {(f.domain, f.name): f for f in model.functions}
    overloaded = {(f.domain, f.name) for f in model.functions if f.overload}
    assert (ob.DOMAIN, "ConvolutionBackwardWeights") in overloaded
    for key, function in last.items():
        assert (function.overload == REFUSAL) == (key in overloaded)
    for function in filter(lambda f: f.overload == REFUSAL, last.values()):
        assert [(n.domain, n.op_type) for n in function.node] == [(NEEDS_DOMAIN, NEEDED)]
    assert REFUSAL not in {node.overload for node in model.graph.node}


def test_without_overloads_there_is_nothing_to_state() -> None:
    one = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { a = Softmax(x)  y = Softmax(a) }'
    )
    two = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[2, 2] x) => (float[2, 2] y) { a = Softmax<axis = 0>(x)  y = Softmax(a) }"""
    )
    simple, overloaded = (ob.backward(model, wrt=["x"]) for model in (one, two))
    for model, stated in ((simple, False), (overloaded, True), (ob.use_kernels(overloaded, "onnx"), True)):
        assert (REQUIREMENT in {e.key for e in model.metadata_props}) == stated
        assert (NEEDS_DOMAIN in {o.domain for o in model.opset_import}) == stated
        assert [f.overload for f in model.functions].count(REFUSAL) == stated
    prepared = prepare(overloaded)
    assert not prepared.functions
    assert {o.domain for o in prepared.opset_import} == {"", ob.DOMAIN}


@pytest.mark.parametrize("op", ["Softplus", "Selu", "HardSigmoid", "HardSwish"])
def test_what_onnxruntime_runs_by_its_body_alone_keeps_the_opset_of_the_body(op: str) -> None:
    """Found by `make search`: in float64 it has no kernel of these, and a lower opset has no body."""
    model = parser.parse_model(f"{HEAD} g (double[N] x) => (double[N] y) {{ y = {op}(x) }}")
    x = {"x": np.array([0.25, 1.5]), "y_grad": np.ones(2)}
    plain, written = (session_run(ob.backward(model, wrt=["x"], inline=inline))(x) for inline in (False, True))
    np.testing.assert_array_equal(written, plain)
    single = parser.parse_model(f"{HEAD} g (float[N] x) => (float[N] y) {{ y = {op}(x) }}")
    assert inlined(single).opset_import[0].version < 18
