"""Weights beside a model: mapped, in memory once, trained beside and exported, whatever happens to their files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.opset.core import mapped

WIDTH, LAYERS = 64, 3
Array = np.ndarray


@pytest.fixture(autouse=True)
def everything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LEAST_MAPPED", 0)
    monkeypatch.setattr(mapped, "LEAST_TENSOR", 1024)


def weights(dtype: type = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {f"w{n}": (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(dtype) for n in range(LAYERS)}


def refer(name: str, array: Array, location: str, offset: int, length: int | None = None) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": array.nbytes if length is None else length}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def network(tensors: list[TensorProto], kind: int = TensorProto.FLOAT) -> ModelProto:
    """y = tanh(tanh(x W0) W1) W2, the bias of each layer inside the model file."""
    nodes, h = [], "x"
    for n in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [h, f"w{n}"], [f"p{n}"], f"layer{n}"))
        nodes.append(helper.make_node("Add", [f"p{n}", f"b{n}"], [f"s{n}"]))
        h = "y" if n == LAYERS - 1 else f"h{n}"
        nodes.append(helper.make_node("Identity" if h == "y" else "Tanh", [f"s{n}"], [h]))
    values = [helper.make_tensor_value_info(name, kind, ["batch", WIDTH]) for name in "xy"]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    biases = [numpy_helper.from_array(np.linspace(0, 0.1, WIDTH).astype(dtype), f"b{n}") for n in range(LAYERS)]
    graph = helper.make_graph(nodes, "network", values[:1], values[1:], [*tensors, *biases])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def beside(folder: Path, gap: int = 64, files: int = 1, dtype: type = np.float32) -> Path:
    """The network with its weights in files beside it, `gap` bytes in front of each."""
    content: dict[str, bytes] = {}
    tensors = []
    for n, (name, array) in enumerate(weights(dtype).items()):
        file = f"weights{n % files}.bin"
        before = content.get(file, b"") + b"\xff" * gap
        tensors.append(refer(name, array, file, len(before)))
        content[file] = before + array.tobytes()
    for file, data in content.items():
        (folder / file).write_bytes(data)
    path = folder / "network.onnx"
    onnx.save(network(tensors, tensors[0].data_type), path)
    return path


def in_memory() -> ModelProto:
    return network([numpy_helper.from_array(array, name) for name, array in weights().items()])


def batch(dtype: type = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((5, WIDTH)).astype(dtype) for name in ("x", "target")}


def adapted(model: ModelProto | Path, **options: object) -> tuple[ob.LoraModel, ob.Trainer]:
    lora = ob.lora(model, ["w*"], rank=2)
    graph = ob.training_graph(lora.model, loss="mse", trainable=lora.trainable, optimizer="adamw")
    return lora, ob.Trainer(graph, learning_rate=0.05, **options)


def forward(path: Path | ModelProto) -> Array:
    return np.asarray(ob.session(path).run(None, {"x": batch()["x"]})[0])


def is_reference(model: ModelProto) -> list[bool]:
    names = [*(f"w{n}" for n in range(LAYERS)), "q"]
    return [t.data_location == TensorProto.EXTERNAL for t in model.graph.initializer if t.name in names]


@pytest.mark.parametrize(("gap", "files"), [(64, 1), (0, 2), (4, 1), (13, 3)])
def test_lora_takes_the_steps_of_a_model_in_memory(tmp_path: Path, gap: int, files: int) -> None:
    """Wherever in a file a tensor begins: it is copied where kernels could not read it."""
    lora, trainer = adapted(beside(tmp_path, gap, files))
    _, other = adapted(in_memory())
    assert is_reference(lora.model) == is_reference(trainer.graph.model) == [True] * LAYERS
    assert is_reference(other.graph.model) == [False] * LAYERS
    for _ in range(5):
        assert trainer.step(batch()) == pytest.approx(other.step(batch()), rel=1e-5)
    assert trainer.evaluate(batch()) == pytest.approx(other.evaluate(batch()), rel=1e-5)
    trainer.export(tmp_path / "out.onnx")
    other.export(tmp_path / "other.onnx")
    np.testing.assert_allclose(forward(tmp_path / "out.onnx"), forward(tmp_path / "other.onnx"), rtol=1e-4, atol=1e-5)
    merged = lora.merge(trainer.parameters())
    np.testing.assert_allclose(forward(merged), forward(tmp_path / "other.onnx"), rtol=1e-4, atol=1e-5)
    assert is_reference(merged) == [False] * LAYERS  # so that onnx.save writes all of it


def test_all_weights_are_trained_as_those_of_a_model_in_memory(tmp_path: Path) -> None:
    trainers = [
        ob.Trainer(ob.training_graph(model, loss="mse", optimizer="adamw"), learning_rate=0.01)
        for model in (beside(tmp_path), in_memory())
    ]
    for _ in range(3):
        one, other = (trainer.step(batch()) for trainer in trainers)
        assert one == pytest.approx(other, rel=1e-6)
    (first := tmp_path / "network.onnx").unlink()  # nothing is read from there any more
    for name, value in trainers[0].parameters().items():
        np.testing.assert_allclose(value, trainers[1].parameters()[name], rtol=1e-5, atol=1e-6)
    trainers[0].export(first)
    assert trainers[1].evaluate(batch()) == pytest.approx(
        np.square(forward(first) - batch()["target"]).mean(), rel=1e-4
    )


def test_a_weight_of_products_is_fed_where_it_lies(tmp_path: Path) -> None:
    _, trainer = adapted(beside(tmp_path, gap=64))
    tensors = {tensor.name: tensor for tensor in trainer.graph.model.graph.initializer}
    for name in weights():
        assert trainer._frozen[name].data_ptr() == mapped.to_array(tensors[name]).ctypes.data


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_float_types(tmp_path: Path, kind: type) -> None:
    lora, trainer = adapted(beside(tmp_path, dtype=kind))
    assert is_reference(lora.model) == [True] * LAYERS
    y = batch(np.float64)["x"]
    for n in range(LAYERS):
        y = y @ weights(kind)[f"w{n}"].astype(np.float64) + np.linspace(0, 0.1, WIDTH)
        y = np.tanh(y) if n < LAYERS - 1 else y
    loss = np.square(y - batch(np.float64)["target"]).mean()
    assert trainer.step(batch(kind)) == pytest.approx(loss, rel=3e-3 if kind is np.float16 else 1e-10)


def test_convolutions_keep_their_weights_as_constants(tmp_path: Path) -> None:
    """onnxruntime arranges them for its kernels; they come from the file too."""
    kernel = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32)
    (tmp_path / "k.bin").write_bytes(kernel.tobytes())
    value = [helper.make_tensor_value_info(name, 1, ["n", 8, 6, 6]) for name in "xy"]
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["h"], pads=[1] * 4),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "small"], ["y"]),
    ]
    small = numpy_helper.from_array(np.eye(8, dtype=np.float32).reshape(8, 8, 1, 1), "small")
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], [refer("k", kernel, "k.bin", 0), small])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal((2, 8, 6, 6)).astype(np.float32) for name in ("x", "target")}
    losses = []
    for source in (tmp_path / "m.onnx", onnx.load(tmp_path / "m.onnx")):
        graph = ob.training_graph(source, loss="mse", trainable=["small"], optimizer="sgd")
        trainers = [ob.Trainer(graph), ob.Trainer(graph, session_options=onnxruntime.SessionOptions())]
        losses += [[t.step(feeds), t.evaluate(feeds), t.step(feeds)] for t in trainers]
    np.testing.assert_allclose(losses, [losses[-1]] * 4, rtol=1e-5)


def packed(folder: Path) -> Path:
    """A product with integers of 4 bits in a file."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 256, (WIDTH, 2, 16), np.uint8)
    scales = numpy_helper.from_array(rng.uniform(0.01, 0.02, (WIDTH * 2,)).astype(np.float32), "s")
    (folder / "q.bin").write_bytes(numbers.tobytes())
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=WIDTH, N=WIDTH, bits=4, block_size=32
    )
    values = [helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [refer("q", numbers, "q.bin", 0), scales])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "m.onnx")
    return folder / "m.onnx"


def test_packed_weights_stay_in_their_file(tmp_path: Path) -> None:
    path = packed(tmp_path)
    losses = []
    for source in (path, onnx.load(path)):
        lora = ob.lora(source, ["*"], rank=2)
        graph = ob.training_graph(lora.model, loss="mse", trainable=lora.trainable, optimizer="sgd")
        trainer = ob.Trainer(graph, learning_rate=0.1)
        losses.append([trainer.step(batch()) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][0] > losses[0][2]


def test_floats_of_packed_weights_are_computed_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised, merged in floats and in integers, they are those of the model in memory, bit for bit."""
    path = packed(tmp_path)
    rng = np.random.default_rng(1)

    def results(source: Path | ModelProto) -> list[ModelProto]:
        lora = ob.lora(source, ["*"], rank=2)
        values = {name: value.astype(np.float32) for name, value in changes.items()}
        return [ob.dequantize(source), *(ob.merge_adapter(lora, values, floats=kind) for kind in (True, False))]

    adapters = {t.name: t for t in ob.lora(path, ["*"], rank=2).model.graph.initializer}
    changes = {n: rng.standard_normal(tuple(t.dims)) for n, t in adapters.items() if "lora" in n}
    expected = results(onnx.load(path))
    assert [is_reference(model) for model in results(path)] == [[False]] * 3, "so that onnx.save writes all of them"
    monkeypatch.setattr(mapped, "PROTO_LIMIT", 10_000)
    models = results(path)
    assert [is_reference(model) for model in models] == [[True], [True], [False]]
    written: dict[str, Array] = {}
    for n, (one, other) in enumerate(zip(models, expected, strict=True)):
        ob.save_model(one, tmp_path / f"{n}.onnx")
        written, theirs = (
            {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
            for model in (onnx.load(tmp_path / f"{n}.onnx"), other)
        )
        assert written.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_array_equal(written[name], array, err_msg=name)
    assert not np.array_equal(written["q"], numpy_helper.to_array(onnx.load(path).graph.initializer[0]))


# -- Files that are not what they should be.


def missing(path: Path) -> str:
    (path.parent / "weights0.bin").unlink()
    return "cannot be read.*weights0.bin"


def truncated(path: Path) -> str:
    os.truncate(path.parent / "weights0.bin", 20_000)
    return r"'w1' lies in 'weights0.bin' from byte 16,512 to 32,896, and that file has 20,000 bytes. It was not copied"


def short(path: Path) -> str:
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].CopyFrom(refer("w0", weights()["w0"], "weights0.bin", 64, 16_000))
    onnx.save(model, path)
    return r"'w0' of dims \[64, 64\] has 16,000 bytes in 'weights0.bin', expected 16,384"


def negative(path: Path) -> str:
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].CopyFrom(refer("w0", weights()["w0"], "weights0.bin", -4))
    onnx.save(model, path)
    return "'w0' lies in 'weights0.bin' from byte -4"


def wordy(path: Path) -> str:
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[1].value = "first"
    onnx.save(model, path)
    return "'w0': its offset or length is no number"


def outside(path: Path) -> str:
    folder = path.parent / "inner"
    folder.mkdir()
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../weights0.bin" if entry.key == "location" else entry.value
    onnx.save(model, folder / path.name)
    return "weights0.bin"


def absolute(path: Path) -> str:
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = str(path.parent / "weights0.bin")
    onnx.save(model, path)
    return "weights0.bin"


@pytest.mark.parametrize("damage", [missing, truncated, short, negative, wordy, outside, absolute])
@pytest.mark.parametrize("least", [0, 2**40], ids=["mapped", "read"])
def test_damaged_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], str], least: int
) -> None:
    monkeypatch.setattr(mapped, "LEAST_MAPPED", least)
    path = beside(tmp_path)
    message = damage(path)
    path = path.parent / "inner" / path.name if damage is outside else path
    for door in (lambda p: ob.lora(p, ["w*"], rank=2), ob.explain_gradients, ob.session):
        with pytest.raises((ob.InvalidModelError, ob.OnnxBackpropError), match=message):
            door(path)


def test_a_file_that_is_overwritten_is_noticed(tmp_path: Path) -> None:
    path = beside(tmp_path)
    lora, trainer = adapted(path)
    trainer.step(batch())
    with (tmp_path / "weights0.bin").open("r+b") as file:
        file.write(b"\0" * 1000)
    for use in (lambda: trainer.export(tmp_path / "out.onnx"), lambda: lora.merge(trainer.parameters())):
        with pytest.raises(ob.InvalidModelError, match=r"weights0.bin, in which the tensor 'w\d' lies, was written to"):
            use()
    assert not (tmp_path / "out.onnx").exists()


def test_a_file_that_is_replaced_stays_the_one_that_was_read(tmp_path: Path) -> None:
    """By a rename, as an export does; what is read afterwards are the new ones."""
    path = beside(tmp_path)
    lora, trainer = adapted(path)
    before = forward(path)
    (tmp_path / "new.bin").write_bytes(bytes((tmp_path / "weights0.bin").stat().st_size))
    (tmp_path / "new.bin").replace(tmp_path / "weights0.bin")
    assert not np.allclose(forward(path), before)
    np.testing.assert_allclose(forward(lora.merge(trainer.parameters())), before, rtol=1e-4, atol=1e-5)
    trainer.export(tmp_path / "out.onnx")
    np.testing.assert_allclose(forward(tmp_path / "out.onnx"), before, rtol=1e-4, atol=1e-5)


def test_an_export_takes_the_place_of_the_file_it_was_trained_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "PROTO_LIMIT", 40_000)
    path = tmp_path / "network.onnx"
    ob.save_model(in_memory(), path)
    _, trainer = adapted(path)
    _, other = adapted(in_memory())
    for _ in range(3):
        assert trainer.step(batch()) == pytest.approx(other.step(batch()), rel=1e-5)
        trainer.export(path)
        assert len(list(tmp_path.iterdir())) == 2  # the tensors of the earlier model are gone
        expected = other.predict(batch())["y"]
        np.testing.assert_allclose(forward(path), expected, rtol=1e-4, atol=1e-5)


# -- More bytes than a protobuf message can hold.


def test_above_the_limit_of_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = beside(tmp_path)
    monkeypatch.setattr(mapped, "PROTO_LIMIT", 40_000)
    lora, trainer = adapted(path)
    trainer.graph.save(tmp_path / "graph.onnx")
    assert len(list(tmp_path.glob("graph.onnx.*.data"))) == 1
    losses = [trainer.step(batch()) for _ in range(3)]
    trainer.save(tmp_path / "it.safetensors")
    assert safetensors.numpy.load_file(tmp_path / "it.safetensors").keys() == trainer.state().keys()
    again = ob.Trainer(tmp_path / "graph.onnx", learning_rate=0.05)
    assert [again.step(batch()) for _ in range(3)] == losses
    resumed = ob.Trainer(tmp_path / "graph.onnx", learning_rate=0.05).load(tmp_path / "it.safetensors")
    assert resumed.step(batch()) == trainer.step(batch())
    trainer.export(tmp_path / "out.onnx")
    merged = lora.merge(trainer.parameters())
    ob.save_model(merged, tmp_path / "merged.onnx")
    for file in ("out.onnx", "merged.onnx"):
        onnx.checker.check_model(tmp_path / file)
        assert len(list(tmp_path.glob(f"{file}.*.data"))) == 1
        np.testing.assert_allclose(forward(tmp_path / file), trainer.predict(batch())["y"], rtol=1e-4, atol=1e-5)
    ob.save_model(trainer.graph.model, tmp_path / "copy.onnx")
    assert ob.Trainer(tmp_path / "copy.onnx", learning_rate=0.05).step(batch()) == losses[0]
    with pytest.raises(ob.UnsupportedError, match="more than the 2 GB that a model in memory can hold.*save_model"):
        trainer.graph.inference_model()
    with pytest.raises(ob.UnsupportedError, match="more than the 2 GB"):
        ob.check_gradients(path)
    full = ob.Trainer(ob.training_graph(path, loss="mse", optimizer="sgd"), learning_rate=0.05)
    full.step(batch())
    full.export(tmp_path / "full.onnx")
    np.testing.assert_allclose(forward(tmp_path / "full.onnx"), full.predict(batch())["y"], rtol=1e-4, atol=1e-5)


def test_gradients_of_a_model_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = beside(tmp_path)
    plain = ob.backward(path, wrt=["w1"], of=["y"])
    assert is_reference(plain) == [False] * LAYERS
    feeds = {"x": batch()["x"], "y_grad": batch()["target"]}
    expected = np.asarray(ob.session(plain).run(["w1_grad"], feeds)[0])
    monkeypatch.setattr(mapped, "PROTO_LIMIT", 40_000)
    with pytest.raises(ob.UnsupportedError, match="more than the 2 GB that onnxruntime reads from memory"):
        ob.session(plain)
    large = ob.backward(path, wrt=["w1"], of=["y"])
    assert is_reference(large) == [True] * LAYERS
    ob.save_model(large, tmp_path / "large.onnx")
    for model in (large, tmp_path / "large.onnx"):
        got = np.asarray(ob.session(model).run(["w1_grad"], feeds)[0])
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_model_whose_file_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    path = beside(tmp_path)
    bare = onnx.load(path, load_external_data=False)
    with pytest.raises(ob.InvalidModelError, match="lies in the file 'weights0.bin'. Give the path of the model"):
        ob.lora(bare, ["w*"], rank=2)
    lora, _ = adapted(path)
    onnx.save(lora.model, tmp_path / "careless.onnx")  # which writes the references as they are
    with pytest.raises(ob.InvalidModelError, match="careless.onnx"):
        ob.session(tmp_path / "careless.onnx")


PROGRAM = """
import sys, numpy as np, onnx_backprop as ob
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
x = np.ones((4, 2048), np.float32)
ob.Trainer(ob.training_graph(sys.argv[1], loss="mse", optimizer="sgd")).step(x=x, target=x)  # what comes with it
before = peak()
lora = ob.lora(sys.argv[2], ["w*"], rank=2)
graph = ob.training_graph(lora.model, loss="mse", trainable=lora.trainable, optimizer="adamw")
converted = peak()
trainer = ob.Trainer(graph)
trainer.step(x=x, target=x)
trainer.export(sys.argv[3])
print(before, converted, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """160 MiB of weights: some of them at a time while they are converted, and little more than they in a step."""
    width, layers = 2048, 10
    block = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32) / 45
    paths = []
    for name, count in (("small", 1), ("large", layers)):
        with (tmp_path / f"{name}.bin").open("wb") as file:
            tensors = []
            for n in range(count):
                tensors.append(refer(f"w{n}", block, f"{name}.bin", file.tell()))
                file.write((block * (1 + n / 100)).astype(np.float32).tobytes())
        nodes = [helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"h{n + 1}"]) for n in range(count)]
        values = [helper.make_tensor_value_info(f"h{n}", 1, ["b", width]) for n in (0, count)]
        values[0].name = nodes[0].input[0] = "x"
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.save(model, tmp_path / f"{name}.onnx")
        paths.append(str(tmp_path / f"{name}.onnx"))
    command = [sys.executable, "-c", PROGRAM, *paths, str(tmp_path / "out.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, converted, end = map(float, done.stdout.split())
    size = layers * block.nbytes / 2**20
    assert converted - before < 0.5 * size, done.stdout  # 0 to 48 MiB, as the system takes mapped pages back
    assert end - before < 1.2 * size, done.stdout


def test_a_session_on_a_file_with_a_tensor_that_nobody_reads(tmp_path: Path) -> None:
    """onnxruntime drops it, and refuses values for what it has dropped."""
    path = beside(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer.append(refer("unread", weights()["w0"], "weights0.bin", 64))
    onnx.save(model, path)
    x = np.ones((2, WIDTH), np.float32)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(ob.session(path).run(None, {"x": x})[0]), np.asarray(expected), rtol=1e-5)
