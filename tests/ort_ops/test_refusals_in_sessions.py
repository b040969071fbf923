"""Bad input on every route: a failed status or an earlier error, never numbers and never a crash.

The models say nothing of any length, so what is wrong with the shapes shows only in the run.
"""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from tests.declarations.declaration import Bad, ones
from tests.declarations.registry import REFUSED, VALID, spoilt
from tests.support import single_op

RUNNABLE = [bad for bad in REFUSED if bad.model_shows_it]  # others cannot be written as a model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", list(VALID))
def test_the_unchanged_calls_run(op: str, kernels: str) -> None:
    """Otherwise the failures below would prove nothing."""
    attributes, inputs = VALID[op]
    assert np.isfinite(single_op.run(op, attributes, ones(inputs), kernels=kernels)).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", RUNNABLE, ids=lambda bad: bad.id)
def test_refusals(bad: Bad, kernels: str) -> None:
    attributes, inputs = spoilt(bad)
    model = single_op.model(bad.op, attributes, ones(inputs))
    with pytest.raises(Exception, match=bad.op) as failed:  # noqa: PT012 - which of the two lines fails is the question
        session = ob.session(model, kernels=kernels)
        session.run(None, single_op.feeds(bad.op, ones(inputs)))
    if isinstance(failed.value, ob.OnnxBackpropError):
        assert str(failed.value).startswith(f"{bad.op} 'the_node': ")
        assert not isinstance(failed.value, ob.KernelError)
    else:
        assert type(failed.value).__module__.startswith("onnxruntime")
        assert f"{bad.op}: " in str(failed.value)
        assert kernels not in PYTHON_KERNELS or bad.message in str(failed.value)
