"""The example models: valid, of the promised shapes at any size, and trainable through `training_graph`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from models import fpn, fsrcnn, graphs, super_resolution, unet_conv_transpose, unet_resize
from tests.support.adjoint import forward_session, run

SEED = 20240611


@dataclass(frozen=True)
class Example:
    """A builder, the channels it takes and gives, how much larger its output is, and what its sizes divide by."""

    build: Callable[..., ModelProto]
    channels: tuple[int, int]
    scale: int = 1
    multiple: int = 1
    loss: str = "mse"


EXAMPLES = {
    "fsrcnn": Example(fsrcnn.build, (1, 1), scale=3),
    "unet_conv_transpose": Example(unet_conv_transpose.build, (1, 1), multiple=4, loss="bce_with_logits"),
    "unet_resize": Example(unet_resize.build, (1, 1), multiple=4, loss="bce_with_logits"),
    "fpn": Example(fpn.build, (3, 4), multiple=8, loss="softmax_cross_entropy"),
    "super_resolution": Example(super_resolution.build, (1, 1), scale=2),
}

every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())


def image(example: Example, batch: int, height: int, width: int, seed: int = SEED) -> np.ndarray:
    """Random pixels; height and width count multiples of what the model needs."""
    shape = (batch, example.channels[0], height * example.multiple, width * example.multiple)
    return np.random.default_rng(seed).random(shape, np.float32)


def answer(model: ModelProto, x: np.ndarray) -> np.ndarray:
    session = forward_session(model)
    (y,) = run(session, {session.get_inputs()[0].name: x})
    return y


@every_example
def test_is_a_valid_model_of_symbolic_sizes(example: Example) -> None:
    model = example.build()
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert model.ir_version == 10
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    for value, channels in zip((model.graph.input[0], model.graph.output[0]), example.channels, strict=True):
        batch, depth, height, width = value.type.tensor_type.shape.dim
        assert depth.dim_value == channels
        assert batch.dim_param
        assert height.dim_param != width.dim_param


@every_example
@pytest.mark.parametrize(("batch", "height", "width"), [(1, 3, 5), (2, 4, 1)])
def test_runs_at_several_sizes(example: Example, batch: int, height: int, width: int) -> None:
    x = image(example, batch, height, width)
    y = answer(example.build(), x)
    assert y.dtype == np.float32
    assert y.shape == (batch, example.channels[1], example.scale * x.shape[2], example.scale * x.shape[3])
    assert np.isfinite(y).all()
    assert y.std() > 1e-3, "the input leaves no trace in the output"


@every_example
def test_the_seed_decides_the_weights(example: Example) -> None:
    one, same, other = (example.build(seed=seed).SerializeToString() for seed in (1, 1, 2))
    assert one == same
    assert one != other


@every_example
def test_gradients_are_the_slopes_of_the_loss(example: Example) -> None:
    """<d loss / d p, v> against (loss(p + h·v) - loss(p - h·v)) / 2h, v random, for each parameter p."""
    graph = ob.training_graph(example.build(seed=3), loss=example.loss)
    weights = {tensor.name for tensor in example.build().graph.initializer}
    assert set(graph.parameters) == weights, "every weight learns, and nothing else does"
    session = ob.session(graph.model)
    rng = np.random.default_rng(SEED)
    # weights that start at zero would keep gradients from what lies before them
    values = {name: v + rng.normal(0, 0.05, v.shape).astype(np.float32) for name, v in graph.initial_values().items()}
    x = image(example, 2, 24 // example.multiple, 16 // example.multiple)
    y = answer(example.build(), x)
    shape = y.shape if example.loss != "softmax_cross_entropy" else (y.shape[0], *y.shape[2:])
    target = rng.random(shape, np.float32) if shape == y.shape else rng.integers(0, y.shape[1], shape)
    data_name, target_name = graph.inputs
    feeds = {data_name: x, target_name: target}
    loss, *gradients = run_some(session, [graph.loss, *graph.parameters.values()], {**feeds, **values})
    wrong = []
    for name, g in zip(graph.parameters, gradients, strict=True):
        h = 2e-3 / np.sqrt(g.size)
        misses = []
        for _ in range(3):
            v = rng.standard_normal(g.shape).astype(np.float32)
            above, below = (
                float(run_some(session, [graph.loss], {**feeds, **values, name: values[name] + np.float32(s) * v})[0])
                for s in (h, -h)
            )
            misses.append(abs((above - below) / (2 * h) - float(np.vdot(g, v))))
        norm, rounding = float(np.linalg.norm(g)), 4 * float(np.finfo(np.float32).eps) * abs(float(loss)) / h
        assert norm > rounding, f"{name}: a gradient of {norm:.3g} cannot be told from rounding"
        # the median: a step over the kink of a Relu or MaxPool spoils one direction, a wrong gradient all of them
        if np.median(misses) > 0.02 * norm + rounding:
            wrong.append(f"{name}: |g| {norm:.3g}, slopes differ by {', '.join(f'{m:.3g}' for m in misses)}")
    assert not wrong, f"seed {SEED}: " + "; ".join(wrong)


def run_some(session: onnxruntime.InferenceSession, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(value) for value in session.run(names, feeds)]


def attributes(model: ModelProto, op_type: str) -> list[dict[str, object]]:
    """The attributes of every node of one operator, strings decoded."""
    collected = []
    for node in model.graph.node:
        if node.op_type == op_type:
            given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            collected.append({k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()})
    return collected


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_fsrcnn_enlarges_by_one_asymmetric_transposed_convolution(scale: int) -> None:
    model = fsrcnn.build(scale=scale, mappings=2)
    x = image(EXAMPLES["fsrcnn"], 1, 5, 7)
    assert answer(model, x).shape == (1, 1, 5 * scale, 7 * scale)
    (up,) = attributes(model, "ConvTranspose")
    assert up["strides"] == [scale, scale]
    assert up["pads"] == [4] * 4
    assert up.get("output_padding", [0, 0]) == [scale - 1] * 2
    assert len(attributes(model, "PRelu")) == 5


def test_unet_resize_interpolates_linearly_between_pixel_centres() -> None:
    ups = attributes(unet_resize.build(levels=3), "Resize")
    assert ups == [{"mode": "linear", "coordinate_transformation_mode": "half_pixel"}] * 3


def test_fpn_repeats_pixels_as_pytorch_exports_it() -> None:
    ups = attributes(fpn.build(), "Resize")
    assert len(ups) == 5
    for up in ups:
        assert (up["mode"], up["coordinate_transformation_mode"], up["nearest_mode"]) == (
            "nearest",
            "asymmetric",
            "floor",
        )


def test_unet_conv_transpose_halves_the_channels_on_the_way_up() -> None:
    model = unet_conv_transpose.build(features=4, levels=3)
    shapes = [tuple(t.dims) for t in model.graph.initializer if t.name.startswith("ConvTranspose") and len(t.dims) == 4]
    assert shapes == [(32, 16, 2, 2), (16, 8, 2, 2), (8, 4, 2, 2)]
    counts = Counter(node.op_type for node in model.graph.node)
    assert (counts["MaxPool"], counts["Concat"], counts["Conv"]) == (3, 3, 15)


@pytest.mark.parametrize(
    ("build", "kept"),
    [(unet_conv_transpose.build, "Concat"), (unet_resize.build, "Add"), (fpn.build, "Add")],
    ids=["unet_conv_transpose", "unet_resize", "fpn"],
)
def test_other_sizes_fail_where_the_levels_meet(build: Callable[..., ModelProto], kept: str) -> None:
    model = build()
    channels = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    with pytest.raises(Exception, match=kept):
        answer(model, np.zeros((1, channels, 18, 18), np.float32))


def test_weights_have_the_deviation_of_the_docstring() -> None:
    net = graphs.Network("wide", seed=SEED)
    x = net.conv_transpose(net.conv(net.input("x", 32), 64, kernel=5), 32, kernel=4, scale=2, pad=1)
    weights = {t.name: numpy_helper.to_array(t) for t in net.model("y", x).graph.initializer}
    assert weights["Conv_1.weight"].std() == pytest.approx(np.sqrt(2 / (32 * 25)), rel=0.02)
    assert weights["ConvTranspose_1.weight"].std() == pytest.approx(2 * np.sqrt(2 / (64 * 16)), rel=0.02)
    assert not weights["Conv_1.bias"].any()


def test_layers_that_do_not_fit_are_refused() -> None:
    net = graphs.Network("wrong", seed=0)
    x = net.input("x", 2)
    with pytest.raises(ValueError, match="odd kernel.*got 4"):
        net.conv(x, 3, kernel=4)
    with pytest.raises(ValueError, match=r"kernel 5 with pad 1 needs output_padding -1 for scale 2, expected 0 … 1"):
        net.conv_transpose(x, 3, kernel=5, scale=2, pad=1)
    with pytest.raises(ValueError, match="output_padding 3 for scale 2"):
        net.conv_transpose(x, 3, kernel=5, scale=2, pad=3)
    with pytest.raises(ValueError, match="equal channels, got 2 and 5"):
        net.add(x, net.conv(x, 5, kernel=1))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "super_resolution"])
def test_the_command_writes_the_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = EXAMPLES[name].build
    path = tmp_path / "new" / "model.onnx"
    assert graphs.main(build, ["-o", str(path), "--seed", "5"]) == 0
    assert path.read_bytes() == build(seed=5).SerializeToString()
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"], "no temporary file stays"
    assert f"written: {path}" in capsys.readouterr().out


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        graphs.main(fsrcnn.build, ["-o", str(tmp_path), "--seed", "0"])  # a folder
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        graphs.main(fsrcnn.build, ["-o", str(tmp_path / "model.onnx"), "--seed", "-1"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")

    def write_half() -> None:
        with graphs.replacing(path) as temporary:
            temporary.write_text("half of the new")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
