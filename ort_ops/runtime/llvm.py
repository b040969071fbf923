"""What the native kernels need of LLVM: memory by address, calls by address, stack space, atomic exchange.

Addresses are int64 throughout, so that compiled code holds no address of this process and can be cached on disk.
`load` and `store` take an element type (F32, F16, BF16), compute in float32 and round to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic


def intrinsic(definition: Callable[..., Any]) -> Any:
    """Numba's decorator, which drops the first parameter; `language` asks for the definition."""
    made: Any = _intrinsic(definition)
    made.definition = definition
    return made


F32, F16, BF16 = 1, 10, 16  # ONNXTensorElementDataType
ITEM_SIZE = {F32: 4, F16: 2, BF16: 2}

I64, I32, I16, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType(), ir.HalfType()
DOUBLE = ir.DoubleType()


def _at(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """&((kind*)address)[index]; base and index apart, so that loops over the index vectorise."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index], source_etype=kind)


def _loader(kind: Any, result: Any, convert: Any = None) -> Any:
    @intrinsic
    def load(_context, address, index):
        def generate(_target, builder, _signature, args):
            value = builder.load(_at(builder, args[0], args[1], kind))
            return convert(builder, value) if convert else value

        return result(types.int64, types.int64), generate

    return load


def _storer(kind: Any, argument: Any, convert: Any = None) -> Any:
    @intrinsic
    def store(_context, address, index, value):
        def generate(target, builder, _signature, args):
            value = convert(builder, args[2]) if convert else args[2]
            builder.store(value, _at(builder, args[0], args[1], kind))
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, argument), generate

    return store


def _from_bf16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), FLOAT)


def _to_bf16(builder: Any, value: Any) -> Any:
    """Add half a unit, less one if that makes a tie odd; a NaN keeps its sign and becomes quiet."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.add(bits, builder.add(odd, I32(0x7FFF)))
    quiet = builder.or_(bits, I32(0x00400000))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(bits, I32(16)), I16)


load_i64 = _loader(I64, types.int64)
store_i64 = _storer(I64, types.int64)
load_i32 = _loader(I32, types.int32)
store_i32 = _storer(I32, types.int32)
load_f64 = _loader(DOUBLE, types.float64)
store_f64 = _storer(DOUBLE, types.float64)
load_f32 = _loader(FLOAT, types.float32)
store_f32 = _storer(FLOAT, types.float32)
load_f16 = _loader(HALF, types.float32, lambda builder, value: builder.fpext(value, FLOAT))
store_f16 = _storer(HALF, types.float32, lambda builder, value: builder.fptrunc(value, HALF))
load_bf16 = _loader(I16, types.float32, _from_bf16)
store_bf16 = _storer(I16, types.float32, _to_bf16)


@intrinsic
def fma_f32(_context, x, y, z):
    """x·y + z, rounded once."""

    def generate(_target, builder, _signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def call(_context, address, arguments):
    """Call the C function at `address` with a tuple of int64 arguments; its result as int64.

    A 32-bit parameter takes the lower half of its register, on x86-64 as on AArch64; the result of a function that
    returns less than 64 bits must be masked.
    """

    def generate(_target, builder, signature, args):
        kind = ir.FunctionType(I64, [I64] * len(signature.args[1]))
        values = cgutils.unpack_tuple(builder, args[1])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

    return types.int64(types.int64, arguments), generate


def stack(words: int) -> Any:
    """An intrinsic that answers the address of so many int64 on the caller's stack, one place per call site."""

    @intrinsic
    def reserve(_context):
        def generate(_target, builder, _signature, _args):
            return builder.ptrtoint(cgutils.alloca_once(builder, I64, size=I64(words)), I64)

        return types.int64(), generate

    return reserve


@intrinsic
def exchange(_context, address, value):
    """Store an int64 and answer what was there, atomically."""

    def generate(_target, builder, _signature, args):
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("xchg", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fetch_add(_context, address, value):
    """Add to an int64 and answer what was there, atomically."""

    def generate(_target, builder, _signature, args):
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fetch_max(_context, address, value):
    """Store an int64 where it is greater than what is there, and answer what was there, atomically."""

    def generate(_target, builder, _signature, args):
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("max", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
