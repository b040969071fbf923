"""What is trained in transformers beside a file of onnxruntime-genai's builder: the module, its weights, its losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import numpy_helper
from peft import LoraConfig, get_peft_model

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
FOLDER = Path(os.environ.get("LANGUAGE_MODELS", ""))  # of what make_models.py has written
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gptoss", "smollm3")
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


def put_packed_weights(model: Any, file: Path) -> None:
    """Put the weights of an int4 file, dequantised, into the module."""
    proto = onnx.load(file)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    for node in proto.graph.node:
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        size, table = given["block_size"], node.op_type == "GatherBlockQuantized"
        packed, scales = (tensors[node.input[n]] for n in ((0, 2) if table else (1, 2)))
        points = tensors.get(node.input[3]) if len(node.input) > 3 else None
        weight = unpacked(packed, scales, points, size)
        if table:
            model.get_input_embeddings().weight.data = torch.from_numpy(weight)
            continue
        weight = weight[: given["N"], : given["K"]]
        name = node.name.strip("/").replace("/attn/", "/self_attn/").rsplit("/", 1)[0].replace("/", ".")
        name = name.replace("o_proj", "dense") if f"{name}" not in linear and "o_proj" in name else name
        start = 0
        parent, _, last = name.rpartition(".")
        names = [name] if name in linear else [f"{parent}.{part}" for part in PACKED[last]]
        for one in names:
            rows = linear[one].weight.shape[0]
            linear[one].weight.data = torch.from_numpy(weight[start : start + rows].copy())
            start += rows


def unpacked(packed: np.ndarray, scales: np.ndarray, points: np.ndarray | None, size: int) -> np.ndarray:
    """(q - zero point) · scale of 4 bits, two a byte, the low half first; (rows, K)."""
    rows = packed.shape[0]
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


def adapted(model: Any, targets: list[str], rank: int) -> Any:
    """The module with adapters of peft beside the linear layers of these names."""
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=targets))
