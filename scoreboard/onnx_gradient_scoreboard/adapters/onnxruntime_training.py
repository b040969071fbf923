"""onnxruntime-training: artifacts for the loss Σ seed·y, one call of its Module, gradients of its parameters."""

import tempfile

import onnx
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module

from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its documentation of on-device training has it; the loss is the first output of the model."""
    model, _ = question.with_loss()
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/forward.onnx")
        artifacts.generate_artifacts(model, requires_grad=list(question.wrt), artifact_directory=folder)
        state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
        module = Module(f"{folder}/training_model.onnx", state)
        module.train()
        module(*(question.feeds[n] for n in module.input_names()))
        return {n: state.parameters[n].grad for n in question.wrt}
