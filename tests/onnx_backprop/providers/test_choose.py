"""What `device=` and `providers=` mean, and what there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.providers import choose
from onnx_backprop.providers.memory import Memory
from onnx_backprop.providers.table import PROVIDERS
from tests.support.training_models import training


def product() -> ModelProto:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"))
    return model


def test_the_cpu_is_there() -> None:
    first, *others = ob.devices()
    assert (first.name, first.provider, first.version) == ("cpu", "CPUExecutionProvider", onnxruntime.__version__)
    assert str(first) == f"cpu (CPUExecutionProvider, version {onnxruntime.__version__})"
    assert all(device.name.partition(":")[0] in PROVIDERS for device in others)
    assert choose.chosen("cpu", None) is None
    assert choose.chosen(None, ["CPUExecutionProvider"]) is None
    assert choose.chosen(None, None) is None


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=PROVIDERS)
def test_a_device_that_is_not_there_says_what_brings_it(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider.name == "cpu":
        return
    monkeypatch.setattr(choose, "find_spec", lambda _: None)
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ob.KernelError) as caught:
        ob.Trainer(training(), device=provider.name)
    message = str(caught.value)
    assert f"{provider.name!r} is not there" in message
    assert f"`{provider.install}`" in message
    assert message.endswith("There is cpu")
    with pytest.raises(ob.KernelError, match=r"pip install"):
        ob.session(product(), providers=[provider.ep])
    monkeypatch.setattr(choose, "find_spec", lambda name: name == provider.package)
    monkeypatch.setattr(choose, "_register", lambda *_: None)
    with pytest.raises(ob.KernelError, match="finds no device" if provider.package else "pip install"):
        ob.session(product(), device=provider.name)


def test_providers_that_are_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that no machine of ours has: what onnxruntime is asked for."""
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list)
    there = ["CUDAExecutionProvider", "CoreMLExecutionProvider", "OtherExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    monkeypatch.setattr(choose, "unusable", lambda _: "")
    assert [device.name for device in ob.devices()] == ["cpu", "cuda", "coreml"]
    options = onnxruntime.SessionOptions()
    exact = {"use_tf32": "0"}
    for device, providers, expected in (
        ("cuda", None, [("CUDAExecutionProvider", exact)]),
        ("cuda:1", None, [("CUDAExecutionProvider", exact | {"device_id": 1})]),
        ("CoreML", None, [("CoreMLExecutionProvider", {"ModelFormat": "MLProgram"})]),
        (
            None,
            [("CUDAExecutionProvider", {"use_tf32": "1"}), "OtherExecutionProvider", "CPUExecutionProvider"],
            [("CUDAExecutionProvider", {"use_tf32": "1"}), "OtherExecutionProvider"],
        ),
        (None, ["OtherExecutionProvider"], [("OtherExecutionProvider", {})]),
    ):
        target = choose.chosen(device, providers)
        assert target is not None
        assert target.append_to(options) == [*expected, "CPUExecutionProvider"]
        assert target.memory is None
    with pytest.raises(ob.KernelError, match=r"'NoExecutionProvider' is not there\. There are cpu, cuda, coreml"):
        choose.chosen(None, ["NoExecutionProvider"])


def test_a_provider_that_is_built_in_and_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA on a machine without its libraries: onnxruntime lists it, and would run on the CPU."""
    assert not choose.unusable("CPUExecutionProvider")
    opened = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: opened)
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(
        onnxruntime, "preload_dlls", lambda: print("Failed to load libcublas.so.13: libcublas.so.13: no such file")
    )
    choose.unusable.cache_clear()
    try:
        assert [device.name for device in ob.devices()] == ["cpu"]
        pattern = r"cannot be used: libcublas\.so\.13: no such file\. It needs a GPU of NVIDIA.*There is cpu"
        for where in ({"device": "cuda"}, {"providers": ["CUDAExecutionProvider"]}):
            with pytest.raises(ob.KernelError, match=pattern):
                ob.session(product(), **where)
    finally:
        choose.unusable.cache_clear()


def test_what_a_provider_copies_in_its_own_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of CUDA onnxruntime gives an array; what is kept of it does not lie in the array's memory."""
    array = np.arange(1000, dtype=np.float32)
    there = SimpleNamespace(
        device_name=lambda: "cuda", shape=lambda: [1000], element_type=lambda: 1, numpy=lambda: array
    )

    def no_copy(*_: Any) -> None:
        raise RuntimeError("Data transfer implementation between source and destination device was not found.")

    monkeypatch.setattr(onnxruntime, "copy_tensors", no_copy)
    fetched = Memory(choose.Target(PROVIDERS["cuda"])).fetched(there)
    array[:] = 7
    np.testing.assert_array_equal(fetched.numpy(), np.arange(1000))


def test_several_devices_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def plugin(vendor: str) -> Any:
        hardware = SimpleNamespace(vendor=vendor, type="OrtHardwareDeviceType.GPU")
        return SimpleNamespace(ep_name="WebGpuExecutionProvider", device=hardware, ep_metadata={"version": "0.4"})

    devices = [plugin("A"), plugin("B")]
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert [str(device) for device in ob.devices()][1:] == [
        "webgpu (WebGpuExecutionProvider, A GPU, version 0.4)",
        "webgpu:1 (WebGpuExecutionProvider, B GPU, version 0.4)",
    ]
    target = choose.chosen("webgpu:1", None)
    assert target is not None
    assert target.plugin is devices[1]
    with pytest.raises(ob.KernelError, match="'webgpu:2' is not there: there is no more than 2 of them"):
        choose.chosen("webgpu:2", None)


def test_arguments_that_do_not_fit() -> None:
    for arguments, pattern in (
        ({"device": "gpu"}, r"device: expected one of cpu, webgpu, .*got 'gpu'\. Did you mean 'webgpu'"),
        ({"device": "cuda:x"}, "got 'cuda:x'"),
        ({"device": 1}, "expected the name of a device, as 'webgpu', got 1"),
        ({"device": "cpu", "providers": ["CPUExecutionProvider"]}, "both device and providers are given"),
        ({"providers": "CPUExecutionProvider"}, "expected a list of names"),
        ({"providers": [3]}, "expected a list of names"),
    ):
        for door in (ob.Trainer, ob.session, ob.value_and_grad, ob.check_gradients):  # before anything is converted
            with pytest.raises(ob.InvalidArgumentError, match=pattern):
                door(training() if door is ob.Trainer else product(), **arguments)
    with pytest.raises(ob.InvalidArgumentError, match="read_every: expected a whole number of 1 or more, got 0"):
        ob.Trainer(training(), read_every=0)
    assert isinstance(ob.session(product(), providers=["CPUExecutionProvider"]), onnxruntime.InferenceSession)
