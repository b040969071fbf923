"""AvgPoolBackward, compiled: every source cell gathers the shares of the windows that it lies in."""

from __future__ import annotations

from ..opset.avg_pool_backward import OP, taps
from .interpolation_gather import functions
from .interpolation_plans import plan
from .native_bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    windows = call.inputs[0]
    assert windows is not None
    return plan(call, 0, lambda: taps(call.attributes, call.output, windows))


KERNEL = NativeKernel(OP, _plan, functions)
