"""Stops that a file does not say, in the passes of `ob.torch.module`: the same gradients as a `Trainer`'s, said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.passes import inference, passes, variables

RNG = np.random.default_rng(7)


def file_of(inputs: str, body: str, **tensors: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => (float[n,m] y) {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def estimator() -> tuple[ModelProto, dict[str, np.ndarray]]:
    body = "a = MatMul(x, w) b = Round(a) d = Sub(b, a) y = Add(a, d)"
    return file_of("float[2,4] x", body, w=normal(4, 3)), {"x": normal(2, 4)}


def padding(rows: int) -> tuple[ModelProto, dict[str, np.ndarray]]:
    table = normal(rows, 3)
    table[1] = 0
    body = "r = Gather(table, ids) y = MatMul(r, w)"
    return file_of("int64[4] ids", body, table=table, w=normal(3, 2)), {"ids": np.array([0, 1, 1, 3])}


def second_bias() -> tuple[ModelProto, dict[str, np.ndarray]]:
    biases = np.concatenate([normal(1, 4), np.zeros((1, 4), np.float32)], 1)
    body = "h, last = RNN<hidden_size=4>(x, W, R, B__1) y = Squeeze(last, zero)"
    tensors = {"W": normal(1, 4, 3), "R": normal(1, 4, 4), "B__1": biases, "zero": np.array([0])}
    return file_of("float[5,2,3] x", body, **tensors), {"x": normal(5, 2, 3)}


def gradient_of_the_file(file: ModelProto, name: str, feeds: dict[str, np.ndarray], dy: np.ndarray) -> np.ndarray:
    """Without stops: as the file says."""
    gradients = ob.backward(file, wrt=[name])
    names = ob.derivatives(gradients)[-1]
    (gradient,) = ob.session(gradients).run([names.results[name]], {**feeds, names.seeds["y"]: dy})
    return np.array(gradient)


@pytest.mark.parametrize("case", ["estimator", "padding", "padding of a large table", "second bias"])
def test_gradients_stop_where_a_trainer_stops_them(case: str) -> None:
    file, feeds = {
        "estimator": estimator,
        "padding": lambda: padding(5),
        "padding of a large table": lambda: padding(100_000),  # whose numbers are referred to
        "second bias": second_bias,
    }[case]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = variables(file)
        graphs = passes(source, source.parameters, training=True)
    (message,) = (str(w.message) for w in caught)
    arrays = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    (y,) = map(np.asarray, ob.session(file).run(["y"], feeds))
    dy = normal(*y.shape)
    fed = {**feeds, **{name: arrays[name] for name in source.parameters}, graphs.seeds["y"]: dy}
    values = ob.session(graphs.model).run([*graphs.gradients.values()], fed)
    gradients = dict(zip(graphs.gradients, map(np.asarray, values), strict=True))
    if case == "estimator":
        assert "straight-through estimator" in message
        name, expected = "w", feeds["x"].T @ dy
    else:
        name = "B__1" if case == "second bias" else "table"
        expected = gradient_of_the_file(file, name, feeds, dy)
        stopped = np.s_[:, 4:] if case == "second bias" else np.s_[1]
        assert f"second biases in '{name}'" in message if case == "second bias" else f"1 of '{name}'" in message
        assert expected[stopped].any()
        expected[stopped] = 0
    np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [estimator, partial(padding, 5), second_bias])
def test_exported_model_has_no_stop_nodes(case: Callable[[], tuple[ModelProto, dict[str, np.ndarray]]]) -> None:
    file, _ = case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = inference(variables(file))
    assert [node.op_type for node in exported.graph.node] == [node.op_type for node in file.graph.node]
