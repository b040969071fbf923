"""onnx-ad: `reverse`, `forward`, and `forward` of `reverse`, in the layout "onnx", whose seeds have a trailing axis."""

import numpy as np
import onnx_ad

from onnx_gradient_scoreboard.cases import Arrays, session
from onnx_gradient_scoreboard.questions import Question


def answer(question: Question) -> Arrays:
    """As its README has it."""
    wrt, outputs, names = list(question.wrt), list(question.outputs), list(question.wrt)
    seeds = {n: a[..., None] for n, a in question.seeds.items()}
    if question.kind == "jvp":
        model = onnx_ad.forward(question.model, inputs=wrt, outputs=outputs, layout="onnx")
        feeds, prefix, names = {f"fwd_{n}": a for n, a in seeds.items()}, "fwd_", outputs
    else:
        model = onnx_ad.reverse(question.model, inputs=wrt, outputs=outputs, layout="onnx")
        feeds, prefix = {f"adj_{n}": a for n, a in seeds.items()}, "adj_"
    if question.kind == "second":
        model = onnx_ad.forward(model, inputs=wrt, outputs=[f"adj_{n}" for n in wrt], layout="onnx")
        feeds, prefix = {f"fwd_{n}": a for n, a in seeds.items()}, "fwd_adj_"
        feeds[f"adj_{outputs[0]}"] = np.ones(1, np.float32)
    results = session(model).run([prefix + n for n in names], question.feeds | feeds)
    axes = (-2, -1) if question.kind == "second" else -1
    return {n: a.squeeze(axes) for n, a in zip(names, results, strict=True)}
