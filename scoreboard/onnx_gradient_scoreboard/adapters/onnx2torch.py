"""onnx2torch: `convert`, differentiated by PyTorch; in evaluation, as the model is."""

from onnx2torch import convert

from onnx_gradient_scoreboard.adapters.torch_module import differentiate
from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its README has it."""
    return differentiate(question, convert(question.model).eval())
