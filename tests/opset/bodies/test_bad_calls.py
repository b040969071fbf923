"""A bad call does not run as standard operators either, of whose shapes the model tells nothing."""

from __future__ import annotations

import pytest

from tests.declarations.declaration import Attributes, ones
from tests.declarations.registry import REFUSED, VALID, spoilt
from tests.opset.bodies.body_models import Arrays, model_of, plain_session
from tests.support import single_op

# Models hold no booleans. Nothing is to be interpolated where nothing comes, whatever the rank, of which sizes say nothing.
HARMLESS = {"attribute groups: expected int, got True", "attribute sizes: expected values >= 1, got [0]"}


def _runs(op: str, attributes: Attributes, arrays: Arrays, knowledge: str) -> bool:
    try:
        session = plain_session(model_of(op, attributes, arrays, knowledge, constants=False))
        accepted = {i.name for i in session.get_inputs()}
        session.run(None, {k: v for k, v in single_op.feeds(op, arrays).items() if k in accepted})
    except Exception:  # noqa: BLE001 - ours when it loads, or onnxruntime's, which have no common base
        return False
    return True


@pytest.mark.parametrize("knowledge", ["symbolic", "nothing"])
@pytest.mark.parametrize("op", list(VALID))
def test_a_bad_call_does_not_run(op: str, knowledge: str) -> None:
    if op == "ResizeGrad" and knowledge == "nothing":
        knowledge = "rank"  # without which it has no body
    attributes, inputs = VALID[op]
    assert _runs(op, attributes, ones(inputs), knowledge)
    bad_calls = [bad for bad in REFUSED if bad.op == op and bad.message not in HARMLESS]
    assert not [bad for bad in bad_calls if _runs(op, (call := spoilt(bad))[0], ones(call[1]), knowledge)]
