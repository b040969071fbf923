"""vmap beside a loop of onnxruntime over rows of the model that came."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from tests.support.adjoint import run as run_session

SEED = 11
Feeds = dict[str, np.ndarray]


def model_of(text: str, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def drawn(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(model: ModelProto, feeds: Feeds) -> Feeds:
    session = ob.session(model)
    return dict(zip([value.name for value in session.get_outputs()], run_session(session, feeds), strict=True))


def check(
    model: ModelProto, feeds: Feeds, axes: Mapping[str, int], out_axes: int | Mapping[str, int] = 0, atol: float = 1e-6
) -> ModelProto:
    """`vmap` gives what a loop does; feeds have the rows along the axes."""
    mapped = ob.vmap(model, axes, out_axes)
    if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        onnx.checker.check_model(mapped, full_check=True)
    got = run(mapped, feeds)
    (count,) = {feeds[name].shape[axis] for name, axis in axes.items()}
    rows = [{k: np.asarray(np.take(v, n, axes[k])) if k in axes else v for k, v in feeds.items()} for n in range(count)]
    session = ob.session(model)
    names = [value.name for value in model.graph.output]
    assert list(got) == names
    outputs = [dict(zip(names, run_session(session, row), strict=True)) for row in rows]
    for name in names:
        axis = out_axes if isinstance(out_axes, int) else out_axes.get(name, 0)
        want = np.stack([one[name] for one in outputs], axis)
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], want, err_msg=name)
    return mapped
