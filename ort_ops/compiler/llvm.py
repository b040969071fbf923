"""What the native kernels need of LLVM: memory by address, calls by address, stack space, atomic exchange.

Addresses are int64 throughout, so that compiled code holds no address of this process and can be cached on disk.
`load` and `store` take an element type (F32, F16, BF16), compute in float32 and round to nearest, ties to even.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, cast

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.values import DOUBLE, FLOAT, INT, INT32, Inner, Intrinsic, Type

F32, F16, BF16 = 1, 10, 16  # ONNXTensorElementDataType
ITEM_SIZE = {F32: 4, F16: 2, BF16: 2}

Make = Callable[[ir.Function], None]  # writes a function, whose name and arguments are there
I64, I32, I16, I8, F32_TYPE, HALF = (*map(ir.IntType, (64, 32, 16, 8)), ir.FloatType(), ir.HalfType())


def intrinsic(result: Type | None, *parameters: Type | None) -> Callable[[Callable[..., Any]], Intrinsic]:
    """Of a function (builder, *values) that writes LLVM for a call and answers the result."""
    return lambda generate: Intrinsic(result, parameters, generate)


def routine(make: Make, suffix: str = "") -> Callable[[Callable[..., None]], Any]:
    """Decorator: calls of the stub call a separate LLVM function that `make` fills; int64 arguments, no result.

    Never inlined: a copy in every place where it is called would take several times as long to compile.
    """

    def decorate(declared: Callable[..., None]) -> Intrinsic:
        code = cast(FunctionType, declared).__code__
        name = f"onnx_backprop_{code.co_name}{suffix}"

        def generate(builder: ir.IRBuilder, *values: ir.Value) -> None:
            builder.call(function_of(builder.module, name, len(values), make), values)

        return Intrinsic(None, (INT,) * code.co_argcount, generate)

    return decorate


def choice(name: str, choices: dict[int, Make]) -> Make:
    """A function whose first argument is the number of the one that it calls with the others."""

    def make(function: ir.Function) -> None:
        number, *rest = function.args
        entry, nothing = (ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "nothing"))
        switch = entry.switch(number, nothing.block)
        for n, chosen in choices.items():
            case = ir.IRBuilder(function.append_basic_block(f"case_{n}"))
            case.call(function_of(function.module, f"onnx_backprop_{name}_{n}", len(rest), chosen), rest)
            case.ret_void()
            switch.add_case(I64(n), case.block)
        nothing.ret_void()

    return make


def function_of(module: ir.Module, name: str, arguments: int, make: Make, inlining: str = "noinline") -> ir.Function:
    """The module's function of that name, made if it is new: int64 arguments and no result."""
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        function.linkage = "internal"
        function.attributes.add(inlining)
        make(function)
    return module.globals[name]


def _at(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """&((kind*)address)[index]; base and index apart, so that loops over the index vectorise."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index], source_etype=kind)


def _loader(kind: Any, result: Type, convert: Any = None) -> Any:
    @intrinsic(result, INT, INT)
    def load(builder, address, index):
        value = builder.load(_at(builder, address, index, kind))
        return convert(builder, value) if convert else value

    return load


def _storer(kind: Any, argument: Type, convert: Any = None) -> Any:
    @intrinsic(None, INT, INT, argument)
    def store(builder, address, index, value):
        builder.store(convert(builder, value) if convert else value, _at(builder, address, index, kind))

    return store


def _from_bf16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32_TYPE)


def _to_bf16(builder: Any, value: Any) -> Any:
    """Add half a unit, less one if that makes a tie odd; a NaN keeps its sign and becomes quiet."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.add(bits, builder.add(odd, I32(0x7FFF)))
    quiet = builder.or_(bits, I32(0x00400000))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(bits, I32(16)), I16)


load_i64, store_i64 = _loader(I64, INT), _storer(I64, INT)
load_u8 = _loader(I8, INT, lambda builder, value: builder.zext(value, I64))
load_i32, store_i32 = _loader(I32, INT32), _storer(I32, INT32)
load_f64, store_f64 = _loader(ir.DoubleType(), DOUBLE), _storer(ir.DoubleType(), DOUBLE)
load_f32, store_f32 = _loader(F32_TYPE, FLOAT), _storer(F32_TYPE, FLOAT)
load_f16 = _loader(HALF, FLOAT, lambda builder, value: builder.fpext(value, F32_TYPE))
store_f16 = _storer(HALF, FLOAT, lambda builder, value: builder.fptrunc(value, HALF))
load_bf16, store_bf16 = _loader(I16, FLOAT, _from_bf16), _storer(I16, FLOAT, _to_bf16)


@partial(Inner, apart=True)
def by_half(kind, function, *arguments):
    """function(load, store, *arguments) with those of a half type, whose loops are rare and long: not inlined."""
    if kind == F16:
        return function(load_f16, store_f16, *arguments)
    return function(load_bf16, store_bf16, *arguments)


@Inner
def by_type(kind, function, *arguments):
    """function(load, store, *arguments) with those of an element type."""
    if kind == F32:
        return function(load_f32, store_f32, *arguments)
    return by_half(kind, function, *arguments)


@intrinsic(FLOAT, FLOAT, FLOAT, FLOAT)
def fma_f32(builder, x, y, z):
    """x·y + z, rounded once."""
    return builder.fma(x, y, z)


@intrinsic(INT, INT, None)
def call(builder, address, arguments):
    """Call the C function at `address` with a tuple of int64 arguments; its result as int64.

    A 32-bit parameter takes the lower half of its register, on x86-64 as on AArch64; the result of a function that
    returns less than 64 bits must be masked.
    """
    kind = ir.FunctionType(I64, [I64] * len(arguments))
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def stack(words: int) -> Any:
    """An intrinsic that answers the address of so many int64 on the caller's stack, one place per call site."""

    @intrinsic(INT)
    def reserve(builder):
        with builder.goto_entry_block():
            place = builder.alloca(I64, size=I64(words))
        return builder.ptrtoint(place, I64)

    return reserve


def _atomic(operation: str) -> Any:
    @intrinsic(INT, INT, INT)
    def change(builder, address, value):
        place = builder.inttoptr(address, I64.as_pointer())
        return builder.atomic_rmw(operation, place, value, "seq_cst")

    return change


# (address, value): store, add to, or raise to at least the value the int64 there; what was there before, atomically
exchange, fetch_add, fetch_max = (_atomic(operation) for operation in ("xchg", "add", "max"))
