"""The Trainer in JavaScript, in Node on onnxruntime-web's wasm, beside the Trainer in Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_backprop as ob
from onnx_backprop.__main__ import main
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.web.bundle import bundle
from onnx_backprop.web.site import write_site
from tests.onnx_backprop.web import javascript
from tests.onnx_backprop.web.javascript import CASES

STEPS = 20
DECODER = Path(__file__).parents[2] / "data" / "text" / "model.onnx"
RATE = 1e-3


@pytest.mark.parametrize("name", CASES)
def test_losses_in_wasm_are_those_of_python(name: str, tmp_path: Path) -> None:
    """Rows of one seed: on others AdamW, which divides by small gradients, makes 5e-5 of an error of 2e-7 in a pixel."""
    case = CASES[name]
    rows = case.rows(np.random.default_rng(1))
    graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw", inline=True)
    count = len(rows["image"])
    write_site(tmp_path, graph, rows, train=count, title=name, batch=case.batch, learning_rate=RATE)
    result = javascript.steps(tmp_path, STEPS)

    trainer = ob.Trainer(graph, learning_rate=RATE, kernels=None)
    batches = [{n: a[i : i + case.batch] for n, a in rows.items()} for i in range(0, STEPS * case.batch, case.batch)]
    losses = [trainer.step(batch) for batch in batches]
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert result["refused"] is None

    # what is downloaded is a model of its own, with the weights that the last step has left
    trained = tmp_path / "trained.onnx"
    onnx.checker.check_model(onnx.load(trained), full_check=True)
    weights = {name: value for name, value in trainer.state().items() if name in graph.forward_state}
    downloaded, ours = (
        np.asarray(
            onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
                None, {"image": batches[0]["image"]}
            )[0]
        )
        for model in (trained, graph.inference_model(weights).SerializeToString())
    )
    # AdamW takes a whole step along a gradient that is rounding error alone: weights differ more than losses do
    np.testing.assert_allclose(np.ravel(result["predicted"]), np.ravel(downloaded), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(downloaded, ours, rtol=1e-2, atol=1e-2)
    assert result["evaluation"] == pytest.approx(trainer.evaluate(batches[0]), rel=1e-3)


@pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")  # that it is a decoder
@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "accuracy_level 4"])
def test_adapters_of_a_decoder_of_integers(rounds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of genai's builder: MatMulNBits in wasm. What rounds x to 8 bits there rounds a little otherwise."""
    base = onnx.load(DECODER)
    for node in base.graph.node:
        assign(node.attribute, [a for a in node.attribute if rounds or a.name != "accuracy_level"])
    onnx.save(base, tmp_path / "model.onnx")
    ids = np.random.default_rng(0).integers(3, 320, (40, 16))
    ids[:, 8:] = ids[:, :8]
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=ids)
    given = ["--data", str(tmp_path / "data.npz"), "--evaluation", str(tmp_path / "data.npz"), "--batch-size", "4"]
    options = ["--loss", "next_token", "--lora", "*qkv*", "*proj*", "--rank", "4", "--learning-rate", "1e-2"]
    assert main(["web", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "site"), *given, *options]) == 0
    assert "5 adapters" in capsys.readouterr().out
    result = javascript.steps(tmp_path / "site", STEPS)

    adapted = ob.lora(tmp_path / "model.onnx", ["*qkv*", "*proj*"], rank=4, alpha=16)
    graph = ob.training_graph(
        adapted.model, loss=ob.losses.NextToken(), optimizer="adamw", trainable=adapted.trainable, inline=True
    )
    trainer = ob.Trainer(graph, learning_rate=1e-2, kernels=None)
    batches = [ids[i : i + 4] for i in range(0, len(ids), 4)] * 2
    losses = [trainer.step(input_ids=batch, labels=batch) for batch in batches]
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-3 if rounds else 1e-5)
    assert losses[-1] < losses[0]
    assert result["refused"].startswith("expected input_ids, attention_mask, past_key_values.0.key, ")
    downloaded = onnx.load(tmp_path / "site" / "trained.onnx")
    assert [v.name for v in downloaded.graph.output] == [v.name for v in base.graph.output]
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in downloaded.graph.initializer}
    for name, value in trainer.parameters().items():
        assert np.linalg.norm(weights[name] - value) < (0.3 if rounds else 0.1) * np.linalg.norm(value), name
    assert json.loads((tmp_path / "site" / "site.json").read_text())["own"] is None, "which would need its cache"


def test_a_step_that_is_refused_leaves_everything_as_it_was(tmp_path: Path, rng: np.random.Generator) -> None:
    case = CASES["cnn"]
    graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw", inline=True)
    write_site(tmp_path, graph, case.rows(rng), train=640, title="cnn", batch=8, learning_rate=RATE)
    messages = json.loads(javascript.run("refusals.mjs", javascript.WEB / "trainer.js", javascript.runtime(), tmp_path))
    assert messages["unchanged"] is True
    assert messages["resumed"] == messages["gone on"]
    assert messages["label"] == "'labels': expected classes 0 … 9, got 10 at 0. Number the classes from 0"
    assert messages["negative"] == "'labels': expected classes 0 … 9, got -1 at 0. Number the classes from 0"
    assert messages["half"] == "'labels' has type int64, got 0.5. Give it whole numbers"
    assert messages["rows"] == "'labels': expected the shape [N], got [3], axis 0 being 8 long"
    assert messages["channels"] == "'image': expected the shape [N,1,H,W], got [8,2,8,4], axis 1 being 1 long"
    assert messages["name"] == "expected image, labels, got 'picture'. Leave it out"
    assert messages["missing"] == "expected image, labels; 'labels' missing"
    assert messages["rate"] == "learningRate: expected 0 or more, got NaN"
    assert messages["state"] == "the state is of another graph: 'Conv_1.weight' is expected as float32[16,1,3,3]"
    assert messages["diverged"].startswith(
        "the loss of step 2 is NaN: its weights were not taken. Lower the learning rate"
    )


def test_a_state_in_every_form(tmp_path: Path, rng: np.random.Generator) -> None:
    """Statistics of BatchNormalization, masks of Dropout, running means, accumulated gradients: as in Python."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[N,6] x) => (float[N,4] y)
          <float[6,4] w = {1,-2,3,-4,5,-6,7,-8,9,-1,2,-3,4,-5,6,-7,8,-9,1,-2,3,-4,5,-6}, float[4] s = {1,1,1,1},
           float[4] b = {0,0,0,0}, float[4] m = {0,0,0,0}, float[4] v = {1,1,1,1}, float ratio = {0.25}, bool on = {1}>
        { h = MatMul (x, w)
          n, m1, v1 = BatchNormalization <training_mode = 1> (h, s, b, m, v)
          y, mask = Dropout (n, ratio, on) }""")
    optimizer = ob.optimizers.AdamW(clip_norm=1.0, accumulate=2, ema=0.9)
    graph = ob.training_graph(model, loss="mse", optimizer=optimizer, training_mode=True, inline=True)
    assert {"random_state", "micro_step"} <= set(graph.updates)
    rows = {n: rng.standard_normal((80, k)).astype(np.float32) for n, k in (("x", 6), ("target", 4))}
    write_site(tmp_path, graph, rows, train=80, title="every form", batch=8, learning_rate=RATE)
    result = javascript.steps(tmp_path, 10)
    trainer = ob.Trainer(graph, learning_rate=RATE, kernels=None)
    losses = [trainer.step({n: a[i : i + 8] for n, a in rows.items()}) for i in range(0, 80, 8)]
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)


def test_the_guard_of_a_compiled_step_is_fed(tmp_path: Path, rng: np.random.Generator) -> None:
    """training.onnx of `compile_plugin` has one input more, without which it does not run."""
    case = CASES["cnn"]
    graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw", inline=True)
    write_site(tmp_path, graph, case.rows(rng), train=640, title="cnn", batch=8, learning_rate=RATE)
    step = onnx.load(tmp_path / "model" / "training.onnx")
    wanted = onnx.helper.make_tensor_value_info("update_guard", onnx.TensorProto.FLOAT, [])
    step.graph.input.append(wanted)
    loss = graph.loss
    for node in step.graph.node:
        assign(node.output, [f"{name}/before" if name == loss else name for name in node.output])
        assign(node.input, [f"{name}/before" if name == loss else name for name in node.input])
    step.graph.node.append(onnx.helper.make_node("Mul", [f"{loss}/before", "update_guard"], [loss]))
    before = javascript.steps(tmp_path, 3)["losses"]
    onnx.save(step, tmp_path / "model" / "training.onnx")
    about = tmp_path / "model" / "training.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"guard": "update_guard"}))
    assert javascript.steps(tmp_path, 3)["losses"] == before


def test_what_javascript_cannot_hold_is_refused() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float16[N,2] x) => (float16[N,2] y) <float16[2] w = {1,2}> { y = Mul (x, w) }""")
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", trainable=["w"], inline=True)
    with pytest.raises(InvalidArgumentError, match="'w' has type float16, which JavaScript has no arrays of"):
        bundle(graph)
