"""Which devices are there, and what `device=` and `providers=` mean."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

import numpy as np
import onnxruntime
from onnx import parser

from onnx_backprop.converters.devices.limits import Limits
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.ort_ops import Named, SessionOptions
from onnx_backprop.providers.table import PROVIDERS, Provider

CPU = PROVIDERS["cpu"]
_OF_CUDA = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
_registration = threading.Lock()
_PRODUCT = '<ir_version: 8, opset_import: ["": 18]> product (TYPE[2, 2] x) => (TYPE[2, 2] y) { y = MatMul (x, x) }'


@dataclass(frozen=True)
class Device:
    """A device that `device=` takes. hardware: what onnxruntime says of it. version: of the provider."""

    name: str
    provider: str
    hardware: str = ""
    version: str = ""

    def __str__(self) -> str:
        """The name, and what is known of it."""
        about = ", ".join(filter(None, (self.provider, self.hardware, self.version and f"version {self.version}")))
        return f"{self.name} ({about})"


@dataclass(frozen=True, eq=False)
class Target:
    """A provider that sessions run on, and which of its devices.

    plugin: onnxruntime's records of the device where the provider is a plugin. options: of its sessions.
    """

    provider: Provider
    plugin: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    others: tuple[Named, ...] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return self.provider.ep.removesuffix("ExecutionProvider")

    @property
    def limits(self) -> Limits:
        """What its graphs must avoid."""
        return self.provider.limits

    @property
    def memory(self) -> Any:
        """Of a plugin onnxruntime's record of its memory; None where tensors lie in the CPU's, or it is built in."""
        return None if self.plugin is None else self.plugin.memory_info(onnxruntime.OrtDeviceMemoryType.DEFAULT)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """What its sessions hold while they run."""
        return self.provider.lock

    def append_to(self, options: SessionOptions) -> list[Named] | None:
        """Let sessions on some options run here; the providers to give them beside."""
        if self.plugin is None:
            return [
                *([(self.provider.ep, dict(self.options))] if self.provider.ep != CPU.ep else ()),
                *self.others,
                CPU.ep,
            ]
        if not options.has_providers():
            options.add_provider_for_devices([self.plugin], {k: str(v) for k, v in self.options.items()})
        return None

    @property
    def has_half(self) -> bool:
        """Whether it multiplies matrices of float16."""
        return _has_half(self)


@cache
def _has_half(target: Target) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        providers: Any = target.append_to(options)
        with target.lock:
            session = onnxruntime.InferenceSession(_product("float16"), options, providers=providers)
            session.run(None, {"x": np.eye(2, dtype=np.float16)})
    except Exception:  # noqa: BLE001 - whatever it says, it has none
        return False
    return True


def _product(kind: str) -> bytes:
    return parser.parse_model(_PRODUCT.replace("TYPE", kind)).SerializeToString()


@cache
def unusable(ep: str) -> str:
    """Why no session of this process runs on a provider that is built in; "" where one does.

    onnxruntime lists what it was built with. That a library of CUDA, a driver or a GPU is missing turns up when a
    session asks for it, which then runs on the CPU; and onnxruntime's list of kernels ends the process.
    """
    if ep == CPU.ep:
        return ""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    output = StringIO()
    try:
        with redirect_stdout(output):  # where onnxruntime prints what it misses, and that it goes on on the CPU
            if ep in _OF_CUDA:
                onnxruntime.preload_dlls()
            session = onnxruntime.InferenceSession(_product("float"), options, providers=[ep])
    except Exception as e:  # noqa: BLE001 - whatever it says, none runs there
        return str(e)
    if ep in session.get_providers():
        return ""
    missing = re.search(r"^Failed to load \S+: (.*)", output.getvalue(), re.MULTILINE)
    return missing[1] if missing else output.getvalue().strip() or "it does not load"


def devices() -> list[Device]:
    """The devices that `device=` takes here, the CPU first.

        assert "cpu" in [device.name for device in ob.devices()]

    Installed plugin libraries of providers are registered with onnxruntime. Several devices of one provider are
    "webgpu", "webgpu:1", ….
    """
    result: list[Device] = []
    for provider in PROVIDERS.values():
        plugins = _plugins(provider)
        for n, plugin in enumerate(plugins):
            hardware = " ".join(filter(None, (plugin.device.vendor, str(plugin.device.type).rpartition(".")[2])))
            version = plugin.ep_metadata.get("version", "")
            result.append(Device(_numbered(provider, n), provider.ep, hardware, version))
        if not plugins and provider.ep in onnxruntime.get_available_providers() and not unusable(provider.ep):
            result.append(Device(provider.name, provider.ep, version=onnxruntime.__version__))
    return result


def chosen(device: str | None, providers: Sequence[Named] | None) -> Target | None:
    """The provider that sessions are to run on; None for the CPU, and where nothing is asked for.

    Errors: InvalidArgumentError for both, and for a device that nobody knows; KernelError for one that is not there,
    with what brings it.
    """
    if device is not None and providers is not None:
        raise InvalidArgumentError("both device and providers are given. Leave one out", "device")
    if providers is not None:
        return _of_providers(providers)
    if device is None:
        return None
    if not isinstance(device, str):
        raise InvalidArgumentError(f"expected the name of a device, as 'webgpu', got {device!r}", "device")
    name, _, number = device.partition(":")
    provider = PROVIDERS.get(name.lower())
    if provider is None or (number and not number.isdecimal()):
        raise InvalidArgumentError(
            f"expected one of {', '.join(PROVIDERS)}, or one with a number behind it, as 'cuda:1', "
            f"got {device!r}{near(name, PROVIDERS)}",
            "device",
        )
    return None if provider is CPU else _target(provider, int(number or 0), {})


def _of_providers(providers: Sequence[Named]) -> Target | None:
    if isinstance(providers, str) or not all(isinstance(p, str) or (isinstance(p, tuple) and p) for p in providers):
        raise InvalidArgumentError(
            f"expected a list of names, or of names with options, as onnxruntime takes it, got {providers!r}",
            "providers",
        )
    if not providers:
        return None
    first = providers[0]
    ep, options = (first, {}) if isinstance(first, str) else (first[0], dict(first[1]))
    if ep == CPU.ep:
        return None
    provider = next((p for p in PROVIDERS.values() if p.ep == ep), None)
    others = tuple(p for p in providers[1:] if (p if isinstance(p, str) else p[0]) != CPU.ep)
    if provider is None:
        if ep not in onnxruntime.get_available_providers():
            raise KernelError(f"{ep!r} is not there. {_there()}", "providers")
        if reason := unusable(ep):
            raise KernelError(f"{ep!r} is in this onnxruntime and cannot be used: {reason}. {_there()}", "providers")
        return Target(Provider(ep, ep, ""), options=options, others=others)
    return _target(provider, 0, options, others)


def _target(provider: Provider, index: int, options: Mapping[str, Any], others: tuple[Named, ...] = ()) -> Target:
    options = {**provider.options, **options}
    plugins = _plugins(provider)
    if index < len(plugins):
        return Target(provider, plugins[index], options, index, others)
    built_in = not plugins and provider.ep in onnxruntime.get_available_providers()
    reason = unusable(provider.ep) if built_in else ""
    if built_in and not reason:
        if index:
            options.setdefault("device_id", index)
        return Target(provider, None, options, index, others)
    if built_in:
        needs = f". It needs {provider.needs}" if provider.needs else ""
        reason = f"{provider.ep} is in this onnxruntime and cannot be used: {reason}{needs}"
    elif plugins:
        reason = f"there is no more than {len(plugins)} of them"
    elif provider.package and find_spec(provider.package):
        reason = f"{provider.package} is installed and finds no device that it can use"
    else:
        how = f", {provider.how}" if provider.how else ""
        reason = f"{provider.ep} is not in this onnxruntime. It comes with `{provider.install}`{how}"
    raise KernelError(f"{_numbered(provider, index)!r} is not there: {reason}. {_there()}", "device")


def _numbered(provider: Provider, index: int) -> str:
    return f"{provider.name}:{index}" if index else provider.name


def _there() -> str:
    return f"There {'are' if len(there := devices()) > 1 else 'is'} {', '.join(device.name for device in there)}"


def _plugins(provider: Provider) -> list[Any]:
    """onnxruntime's records of the devices of a plugin, whose library is registered where it is installed."""
    if provider is CPU or not hasattr(onnxruntime, "get_ep_devices"):
        return []
    with _registration:
        result = [d for d in onnxruntime.get_ep_devices() if d.ep_name == provider.ep]
        if not result and provider.package and find_spec(provider.package):
            _register(provider.package, provider.library)
            result = [d for d in onnxruntime.get_ep_devices() if d.ep_name == provider.ep]
    return result


@cache  # a library that finds no device is not registered again
def _register(package: str, library: str) -> None:
    try:
        path = getattr(import_module(package), library)()
        onnxruntime.register_execution_provider_library(package, str(path))
    except Exception as e:
        raise KernelError(f"onnxruntime does not take the library of {package}: {e}. Install another version") from e
