"""This repository's own: `ob.vjp`, `ob.jvp` and `ob.hvp`, run on one of its routes."""

import onnx_backprop as ob
from onnx_gradient_scoreboard.cases import Arrays
from onnx_gradient_scoreboard.questions import Question

SEED = {"jvp": "tangent", "second": "direction"}
RESULT = {"jvp": "tangent", "second": "hvp"}


def answer(question: Question, kernels: str) -> Arrays:
    """As docs/derivatives.md has it."""
    make = {"jvp": ob.jvp, "second": ob.hvp}.get(question.kind, ob.vjp)
    model = make(question.model, wrt=list(question.wrt), of=list(question.outputs))
    seed, result = SEED.get(question.kind, "grad"), RESULT.get(question.kind, "grad")
    names = question.outputs if question.kind == "jvp" else question.wrt
    feeds = question.feeds | {f"{n}_{seed}": a for n, a in question.seeds.items()}
    session = ob.session(model, kernels=kernels)
    taken = {i.name for i in session.get_inputs()}
    results = session.run([f"{n}_{result}" for n in names], {n: a for n, a in feeds.items() if n in taken})
    return dict(zip(names, results, strict=True))
