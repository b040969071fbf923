"""SoftMaxBackward, compiled: two passes over a line while it is in a cache, or over a block of lines side by side."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.operators.soft_max_backward import OP
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
    stack,
    store_bf16,
    store_f16,
    store_f32,
)
from onnx_backprop.ort_ops.vector.rows import clear

# the tensor is (OUTER, LENGTH, INNER); an item is ROWS of OUTER where INNER is 1, else BLOCK of INNER of one of OUTER
WORKER, KIND, OUTER, LENGTH, INNER, ROWS, ITEMS = range(7)
CHUNK = 4096  # elements added up in float32
BLOCK = 64
ELEMENTS = 1 << 14  # of an item, about

_sums = stack(BLOCK // 2)


def _loops(name: str, load: Any, store: Any) -> tuple[Any, Any]:
    @compiled(f"softmax_dot_{name}", fastmath={"reassoc", "contract"})
    def dot(dy, y, first, count):
        total = np.float32(0.0)
        for i in range(count):
            total += load(dy, first + i) * load(y, first + i)
        return total

    @compiled(f"softmax_line_{name}")
    def line(dx, dy, y, first, length):
        total = 0.0
        for done in range(0, length, CHUNK):
            total += np.float64(dot(dy, y, first + done, min(CHUNK, length - done)))
        along = np.float32(total)
        for i in range(first, first + length):
            store(dx, i, load(y, i) * (load(dy, i) - along))

    @compiled(f"softmax_block_{name}")
    def block(dx, dy, y, first, length, inner, count, sums):
        clear(sums, 0, count)
        for k in range(length):
            at = first + k * inner
            for i in range(count):
                store_f32(sums, i, load_f32(sums, i) + load(dy, at + i) * load(y, at + i))
        for k in range(length):
            at = first + k * inner
            for i in range(count):
                store(dx, at + i, load(y, at + i) * (load(dy, at + i) - load_f32(sums, i)))

    return line, block


_line_f32, _block_f32 = _loops("f32", load_f32, store_f32)
_line_f16, _block_f16 = _loops("f16", load_f16, store_f16)
_line_bf16, _block_bf16 = _loops("bf16", load_bf16, store_bf16)


@inner
def _work(call, item):
    p = load_i64(call, CALL_PARAMETERS)
    dy, y, dx = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    kind, length, inner, rows = load_i64(p, KIND), load_i64(p, LENGTH), load_i64(p, INNER), load_i64(p, ROWS)
    if inner == 1:
        for row in range(item * rows, min(load_i64(p, OUTER), (item + 1) * rows)):
            if kind == F16:
                _line_f16(dx, dy, y, row * length, length)
            elif kind == BF16:
                _line_bf16(dx, dy, y, row * length, length)
            else:
                _line_f32(dx, dy, y, row * length, length)
        return
    blocks = (inner + BLOCK - 1) // BLOCK
    start = item % blocks * BLOCK
    count, first, sums = min(BLOCK, inner - start), item // blocks * length * inner + start, _sums()
    if kind == F16:
        _block_f16(dx, dy, y, first, length, inner, count, sums)
    elif kind == BF16:
        _block_bf16(dx, dy, y, first, length, inner, count, sums)
    else:
        _block_f32(dx, dy, y, first, length, inner, count, sums)


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(call, item):
        _work(call, item)

    @exported(types.int64(types.int64))
    def run(call):
        p = load_i64(call, CALL_PARAMETERS)
        return parallel(call, load_i64(p, WORKER), call, load_i64(p, ITEMS))

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _plan(call: Call) -> Plan:
    work, run = _functions()
    axis = call.attributes["axis"] % len(call.output)
    outer, length, inner = math.prod(call.output[:axis]), call.output[axis], math.prod(call.output[axis + 1 :])
    rows = max(1, ELEMENTS // length)
    items = -(-outer // rows) if inner == 1 else outer * -(-inner // BLOCK)
    words = [work.address, call.element_type, outer, length, inner, rows, items]
    return Plan(run.address, np.array(words, np.int64))


KERNEL = NativeKernel(OP, _plan, _functions)
