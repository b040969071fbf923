"""Native updates overwrite what they renew; what fails, diverges or is interrupted leaves or ends a step whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD, AdamW, Group
from onnx_backprop.training import buffers as module

RNG = np.random.default_rng(3)
X, T = RNG.standard_normal((6, 4)).astype(np.float32), RNG.standard_normal((6, 3)).astype(np.float32)


def network(head: str = "", outputs: str = "") -> ModelProto:
    """y = Relu(x·a)·b, and another head."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[N,4] x) => (float[N,3] y{outputs}) <float[4,5] a, float[5,3] b>
        {{ h = MatMul(x, a) r = Relu(h) y = MatMul(r, b) {head} }}""")
    for name, shape in (("a", (4, 5)), ("b", (5, 3))):
        drawn = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(drawn, name))
    return model


def both(optimizer: Any, model: ModelProto | None = None, **arguments: Any) -> tuple[ob.Trainer, ob.Trainer]:
    graph = ob.training_graph(model or network(), loss="mse", prediction="y", optimizer=optimizer, **arguments)
    return ob.Trainer(graph, learning_rate=0.1), ob.Trainer(graph, learning_rate=0.1, kernels="onnx")


def states_agree(one: ob.Trainer, other: ob.Trainer) -> None:
    assert one.steps == other.steps
    other_state = other.state()
    for name, value in one.state().items():
        np.testing.assert_allclose(value, other_state[name], rtol=1e-5, atol=1e-7, err_msg=name)


GROUPS = [Group(parameters=["b"], rate=0.5, weight_decay=0.0)]


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(),
        AdamW(),
        AdamW(clip_norm=0.1),
        AdamW(ema=0.9),
        pytest.param(AdamW(groups=GROUPS), id="two updates, the first of what the second's gradient reads"),
        pytest.param(SGD(momentum=0.9, groups=GROUPS, weight_decay=0.1), id="two formulas"),
    ],
)
def test_state_lies_in_memory_once(optimizer: Any) -> None:
    ours, plain = both(optimizer, gradient_norms=True)
    assert {"a", "b"} <= ours._buffers.in_place
    for name in ours._buffers.in_place:
        assert ours._buffers._sets[0][name] is ours._buffers._sets[1][name]
    for _ in range(3):
        assert ours.step(x=X, target=T) == pytest.approx(plain.step(x=X, target=T), rel=1e-5)
        states_agree(ours, plain)


def test_two_buffers_where_a_branch_updates() -> None:
    ours, plain = both(AdamW(accumulate=2))
    assert not ours._buffers.in_place
    for _ in range(5):
        ours.step(x=X, target=T)
        plain.step(x=X, target=T)
    states_agree(ours, plain)


def test_parameters_of_other_types_beside_them_keep_two_buffers() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N,4] x) => (float[N,3] y) <float[4,5] a, float16[5,3] b>
        { h = MatMul(x, a) k = Cast<to=10>(h) z = MatMul(k, b) y = Cast<to=1>(z) }""")
    for name, shape, kind in (("a", (4, 5), np.float32), ("b", (5, 3), np.float16)):
        drawn = np.random.default_rng(1).standard_normal(shape).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(drawn, name))
    ours, plain = both(AdamW(), model)
    assert not ours._buffers.in_place
    ours.step(x=X, target=T)
    plain.step(x=X, target=T)
    assert ours.steps == plain.steps == 1


@pytest.mark.parametrize(
    ("head", "outputs", "kept"),
    [("z = MatMul(r, b)", ", float[N,3] z", {"a", "b"}), ("i = ArgMax(b) z = Identity(i)", ", int64[1,3] z", {"a"})],
    ids=["a float output comes before the update", "another does not"],
)
def test_other_readers_of_a_parameter(head: str, outputs: str, kept: set[str]) -> None:
    ours, plain = both(AdamW(), network(head, outputs))
    assert ours._buffers.in_place & {"a", "b"} == kept
    for _ in range(3):
        ours.step(x=X, target=T)
        plain.step(x=X, target=T)
    states_agree(ours, plain)


@pytest.mark.parametrize("target", [np.full_like(T, np.inf), np.full_like(T, np.nan)], ids=["inf", "nan"])
def test_a_loss_that_is_not_finite_changes_nothing(target: np.ndarray) -> None:
    ours, _ = both(AdamW())
    ours.step(x=X, target=T)
    before = ours.state()
    with pytest.raises(FloatingPointError):
        ours.step(x=X, target=target)
    assert ours.steps == 1
    for name, value in ours.state().items():
        np.testing.assert_array_equal(value, before[name])
    ours.step(x=X, target=T)
    assert ours.steps == 2


def test_a_run_that_fails_changes_nothing() -> None:
    """The head fails at run time, for a batch whose length is not even."""
    ours, plain = both(AdamW(), network("s = Constant<value_ints=[2, -1]>() z = Reshape(y, s)", ", float[2,M] z"))
    ours.step(x=X, target=T)
    plain.step(x=X, target=T)
    before = ours.state()
    with pytest.raises(ob.InvalidArgumentError):
        ours.step(x=X[:5], target=T[:5])
    for name, value in ours.state().items():
        np.testing.assert_array_equal(value, before[name])
    ours.step(x=X, target=T)
    plain.step(x=X, target=T)
    states_agree(ours, plain)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_step_is_whole(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    ours, plain = both(AdamW())
    ours.step(x=X, target=T)
    plain.step(x=X, target=T)
    run = module.run_bound

    def interrupted(*arguments: Any) -> None:
        if when == "after":
            run(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_bound", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.step(x=X, target=T)
    monkeypatch.undo()
    if when == "after":
        plain.step(x=X, target=T)
    states_agree(ours, plain)
    ours.step(x=X, target=T)
    plain.step(x=X, target=T)
    states_agree(ours, plain)


def test_what_is_loaded_is_copied(tmp_path: Path) -> None:
    ours, _ = both(AdamW())
    ours.step(x=X, target=T)
    ours.save(tmp_path / "c.safetensors")
    content = (tmp_path / "c.safetensors").read_bytes()
    given = ours.state()
    kept = {name: value.copy() for name, value in given.items()}
    ours.set_state(given)
    ours.load(tmp_path / "c.safetensors")
    ours.step(x=X, target=T)
    assert (tmp_path / "c.safetensors").read_bytes() == content
    for name, value in given.items():
        np.testing.assert_array_equal(value, kept[name])


def test_a_graph_read_from_a_file_has_no_values_beside_the_trainers(tmp_path: Path) -> None:
    """What needs them says so; the evaluation model has them as inputs."""
    ob.training_graph(network(), loss="mse", prediction="y", optimizer="sgd").save(tmp_path / "g.onnx")
    graph = ob.Trainer(tmp_path / "g.onnx").graph
    for reads in (graph.initial_state, graph.initial_values, graph.inference_model, lambda: graph.save("never.onnx")):
        with pytest.raises(ob.InvalidArgumentError, match=r"TrainingGraph.load\(path\) has them"):
            reads()
    whole = ob.TrainingGraph.load(tmp_path / "g.onnx")
    runs = [ob.session(g.eval_model()) for g in (graph, whole)]
    feeds = {"x": X, "target": T}
    first, second = (s.run(["loss"], feeds | whole.initial_values()) for s in runs)
    np.testing.assert_array_equal(first, second)


COMPILING = """
import sys
import numpy as np, onnx_backprop as ob
from tests.onnx_backprop.training.test_in_place import both, states_agree, X, T
ours, plain = both(ob.optimizers.AdamW())
for n in (6, 5):
    ours.step(x=X[:n], target=T[:n]); plain.step(x=X[:n], target=T[:n])
    states_agree(ours, plain)
print("right")
"""


def test_the_run_that_finds_out_what_to_compile_changes_nothing(tmp_path: Path) -> None:
    """With an empty cache kernels answer zeros at first, and the step is repeated."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPILING]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("again", ["Relu(a)", "BatchNormalization<training_mode = 1>(a, s, b, m, v)"])
def test_a_step_that_fails_leaves_running_statistics(again: str, kernels: str) -> None:
    """onnxruntime renews them where they lie, unless the new ones are outputs of the graph."""
    outputs = "y, m2, v2" if again.startswith("Batch") else "y"
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        norm (float[N, 2] x) => (float[N, 2] y)
        <float[2] s = {{1.0, 1.0}}, float[2] b = {{0.0, 0.0}}, float[2] m = {{0.0, 0.0}}, float[2] v = {{1.0, 1.0}}>
        {{ a, m1, v1 = BatchNormalization<training_mode = 1>(x, s, b, m, v)  {outputs} = {again} }}""")
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="adam", untie=True), kernels=kernels)
    x = np.array([[1, 2], [3, 8]], np.float32)
    for target in (x * np.nan, x):
        before = trainer.state()
        with contextlib.suppress(FloatingPointError):
            trainer.step(x=x, target=target)
        changed = [name for name, value in trainer.state().items() if not np.array_equal(value, before[name])]
        assert {"m", "v"} <= set(changed) if target is x else not changed
