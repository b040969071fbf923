"""One driver for the corrections of inference: each looks at what was inferred and says what to infer in its place."""

from collections.abc import Callable

from onnx import ModelProto

Infer = Callable[[ModelProto], ModelProto]
Correct = Callable[[ModelProto], ModelProto | None]  # what was inferred -> what to infer next; None: it is right
Correction = Callable[[ModelProto], Correct]  # begins at a model that was not inferred yet, which it may change


def infer_corrected(proto: ModelProto, infer: Infer, *corrections: Correction) -> ModelProto:
    """`infer(proto)`, again until no correction asks for more. Each begins anew whenever one behind it has asked."""
    if not corrections:
        return infer(proto)
    *inner, begin = corrections
    correct = begin(proto)
    inferred = infer_corrected(proto, infer, *inner)
    while (changed := correct(inferred)) is not None:
        inferred = infer_corrected(changed, infer, *inner)
    return inferred
