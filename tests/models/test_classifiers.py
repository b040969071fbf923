"""The builders whose output is a row of logits: valid models of symbolic sizes that run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from models import resnet, transformer

BUILDERS: dict[str, tuple[Callable[..., ModelProto], list[tuple[int, ...]], int]] = {
    "resnet": (resnet.build, [(2, 3, 16, 8), (3, 3, 9, 21)], 10),
    "transformer": (transformer.build, [(2, 7, 6), (1, 3, 6)], 5),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_builder(name: str) -> None:
    build, shapes, classes = BUILDERS[name]
    model = build(seed=1)
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == build(seed=1).SerializeToString() != build(seed=2).SerializeToString()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    for shape in shapes:
        (result,) = session.run(
            ["logits"], {session.get_inputs()[0].name: rng.standard_normal(shape).astype(np.float32)}
        )
        y = np.asarray(result)
        assert np.shape(y) == (shape[0], classes)
        assert np.isfinite(y).all()
        assert np.std(y) > 1e-3


def test_resnet_has_the_parameters_of_resnet_18() -> None:
    """11 173 962 of the usual form for small images with 10 classes, and the running statistics."""
    model = resnet.build(features=64)
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    statistics = [name for name in sizes if name.endswith((".mean", ".variance"))]
    assert sum(sizes.values()) - sum(sizes[name] for name in statistics) == 11_173_962


def test_transformer_width_is_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match=r"width: expected a multiple of heads \(3\), got 16"):
        transformer.build(heads=3)
