"""tinygrad: `OnnxRunner` runs the model as tensors, `Tensor.gradient` differentiates Σ seed·y."""

import tempfile

import onnx
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner

from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its documentation of `OnnxRunner` and `Tensor.gradient` has it."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        onnx.save(question.model, file.name)
        runner = OnnxRunner(file.name)
        feeds = {n: Tensor(a) for n, a in question.feeds.items()}
        tensors = {n: feeds[n] if n in feeds else runner.graph_values[n] for n in question.wrt}
        outputs = runner(feeds)
        terms = [(outputs[n] * Tensor(seed)).sum() for n, seed in question.seeds.items()]
        return {
            n: g.numpy() for n, g in zip(tensors, sum(terms[1:], terms[0]).gradient(*tensors.values()), strict=True)
        }
