"""ReLUBackward, compiled: one pass, cut into pieces for the threads."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.operators.relu_backward import OP
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan, keep
from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS, CALL_OUTPUT, CALL_PARAMETERS, parallel
from onnx_backprop.ort_ops.runtime.compile import compiled, exported, inner
from onnx_backprop.ort_ops.runtime.llvm import (
    BF16,
    F16,
    load_bf16,
    load_f16,
    load_f32,
    load_i64,
    store_bf16,
    store_f16,
    store_f32,
)

WORKER, KIND, COUNT, PIECES = range(4)
PIECE = 1 << 15  # elements, about


def _picker(name: str, load: Any, store: Any) -> Any:
    @compiled(f"relu_{name}")
    def pick(x, dy, dx, first, last):
        for i in range(first, last):
            store(dx, i, load(dy, i) if load(x, i) > np.float32(0.0) else np.float32(0.0))

    return pick


_pick_f32 = _picker("f32", load_f32, store_f32)
_pick_f16 = _picker("f16", load_f16, store_f16)
_pick_bf16 = _picker("bf16", load_bf16, store_bf16)


@inner
def _work(call, piece):
    p = load_i64(call, CALL_PARAMETERS)
    x, dy, dx = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    kind, count, pieces = load_i64(p, KIND), load_i64(p, COUNT), load_i64(p, PIECES)
    first, last = piece * count // pieces, (piece + 1) * count // pieces
    if kind == F16:
        _pick_f16(x, dy, dx, first, last)
    elif kind == BF16:
        _pick_bf16(x, dy, dx, first, last)
    else:
        _pick_f32(x, dy, dx, first, last)


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(call, piece):
        _work(call, piece)

    @exported(types.int64(types.int64))
    def run(call):
        p = load_i64(call, CALL_PARAMETERS)
        return parallel(call, load_i64(p, WORKER), call, load_i64(p, PIECES))

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _plan(call: Call) -> Plan:
    work, run = _functions()
    count = math.prod(call.output)
    return Plan(run.address, np.array([work.address, call.element_type, count, -(-count // PIECE)], np.int64))


KERNEL = NativeKernel(OP, _plan, _functions)
