"""Devices to train on where there is none."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

import onnx_backprop as ob
from onnx_backprop.providers import choose
from onnx_backprop.providers.table import PROVIDERS


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> choose.Target:
    """The CPU as a provider with the limits of WebGPU, which device="webgpu" then is."""
    target = choose.Target(replace(PROVIDERS["webgpu"], ep="CPUExecutionProvider", package=""))
    monkeypatch.setattr(choose, "_target", lambda *_: target)
    return target


@pytest.fixture(scope="session")
def webgpu() -> str:
    """WebGPU itself."""
    if find_spec("onnxruntime_ep_webgpu") is None:
        pytest.skip("the plugin is not installed: pip install onnxruntime-ep-webgpu, or make devices")
    if not any(device.name == "webgpu" for device in ob.devices()):
        pytest.skip("there is no adapter: make devices brings one in software")
    return "webgpu"


@pytest.fixture(scope="session")
def cuda() -> str:
    """A GPU of NVIDIA."""
    if not any(device.name == "cuda" for device in ob.devices()):
        pytest.skip("there is no GPU of NVIDIA, or no onnxruntime-gpu")
    return "cuda"


@pytest.fixture(params=["limited", "webgpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """All of them, one after the other."""
    request.getfixturevalue(request.param)
    return "cuda" if request.param == "cuda" else "webgpu"
