"""What somebody who checks types strictly writes: nothing is unknown. `make lint` looks at it, nobody runs it."""
# pyright: strict

from typing import Any, assert_type

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob


def train(x: np.ndarray) -> None:
    optimizer = ob.optimizers.AdamW(clip_norm=1.0, groups=[ob.optimizers.Group(parameters=["*.bias"])])
    graph = ob.training_graph("model.onnx", loss=ob.losses.MSE(), optimizer=optimizer)
    assert_type(graph.parameters, dict[str, str])
    trainer = ob.Trainer(graph, learning_rate=1e-3)
    assert_type(trainer.step(x, x), float)
    records = trainer.fit(ob.Batches({"x": x}, 4), 1, schedule=ob.schedules.Cosine(1e-3, steps=10), log=print)
    assert_type(records[0].loss, float)
    assert_type(trainer.predict(x=x), dict[str, Any])


def differentiate(x: np.ndarray) -> None:
    assert_type(ob.backward("model.onnx"), ModelProto)
    assert_type(ob.check_gradients("model.onnx").ok, bool)
    assert_type(ob.explain_gradients("model.onnx").ok, bool)
    assert_type(ob.lora("model.onnx", ["*"], 4).model, ModelProto)
    assert_type(ob.replace_head("model.onnx", "y", 3).trainable, tuple[str, ...])
    assert_type(ob.value_and_grad("model.onnx")(x)[0], float)
    ob.session("model.onnx")
    ob.torch.module("model.onnx").export("trained.onnx")
