"""onnx2pytorch: `ConvertModel`, differentiated by PyTorch; in evaluation, as the model is."""

from onnx2pytorch import ConvertModel

from onnx_gradient_scoreboard.adapters.torch_module import differentiate
from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its README has it."""
    return differentiate(question, ConvertModel(question.model).eval())
