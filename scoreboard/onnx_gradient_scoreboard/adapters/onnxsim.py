"""onnxsim: `compile_training_loop` with an optimizer whose new parameter is the gradient."""

import numpy as np
import onnxsim.compile_training as onnxsim
from onnx import parser

from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question

GRADIENT = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[1] p, float[1] g, float lr) => (float[1] q) '
    "{ q0 = Mul(p, zero) q1 = Add(q0, g) q2 = Mul(lr, zero) q = Add(q1, q2) }"
    .replace("{ ", "{ zero = Constant<value_float = 0.0>() ")
)  # fmt: skip


def answer(question: Question) -> Arrays:
    """As its documentation of training loops has it; the loss is a number that the model computes."""
    model, loss = question.with_loss()
    optimizer = onnxsim.CustomOptimizer(model=GRADIENT, num_state=0)
    loop = onnxsim.compile_training_loop(model, loss, list(question.wrt), optimizer=optimizer)
    loop(question.feeds, lr=1.0)
    return {n: np.asarray(loop.parameters()[n]) for n in question.wrt}
