"""The providers of onnxruntime that `device=` knows: where each comes from and what its graphs must avoid."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from onnx_backprop.converters.devices.limits import NO_LIMITS, Limits


@dataclass(frozen=True)
class Provider:
    """A provider of onnxruntime.

    name: what `device=` takes. ep: what onnxruntime calls it. install: the line that brings it, and `how`. needs: what
    else is to be there.
    package: the module of its plugin library, and the function there that gives its path; "" where it is built in.
    memory: what onnxruntime calls its memory where it is built in; "" where tensors lie in the CPU's. A plugin says it.
    limits: what its graph must avoid. Which operators and types it has kernels for onnxruntime itself knows.
    options: of its sessions, beside those that are given. lock: what is held while one of them runs, and while tensors
    are copied to its memory and back.
    """

    name: str
    ep: str
    install: str
    package: str = ""
    library: str = "get_library_path"
    memory: str = ""
    limits: Limits = NO_LIMITS
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    how: str = ""
    needs: str = ""
    about: str = ""


# What WebGPU's kernels lack: float64 and int64, so arithmetic on shapes runs on the host; MaxPool's Indices,
# BatchNormalization in training mode, antialias of Resize and Split into many parts, which its kernels take and then
# fail; the other operators altogether; and NaN, of which shaders make what the GPU pleases.
WEBGPU = Limits(
    fixed_lengths=True,
    float64=False,
    nan=False,
    lacks=frozenset(
        {"BatchNormalization", "LogSoftmax", "MaxPool", "OneHot", "Resize", "Sign", "SoftmaxCrossEntropyLoss"}
        | {"Split", "Sum"}
    ),
)
# onnxruntime's wheels have no training mode of BatchNormalization on CUDA; MaxPool and ReduceMax lose NaN there. A node
# that is annotated for the CPU ends the process (1.31). With fixed lengths arithmetic on shapes needs no GPU.
CUDA = Limits(fixed_lengths=True, nan=False, lacks=frozenset({"BatchNormalization"}), annotations=False)
# Compilers of whole graphs, which want lengths; what they lack falls back node by node.
COMPILED = Limits(fixed_lengths=True)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("cpu", "CPUExecutionProvider", "pip install onnxruntime", about="any CPU, by the native kernels"),
        Provider(
            "webgpu",
            "WebGpuExecutionProvider",
            "pip install onnxruntime-ep-webgpu",
            package="onnxruntime_ep_webgpu",
            lock=threading.RLock(),  # its sessions write into one list of commands, whichever thread they run in
            limits=WEBGPU,
            about="GPUs of AMD, Apple, Intel, NVIDIA and Qualcomm on Windows, Linux and macOS",
        ),
        Provider(
            "cuda",
            "CUDAExecutionProvider",
            "pip install 'onnxruntime-gpu[cuda,cudnn]'",
            how="in the place of onnxruntime",
            needs="a GPU of NVIDIA with its driver, CUDA and cuDNN: `pip install 'onnxruntime-gpu[cuda,cudnn]'`",
            memory="cuda",
            limits=CUDA,
            options=MappingProxyType({"use_tf32": "0"}),  # or else products are rounded to 10 bits
            about="GPUs of NVIDIA on Linux and Windows",
        ),
        Provider(
            "coreml",
            "CoreMLExecutionProvider",
            "pip install onnxruntime",
            how="on macOS, whose wheels have it",
            limits=COMPILED,
            options=MappingProxyType({"ModelFormat": "MLProgram"}),
            about="GPU and neural engine of Apple, on macOS",
        ),
        Provider(
            "mlx",
            "MLXExecutionProvider",
            "pip install onnxruntime-ep-mlx",
            package="onnxruntime_ep_mlx",
            library="library_path",
            limits=Limits(fixed_lengths=True, float64=False, nan=False),
            about="GPU of Apple, on macOS",
        ),
        Provider(
            "directml",
            "DmlExecutionProvider",
            "pip install onnxruntime-directml",
            how="in the place of onnxruntime, on Windows",
            memory="dml",
            limits=COMPILED,
            about="GPUs of any vendor on Windows",
        ),
        Provider(
            "openvino",
            "OpenVINOExecutionProvider",
            "pip install onnxruntime-ep-openvino",
            package="onnxruntime_ep_openvino",
            limits=COMPILED,
            # or else products are rounded to bfloat16 where the processor has that
            options=MappingProxyType({"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}),
            about="CPU, GPU and NPU of Intel",
        ),
    )
}
