"""What an answer is: right, wrong, refused (by a sentence or badly), crashed or slow. Rules that anybody can dispute.

right      every number within the tolerance; or, where ONNX calls the operator not differentiable, a sentence
wrong      numbers that are not the derivative, not finite or of another shape, and no error
sentence   an exception that says in words what is not handled: of a class of the producer's own, NotImplementedError,
           one with "not supported" or the like, or one that names an operator of ONNX, a tensor of the model, its opset
badly      any other exception: KeyError, AttributeError and the like, an assertion, words about something else, or a
           graph of its own that onnxruntime will not load or run
crashed    the process ended; slow: no answer in the time that `runner` gives
"""

from __future__ import annotations

import re

import numpy as np
from onnx import defs

from onnx_gradient_scoreboard.cases import Case
from onnx_gradient_scoreboard.questions import Question
from onnx_gradient_scoreboard.reference import Reference

VERDICTS = ("right", "wrong", "sentence", "badly", "crashed", "slow")
BARE = {
    "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "MemoryError", "NameError",
    "RecursionError", "StopIteration", "TypeError", "ZeroDivisionError",
}  # fmt: skip
SAID = (
    "not supported",
    "unsupported",
    "not implemented",
    "could not find an implementation",
    "opset",
    "static",
    "symbolic",
)


def verdict(
    case: Case, question: Question, reference: Reference, header: dict, answer: dict[str, np.ndarray], package: str
) -> tuple[str, str]:
    """The verdict and what there is to say. package: what the producer is imported as."""
    if "error" in header:
        text = f"{header['kinds'][0]}: {' '.join(header['error'].split())}"
        if not _is_sentence(question, header, package):
            return "badly", text
        return ("right" if not case.differentiable else "sentence"), text
    names = question.outputs if question.kind == "jvp" else question.wrt
    missing = [name for name in names if name not in answer]
    if missing:
        return "badly", f"no answer for {', '.join(missing)}"
    error = reference.error(case, answer, question.kind, question.wrt)
    return ("right" if error <= 1 else "wrong"), f"{error:.3g} of what is allowed"


def _is_sentence(question: Question, header: dict, package: str) -> bool:
    text, kinds, module = header["error"], set(header["kinds"]), header["from"].partition(".")[0]
    if kinds & BARE or len(text.split()) < 3 or (module == "onnxruntime" != package):
        return False
    if module == package or "NotImplementedError" in kinds or any(word in text.lower() for word in SAID):
        return True
    nodes = question.model.graph.node
    names = {s.name for s in defs.get_all_schemas()} | {n for node in nodes for n in (node.name, *node.input)}
    return bool(set(re.findall(r"\w+", text)) & {n for n in names if len(n) > 1})
