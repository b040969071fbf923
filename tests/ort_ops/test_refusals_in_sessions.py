"""Bad input on every route: a failed status or an earlier error, never numbers and never a crash.

The models say nothing of any length, so what is wrong with the shapes shows only in the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.declarations.declaration import ones
from tests.declarations.registry import REFUSED, VALID, spoilt
from tests.support import single_op
from tests.support.batch import calls_together, check_each, switched

RUNNABLE = [bad for bad in REFUSED if bad.model_shows_it]  # others cannot be written as a model


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_unchanged_calls_run(kernels: str) -> None:
    """Otherwise the failures below would prove nothing."""

    def run(ops: Sequence[str]) -> list[list[np.ndarray]]:
        return calls_together([(op, VALID[op][0], ones(VALID[op][1])) for op in ops], kernels)()

    def check(_: str, answers: list[np.ndarray]) -> None:
        assert np.isfinite(answers[0]).all()

    check_each(list(VALID), run, check)


def conversion_error(model: ModelProto, kernels: str) -> ob.OnnxBackpropError | None:
    try:
        ob.use_kernels(model, kernels)
    except ob.OnnxBackpropError as e:
        return e
    return None


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", list(VALID))
def test_refusals(op: str, kernels: str) -> None:
    """What converts is in one session, of which each run takes one call."""
    bads = [bad for bad in RUNNABLE if bad.op == op]
    models = [single_op.model(op, attributes, ones(inputs)) for attributes, inputs in map(spoilt, bads)]
    earlier = [conversion_error(model, kernels) for model in models]
    for bad, e in zip(bads, earlier, strict=True):
        assert e is None or str(e).startswith(f"{op} 'the_node': "), bad.id
        assert not isinstance(e, ob.KernelError), bad.id
    run = [(bad, model) for bad, model, e in zip(bads, models, earlier, strict=True) if e is None]
    if not run:
        return
    session = ob.session(switched([model for _, model in run]), kernels=kernels)
    feeds = {
        f"{n}/{name}": array
        for n, (bad, _) in enumerate(run)
        for name, array in single_op.feeds(op, ones(spoilt(bad)[1])).items()
    } | {f"{n}/on": np.array(False) for n in range(len(run))}
    session.run(None, feeds)  # none of them runs
    for n, (bad, _) in enumerate(run):
        with pytest.raises(Exception, match=f"{op}: ") as failed:
            session.run(None, feeds | {f"{n}/on": np.array(True)})
        assert type(failed.value).__module__.startswith("onnxruntime"), bad.id
        assert kernels == "onnx" or bad.message in str(failed.value), bad.id
