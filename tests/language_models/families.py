"""What is trained in transformers beside a file of onnxruntime-genai's builder: the module, its weights, its losses."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_backprop.converters.finetune.lora import LoraModel

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
peft: Any = import_module("peft")

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
FOLDER = Path(os.environ.get("LANGUAGE_MODELS", ""))  # of what make_models.py has written
FAMILIES = ("llama", "llama_apart", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "phi3", "gptoss", "smollm3")
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
STEPS, ROWS, TOKENS = 10, 2, 8  # tokens within the sliding windows: the builder leaves Mistral's out


def batches(vocabulary: int = 1024) -> list[np.ndarray]:
    """The token ids of each step."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocabulary, (ROWS, TOKENS)) for _ in range(STEPS)]


def module(family: str) -> Any:
    """The module in float32, without dropout."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / family / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def place(name: str, model: Any) -> list[str]:
    """The linear layers of the module that a weight or a node of the builder is of: several where it is packed."""
    layer = re.sub(r"[/.](MatMul|Gather).*", "", name.strip("/").replace("/", ".")).replace(".attn.", ".self_attn.")
    known = {path for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    if layer.endswith("self_attn.o_proj") and layer not in known:
        return [layer.replace("o_proj", "dense")]  # of Phi
    parent, _, last = layer.rpartition(".")
    return [layer] if layer in known else [f"{parent}.{part}" for part in PACKED[last]]


def put_packed_weights(model: Any, file: Path) -> None:
    """Put the weights of an int4 file, dequantised, into the module."""
    proto = onnx.load(file)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        table = node.op_type == "GatherBlockQuantized"
        if table and node.input[0] not in tensors:
            continue  # the packed head in another shape, which the module shares too
        packed, scales = (tensors[node.input[n]] for n in ((0, 2) if table else (1, 2)))
        points = tensors.get(node.input[3]) if len(node.input) > 3 else None
        weight = torch.from_numpy(unpacked(packed, scales, points, given["block_size"]))
        half = re.search(r"layers\.(\d+)/mlp/(gate|up)_proj", node.name)
        if half and hasattr(model.model.layers[0].mlp, "gate_up_proj"):  # Phi-3 packs what the builder keeps apart
            whole = model.model.layers[int(half[1])].mlp.gate_up_proj.weight
            rows = len(whole) // 2
            first = rows if half[2] == "up" else 0
            whole.data[first : first + rows] = weight[:rows, : whole.shape[1]]
            continue
        layers = [model.get_input_embeddings()] if table else map(model.get_submodule, place(node.name, model))
        start = 0
        for layer in layers:
            rows, columns = layer.weight.shape
            layer.weight.data = weight[start : start + rows, :columns].clone()
            start += rows


def unpacked(packed: np.ndarray, scales: np.ndarray, points: np.ndarray | None, size: int) -> np.ndarray:
    """(q - zero point) · scale of 4 bits, two a byte, the low half first; (rows, K)."""
    rows = packed.shape[0]
    size = min(size, 2 * packed[0].size)
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1, size).astype(np.float32)
    zero = np.full((rows, numbers.shape[1]), 8, np.float32)
    if points is not None:
        zero = np.stack([points & 15, points >> 4], -1).reshape(rows, -1)[:, : numbers.shape[1]].astype(np.float32)
    return ((numbers - zero[..., None]) * scales.reshape(rows, -1, 1)).reshape(rows, -1)


def losses(model: Any, rate: float, **more: Any) -> list[float]:
    """Those of each step of AdamW without decay."""
    parameters = list(dict.fromkeys(p for p in model.parameters() if p.requires_grad))
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0)
    result: list[float] = []
    for ids in batches():
        tokens = torch.from_numpy(ids)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, **more).loss
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def adapted(model: Any, ours: LoraModel, rank: int) -> Any:
    """The module with adapters of peft beside the layers that have one of ours, beginning with its numbers.

    Layers that the builder packs into one share A, as they do there.
    """
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in ours.model.graph.initializer}
    pairs = [(place(down, model), down, up) for down, up in zip(ours.trainable[::2], ours.trainable[1::2], strict=True)]
    targets = [layer for layers, _, _ in pairs for layer in layers]
    config = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=targets)
    result = peft.get_peft_model(model, config)
    for layers, down, up in pairs:
        shared = torch.nn.Parameter(torch.from_numpy(values[down].T.copy()))
        start = 0
        for layer in layers:
            adapter = result.base_model.model.get_submodule(layer)
            adapter.lora_A["default"].weight = shared
            b = adapter.lora_B["default"].weight
            b.data = torch.from_numpy(values[up].T[start : start + len(b)].copy())
            start += len(b)
    return result
