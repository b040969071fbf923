"""Runs of elements of any type: to float32, from float32, added up. Compiled.

A run is an address, a first index, a step between elements and a count. Steps of one have loops of their own, which
vectorise.
"""

from __future__ import annotations

from typing import Any

from onnx_backprop.ort_ops.runtime.compile import compiled, inner
from onnx_backprop.ort_ops.runtime.llvm import (
    BF16,
    F16,
    load_bf16,
    load_f16,
    load_f32,
    store_bf16,
    store_f16,
    store_f32,
)
from onnx_backprop.ort_ops.vector.registers import clear_run, copy_even, copy_run, spread_even


def _reader(name: str, load: Any) -> Any:
    @compiled(f"read_{name}")
    def read(target, to, source, first, step, count):
        if step == 1:
            for i in range(count):
                store_f32(target, to + i, load(source, first + i))
        else:
            for i in range(count):
                store_f32(target, to + i, load(source, first + i * step))

    return read


def _scatterer(name: str, load: Any) -> Any:
    @compiled(f"scatter_{name}")
    def read(target, to, target_step, source, first, step, count):
        for i in range(count):
            store_f32(target, to + i * target_step, load(source, first + i * step))

    return read


def _writer(name: str, store: Any) -> Any:
    @compiled(f"write_{name}")
    def write(target, to, step, source, first, count):
        if step == 1:
            for i in range(count):
                store(target, to + i, load_f32(source, first + i))
        else:
            for i in range(count):
                store(target, to + i * step, load_f32(source, first + i))

    return write


def _adder(name: str, load: Any) -> Any:
    @compiled(f"add_{name}")
    def add(target, source, first, count):
        for i in range(count):
            store_f32(target, i, load_f32(target, i) + load(source, first + i))

    return add


_read_f16 = _reader("f16", load_f16)
_read_bf16 = _reader("bf16", load_bf16)
_scatter_f32 = _scatterer("f32", load_f32)
_scatter_f16 = _scatterer("f16", load_f16)
_scatter_bf16 = _scatterer("bf16", load_bf16)
_write_f16 = _writer("f16", store_f16)
_write_bf16 = _writer("bf16", store_bf16)
_add_f32 = _adder("f32", load_f32)
_add_f16 = _adder("f16", load_f16)
_add_bf16 = _adder("bf16", load_bf16)


@inner
def _read_f32(target, to, source, first, step, count):
    if step == 1:
        copy_run(target + 4 * to, source + 4 * first, count)
    elif step == 2:
        copy_even(target + 4 * to, source + 4 * first, count)
    else:
        for i in range(count):
            store_f32(target, to + i, load_f32(source, first + i * step))


@inner
def _write_f32(target, to, step, source, first, count):
    if step == 1:
        copy_run(target + 4 * to, source + 4 * first, count)
    elif step == 2:
        spread_even(target + 4 * to, source + 4 * first, count)
    else:
        for i in range(count):
            store_f32(target, to + i * step, load_f32(source, first + i))


@inner
def read_run(kind, target, to, source, first, step, count):
    """float32 target[to + i] = source[first + i·step]."""
    if kind == F16:
        _read_f16(target, to, source, first, step, count)
    elif kind == BF16:
        _read_bf16(target, to, source, first, step, count)
    else:
        _read_f32(target, to, source, first, step, count)


@inner
def scatter_run(kind, target, to, target_step, source, first, step, count):
    """float32 target[to + i·target_step] = source[first + i·step]."""
    if kind == F16:
        _scatter_f16(target, to, target_step, source, first, step, count)
    elif kind == BF16:
        _scatter_bf16(target, to, target_step, source, first, step, count)
    else:
        _scatter_f32(target, to, target_step, source, first, step, count)


@inner
def write_run(kind, target, to, step, source, first, count):
    """target[to + i·step] = float32 source[first + i], rounded once."""
    if kind == F16:
        _write_f16(target, to, step, source, first, count)
    elif kind == BF16:
        _write_bf16(target, to, step, source, first, count)
    else:
        _write_f32(target, to, step, source, first, count)


@inner
def add_run(kind, target, source, first, count):
    """float32 target[i] += source[first + i]."""
    if kind == F16:
        _add_f16(target, source, first, count)
    elif kind == BF16:
        _add_bf16(target, source, first, count)
    else:
        _add_f32(target, source, first, count)


@inner
def clear(target, to, count):
    """float32 target[to + i] = 0."""
    clear_run(target + 4 * to, count)
