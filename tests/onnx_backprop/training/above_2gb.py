"""`python -m pytest tests/onnx_backprop/training/above_2gb.py`: a model above protobuf's limit, for real.

Four matrices of 13,000 x 13,000, 2.7 GB beside the model: needs 9 GB of disk, 4 GB of memory and some minutes. The same
way on small files with a lowered limit is in `test_mapped_weights`.
"""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import onnx_backprop as ob

WIDTH, LAYERS = 13_000, 4


def write(folder: Path) -> Path:
    rng, nodes, tensors = np.random.default_rng(0), [], []
    with (folder / "large.bin").open("wb") as file:
        for n in range(LAYERS):
            tensor = TensorProto(name=f"w{n}", data_type=1, dims=[WIDTH] * 2, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", "large.bin"), ("offset", file.tell()), ("length", 4 * WIDTH**2)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"h{n + 1}"]))
            for _ in range(13):
                file.write((rng.standard_normal((WIDTH // 13, WIDTH), np.float32) / WIDTH**0.5).tobytes())
    values = [helper.make_tensor_value_info(f"h{n}", 1, ["batch", WIDTH]) for n in (0, LAYERS)]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "m.onnx")
    return folder / "m.onnx"


def test_four_large_matrices(tmp_path: Path) -> None:
    adapted = ob.lora(write(tmp_path), ["w*"], rank=4)
    graph = ob.training_graph(adapted.model, loss="mse", trainable=adapted.trainable, optimizer="adamw")
    x = np.random.default_rng(1).standard_normal((4, WIDTH), np.float32)
    batch = {"h0": x, "target": np.zeros_like(x)}
    trainer = ob.Trainer(graph, learning_rate=1e-4)
    losses = [trainer.step(batch) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    trainer.export(tmp_path / "out.onnx")
    trainer.save(tmp_path / "it.safetensors")
    # 2.7 GB of weights, and little beside them
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 1.3 * 4 * LAYERS * WIDTH**2
    expected = trainer.evaluate(batch)
    del trainer
    y = np.asarray(ob.session(tmp_path / "out.onnx").run(None, {"h0": x})[0])
    assert abs(np.square(y).mean() - expected) < 1e-4 * expected
    again = ob.Trainer(ob.training_graph(tmp_path / "out.onnx", loss="mse", trainable=["w0.lora_A"], optimizer="sgd"))
    assert abs(again.step(batch) - expected) < 1e-4 * expected
