"""What PyTorch differentiates: a module of the model's inputs, in their order."""

from collections.abc import Callable
from typing import Any

import torch

from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question


def differentiate(question: Question, module: Callable[..., Any]) -> Arrays:
    """Gradients, a product with the Jacobian or with the Hessian, by torch.autograd."""
    order = [value.name for value in question.model.graph.input]
    fixed = {n: torch.from_numpy(a.copy()) for n, a in question.feeds.items()}
    seeds = {n: torch.from_numpy(a.copy()) for n, a in question.seeds.items()}

    def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = fixed | dict(zip(question.wrt, values, strict=True))
        outputs = module(*(given[n] for n in order))
        return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)

    at = tuple(fixed[n] for n in question.wrt)
    moves = tuple(seeds[n] for n in question.wrt if n in seeds)
    autograd = torch.autograd.functional
    if question.kind == "jvp":
        names, result = question.outputs, autograd.jvp(call, at, moves)[1]
    elif question.kind == "second":
        names, result = question.wrt, autograd.hvp(lambda *v: call(*v)[0], at, moves)[1]
    else:
        names, result = question.wrt, autograd.vjp(call, at, tuple(seeds[n] for n in question.outputs))[1]
    result = result if isinstance(result, tuple) else (result,)
    return {n: a.detach().numpy() for n, a in zip(names, result, strict=True)}
