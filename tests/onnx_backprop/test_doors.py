"""Adapters as files, in stock onnxruntime; what is said where PyTorch is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto
from safetensors import numpy as safetensors

import onnx_backprop as ob
from models import transformer
from onnx_backprop.opset.core.errors import InvalidArgumentError

X = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)


def adapted() -> ob.LoraModel:
    model = transformer.build(inputs=16, layers=1)
    return ob.lora(model, ["*"], rank=2, alpha=4)


def values(adapted: ob.LoraModel, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {tensor.name: tensor.dims for tensor in adapted.model.graph.initializer}
    return {name: 0.3 * rng.standard_normal(shapes[name]).astype(np.float32) for name in adapted.trainable}


def stock(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_adapters_in_stock_onnxruntime(tmp_path: Path) -> None:
    """Two beside one session, each as merged; none of them changes a run in which it is not active."""
    lora = adapted()
    session = stock(lora.model)
    (name,) = (v.name for v in session.get_inputs())
    plain = np.asarray(session.run(None, {name: X})[0])
    np.testing.assert_array_equal(plain, np.asarray(stock(lora.base).run(None, {name: X})[0]))
    for seed in (1, 2):
        trained = values(lora, seed)
        path = tmp_path / f"{seed}.onnx_adapter"
        ob.save_adapter(trained, path)
        adapter = onnxruntime.LoraAdapter()
        adapter.Load(str(path))
        options = onnxruntime.RunOptions()
        options.add_active_adapter(adapter)
        actual = np.asarray(session.run(None, {name: X}, options)[0])
        merged = np.asarray(stock(lora.merge(trained)).run(None, {name: X})[0])
        np.testing.assert_allclose(actual, merged, rtol=1e-4, atol=1e-4)
        assert np.abs(actual - plain).max() > 0.1
        np.testing.assert_array_equal(np.asarray(session.run(None, {name: X})[0]), plain)


def test_what_is_in_the_files(tmp_path: Path) -> None:
    trained = {**values(adapted(), 3), "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    ob.save_adapter(trained, tmp_path / "a.onnx_adapter")
    ob.save_adapter(trained, tmp_path / "a.safetensors")
    read = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter")).get_parameters()
    for stored in (
        {name: value.numpy() for name, value in read.items()},
        safetensors.load_file(tmp_path / "a.safetensors"),
    ):
        assert stored.keys() == trained.keys()
        for name, value in trained.items():
            np.testing.assert_array_equal(stored[name], value)
            assert stored[name].shape == np.shape(value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx_adapter", "a.safetensors"]


def test_refusals(tmp_path: Path) -> None:
    one = {"a": np.ones(2, np.float32)}
    with pytest.raises(InvalidArgumentError, match=r"ends in \.onnx_adapter or \.safetensors, got '.*a\.bin'"):
        ob.save_adapter(one, tmp_path / "a.bin")
    with pytest.raises(InvalidArgumentError, match="at least one tensor"):
        ob.save_adapter({}, tmp_path / "a.safetensors")
    with pytest.raises(InvalidArgumentError, match="'b' has no axis, which onnxruntime does not read"):
        ob.save_adapter({**one, "b": np.float32(1)}, tmp_path / "a.onnx_adapter")
    with pytest.raises(InvalidArgumentError, match="cannot write"):
        ob.save_adapter(one, tmp_path / "missing" / "a.safetensors")


def test_without_pytorch_a_sentence_says_so() -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        import onnx_backprop as ob
        try:
            ob.torch
        except ob.KernelError as e:
            print(e)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "needs PyTorch" in process.stdout
    assert "pip install torch" in process.stdout
