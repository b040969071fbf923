"""jaxonnxruntime: `call_onnx_model` gives a JAX function, which JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxonnxruntime import call_onnx

from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its example of a forward call has it, under jax.vjp and jax.jvp."""
    function, weights = call_onnx.call_onnx_model(question.model, question.feeds)
    at = {n: jnp.asarray(question.feeds.get(n, weights.get(n))) for n in question.wrt}

    def outputs(moved: dict) -> dict:
        given = {n: moved.get(n, a) for n, a in question.feeds.items()}
        values = function(weights | {n: a for n, a in moved.items() if n in weights}, given)
        return dict(zip(question.outputs, values if isinstance(values, list | tuple) else [values], strict=True))

    if question.kind == "jvp":
        result = jax.jvp(outputs, (at,), (question.seeds,))[1]
    elif question.kind == "second":
        result = jax.jvp(jax.grad(lambda v: outputs(v)[question.outputs[0]]), (at,), (question.seeds,))[1]
    else:
        result = jax.vjp(outputs, at)[1](question.seeds)[0]
    return {n: np.asarray(a) for n, a in result.items()}
