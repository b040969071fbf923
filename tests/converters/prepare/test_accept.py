"""What onnxruntime runs and onnx's checker or onnx_ir does not take: converted, run, and right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob

X = np.array([[1, -2, 3, 0.5], [0, 1, -1, 2]], np.float32)
W = np.array([[1, 2], [3, -4], [0.5, 1], [-1, 0]], np.float32)
DY = np.array([[1, -1], [2, 0.5]], np.float32)


def linear(body: str = "y = MatMul(x, w)", outputs: str = "float[N,2] y") -> ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g (float[N,4] x) => ({outputs}) {{ {body} }}')
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


def no_shape() -> ModelProto:
    model = linear()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def no_type() -> ModelProto:
    model = linear()
    model.graph.output[0].ClearField("type")
    return model


def negative() -> ModelProto:
    model = linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    return model


def unsorted() -> ModelProto:
    model = linear("t = MatMul(x, w) y = Identity(t)")
    model.graph.node.reverse()
    return model


def no_graph_name() -> ModelProto:
    model = linear()
    model.graph.name = ""
    return model


def old_ir() -> ModelProto:
    """Before IR version 4 all initializers are inputs."""
    model = linear()
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, W.shape))
    return model


def twice() -> ModelProto:
    """Two initializers of one name and the same numbers."""
    model = linear()
    model.graph.initializer.append(model.graph.initializer[0])
    return model


def two_fields() -> ModelProto:
    model = linear()
    model.graph.initializer[0].float_data.extend(W.ravel())
    return model


def named_domain() -> ModelProto:
    model = linear()
    model.graph.node[0].domain = model.opset_import[0].domain = "ai.onnx"
    return model


def zip_map() -> ModelProto:
    """As skl2onnx ends its classifiers: a sequence of maps beside the scores."""
    body = "y = MatMul(x, w) z = ai.onnx.ml.ZipMap<classlabels_int64s=[0,1]>(y)"
    model = linear(body)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    element = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output.append(helper.make_value_info("z", helper.make_sequence_type_proto(element)))
    return model


def sequence() -> ModelProto:
    return linear("y = MatMul(x, w) z = SequenceConstruct(y, y)", "float[N,2] y, seq(float[N,2]) z")


WITH_WARNING = (unsorted, twice, two_fields)
MODELS = (no_shape, no_type, negative, no_graph_name, old_ir, named_domain, zip_map, sequence, *WITH_WARNING)


@pytest.mark.parametrize("build", MODELS)
def test_gradient(build: Callable[[], ModelProto]) -> None:
    model = build()
    before = model.SerializeToString(deterministic=True)
    forward = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = ob.backward(model, wrt=["x", "w"], of=["y"])
        assert ob.explain_gradients(model, wrt=["w"], of=["y"]).ok
    assert [w.category for w in caught] == [ob.OnnxBackpropWarning] * 2 * (build in WITH_WARNING)
    assert model.SerializeToString(deterministic=True) == before
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    *outputs, dx, dw = session.run(None, {"x": X, "y_grad": DY})
    np.testing.assert_array_equal(outputs[0], forward[0])
    assert build is sequence or outputs[1:] == forward[1:]
    np.testing.assert_array_equal(dx, DY @ W.T)
    np.testing.assert_array_equal(dw, X.T @ DY)


@pytest.mark.parametrize("build", [zip_map, sequence, no_shape])
def test_training(build: Callable[[], ModelProto]) -> None:
    graph = ob.training_graph(build(), loss="mse", prediction="y", optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    assert trainer.step(x=X, target=DY) > trainer.step(x=X, target=DY)


@pytest.mark.parametrize("prediction", ["z", None])
def test_the_maps_of_a_classifier_stand_for_its_scores(prediction: str | None) -> None:
    model = zip_map()
    del model.graph.output[0]
    graph = ob.training_graph(model, loss="mse", prediction=prediction, optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    before = trainer.predict(x=X, target=DY)["z"]
    np.testing.assert_allclose([list(row.values()) for row in before], X @ W, rtol=1e-6)
    assert trainer.step(x=X, target=DY) > trainer.step(x=X, target=DY) > trainer.evaluate(x=X, target=DY)


@pytest.mark.parametrize("name", ["?", "-1", "None", "N"])
def test_one_name_for_all_lengths_that_are_unknown(name: str) -> None:
    """Of Paddle, for one: what has it need not be equal, but for a proper name."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[A,2] a, float[A,2] b) => (float[M,2] y) { y = Add(a, b) }""")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = name
    feeds = {"a": np.ones((3, 2), np.float32), "b": np.ones((1, 2), np.float32), "y_grad": np.ones((3, 2), np.float32)}
    session = onnxruntime.InferenceSession(ob.backward(model, wrt=["b"]).SerializeToString())
    (db,) = session.run(["b_grad"], feeds)
    assert np.asarray(db).shape == ((3, 2) if name == "N" else (1, 2))


def test_training_with_lengths_of_one_name() -> None:
    model = linear("t = MatMul(x, w) y = Identity(t)")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "?"
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "?"
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"))
    trainer.step(x=X, target=DY)


def test_names_that_are_no_utf8() -> None:
    raw = linear().SerializeToString().replace(b"\x01w", b"\x01\xe9")
    converted = ob.backward(ModelProto.FromString(raw), wrt=["x"])
    (dx,) = onnxruntime.InferenceSession(converted.SerializeToString()).run(["x_grad"], {"x": X, "y_grad": DY})
    np.testing.assert_array_equal(dx, DY @ W.T)
    assert r"\xe9" in ob.training_graph(ModelProto.FromString(raw), loss="mse").parameters


def test_a_model_that_neither_takes_is_refused() -> None:
    with pytest.raises(ob.InvalidModelError, match=r"onnx\.checker: .*missing"):
        ob.backward(linear("y = MatMul(x, missing)"))


def test_initializers_of_one_name_that_differ_are_refused() -> None:
    """onnxruntime takes the first or the last of them."""
    model = linear()
    model.graph.initializer.insert(0, numpy_helper.from_array(W * 7, "w"))
    with pytest.raises(ob.InvalidModelError, match="two initializers are called 'w'"):
        ob.backward(model)


def test_sparse_tensors_are_refused_by_name() -> None:
    values, indices = numpy_helper.from_array(np.float32([1, 2]), "w"), numpy_helper.from_array(np.array([0, 5]))
    model = linear()
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 2]))
    with pytest.raises(ob.UnsupportedError, match="'w' is a sparse tensor"):
        ob.backward(model)
    del model.graph.sparse_initializer[:]
    node = helper.make_node("Constant", [], ["w"], sparse_value=helper.make_sparse_tensor(values, indices, [4, 2]))
    model.graph.node.insert(0, node)
    with pytest.raises(ob.UnsupportedError, match="'w' is a sparse tensor"):
        ob.backward(model)


def test_a_model_of_another_domain_alone() -> None:
    model = linear("y = ai.onnx.ml.LinearRegressor<coefficients=[1.0,2.0,3.0,-1.0], targets=1>(x)", "float[N,1] y")
    del model.graph.initializer[:]
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    onnxruntime.InferenceSession(model.SerializeToString())
    assert list(ob.training_graph(model, loss="mse").parameters) == ["y/coefficients"]


@pytest.mark.parametrize("suffix", [".data", "_data"])
def test_external_data(tmp_path: Path, suffix: str) -> None:
    path = write_with_data(tmp_path, suffix)
    assert np.array_equal(gradient(path), DY @ W.T)


@pytest.mark.parametrize("suffix", [".data", "_data"])
def test_external_data_of_a_hugging_face_cache(tmp_path: Path, suffix: str) -> None:
    """There the model and its data are links into one folder of files named after their contents."""
    written = write_with_data(tmp_path, suffix)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for n, name in enumerate([written.name, written.name + suffix]):
        (tmp_path / name).rename(blobs / f"{n}")
        (snapshot / name).symlink_to(f"../../blobs/{n}")
    assert np.array_equal(gradient(snapshot / written.name), DY @ W.T)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = write_with_data(tmp_path, ".data")
    secret = tmp_path.parent / f"{tmp_path.name}.secret"
    Path(f"{path}.data").rename(secret)
    Path(f"{path}.data").symlink_to(secret)
    with pytest.raises(ob.InvalidModelError, match="cannot be read"):
        ob.backward(path)


def write_with_data(folder: Path, suffix: str) -> Path:
    path = folder / "model.onnx"
    location = path.name + suffix
    onnx.save(linear(), path, save_as_external_data=True, location=location, size_threshold=0)
    assert (folder / location).stat().st_size >= W.nbytes
    return path


def gradient(path: Path) -> np.ndarray:
    converted = ob.backward(path, wrt=["x"])
    return np.asarray(
        onnxruntime.InferenceSession(converted.SerializeToString()).run(["x_grad"], {"x": X, "y_grad": DY})[0]
    )


def test_a_function_of_operators_that_the_checker_does_not_know() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "own": 1]>
        g (float[2, 3, 4] x, float[3] s) => (float[2, 3, 4] y) { y = own.norm <epsilon = 0.1> (x, s) }
        <domain: "own", opset_import: ["": 21]> norm <epsilon> (x, s) => (y) {
            y = GroupNormalization <num_groups = 1, epsilon: float = @epsilon> (x, s, s)
        }"""
    )
    x, s = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32), np.ones(3, np.float32)
    z = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 0.1)
    feeds = {"x": x, "s": s, "y_grad": np.ones_like(x)}
    (ds,) = ob.session(ob.backward(model, wrt=["s"])).run(["s_grad"], feeds)
    np.testing.assert_allclose(np.asarray(ds), (z + 1).sum((0, 2)), rtol=1e-4, atol=1e-4)
