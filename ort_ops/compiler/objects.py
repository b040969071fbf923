"""Machine code of exported functions: compiled once, cached on disk, loaded into the process.

A function's file is named after everything that its machine code depends on: the functions it calls, directly or not,
the constants they use, what intrinsics generate, the compiler and the processor. So a file is right for whoever finds
it, whatever else has changed; there is nothing to invalidate.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import hashlib
import operator
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import llvmlite
import numpy as np
from llvmlite import ir

from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.ort_ops.compiler import constants, expressions, language, loading, records, values
from onnx_backprop.ort_ops.compiler.cache import cache_folder, read, write
from onnx_backprop.ort_ops.compiler.language import Module
from onnx_backprop.ort_ops.compiler.machine import FEATURES, PROCESSOR, TILE_LEVEL, TRIPLE, backend, facts, levels
from onnx_backprop.ort_ops.compiler.records import Record, layout
from onnx_backprop.ort_ops.compiler.values import Inner, Intrinsic, Type

if TYPE_CHECKING:
    import llvmlite.binding as llvm

_PACKAGE = __name__.partition(".")[0]
_ITSELF = object()
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


_EXTENDED, _GLOBAL, _NAME = (dis.opmap[name] for name in ("EXTENDED_ARG", "LOAD_GLOBAL", "LOAD_NAME"))


def _loaded(code: CodeType) -> list[str]:
    """The global names that code reads; what `dis` says of all its instructions takes four times as long."""
    names, number = list[str](), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number |= low
        if operation in (_GLOBAL, _NAME):  # of a global name the last bit is something else
            names.append(code.co_names[number >> (operation == _GLOBAL)])
        number = number << 8 if operation == _EXTENDED else 0
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@cache
def _of_function(function: FunctionType) -> tuple[bytes, tuple[Any, ...]]:
    """(what a function is by itself, what it refers to); its own text of documentation is no part of it."""
    digest = hashlib.sha256()
    refers: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for code in _codes(function.__code__):
        constants = [c for c in code.co_consts if not isinstance(c, CodeType) and c != function.__doc__]
        digest.update(repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount)).encode())
        for name in dict.fromkeys(_loaded(code)):
            value = function.__globals__.get(name, _ITSELF)
            if value is _ITSELF:  # a built-in name
                continue
            refers.append(name)
            if isinstance(value, ModuleType) and value.__name__.startswith(_PACKAGE):
                refers += [vars(value)[n] for n in code.co_names if n in vars(value)]
            else:
                refers.append(value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        refers += [name, cell.cell_contents]
    return digest.digest(), tuple(refers)


def _describe(value: Any, add: Any, seen: dict[int, Any]) -> None:
    """Add all that a value is to a digest, and its functions and classes to `seen`."""
    if isinstance(value, (int, float, str, bytes, np.generic, type(None))):
        add(f"{type(value).__name__} {value!r}".encode())
    elif isinstance(value, (tuple, list, dict, set, frozenset)):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        for item in sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items:
            _describe(item, add, seen)
        add(f"{type(value).__name__} of {len(items)}".encode())
    elif isinstance(value, (ir.Type, ir.Value)):
        add(f"{type(value).__name__} {value}".encode())
    elif isinstance(value, type) and issubclass(value, Record):
        add(f"{value.__name__} {layout(value)}".encode())
        _describe([field.record for field in layout(value).values()], add, seen)
    elif isinstance(value, ModuleType):
        add(f"{value.__name__}".encode())
    elif id(value) in seen:
        add(b"as before")
    elif isinstance(value, type):  # its methods may write code
        seen[id(value)] = value
        add(f"{value.__name__}".encode())
        if value.__module__.startswith(_PACKAGE):
            _describe([m for m in vars(value).values() if isinstance(m, FunctionType)], add, seen)
    else:
        seen[id(value)] = value
        _describe_function(value, add, seen)


def _describe_function(value: Any, add: Any, seen: dict[int, Any]) -> None:
    if isinstance(value, Inner) or (isinstance(value, FunctionType) and value.__module__.startswith(_PACKAGE)):
        if isinstance(value, Inner):
            add(repr((value.fast, value.apart, value.shared is not None)).encode())
            value = value.function
        itself, refers = _of_function(value)
        add(itself)
        for other in refers:
            _describe(other, add, seen)
    elif isinstance(value, functools.partial):
        _describe((value.func, value.args, value.keywords), add, seen)
    elif isinstance(value, Intrinsic):
        _describe((value.result, value.parameters, value.generate), add, seen)
    elif isinstance(value, FunctionType) or not str(getattr(value, "__module__", _PACKAGE)).startswith(_PACKAGE):
        add(f"{value.__module__} {getattr(value, '__qualname__', type(value).__qualname__)}".encode())
    elif hasattr(value, "__wrapped__"):
        _describe(value.__wrapped__, add, seen)
    else:
        raise TypeError(f"what a kernel depends on cannot be told from {value!r}")


@cache
def _compiler() -> bytes:
    """What all machine code depends on."""
    files = (constants.__file__, expressions.__file__, language.__file__, records.__file__, values.__file__, __file__)
    sources = [Path(file).read_bytes() for file in files]
    versions = (sys.version_info[:2], llvmlite.__version__, TRIPLE, PROCESSOR, FEATURES)
    return b"\0".join([*sources, repr(versions).encode()])


TILE_INSTRUCTIONS = "llvm.x86.tile"  # as a module names them
SHIPPED = Path(__file__).resolve().parents[1] / "objects"


@cache
def source_digest() -> str:
    """What machine code that is carried was made from: the sources of this room, and what they know of a machine."""
    digest = hashlib.sha256(facts().encode())
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _carried() -> list[Path]:
    """The folders of what is carried for this processor; each function is in one of them."""
    folders = list[Path]()
    for folder in (SHIPPED / level for level in levels()):
        with contextlib.suppress(OSError):
            if (folder / "source_digest").read_text() == source_digest():
                folders.append(folder)
    return folders


def _carried_symbol(function: Exported) -> str:
    return f"carried.{function.label}"


def ship(folder: Path) -> int:
    """Write what a wheel is to carry, all functions that have a name of their own; how many.

    Those that need registers of matrices go into a folder of their own: a processor that has them runs the others' code
    for one without.
    """
    counts, shipped = Counter(function.label for function in Exported.every), 0
    folder.mkdir(parents=True)
    for function in Exported.every:
        if counts[function.label] == 1:
            source = function.text(_carried_symbol)
            if (TILE_INSTRUCTIONS in source) == folder.name.startswith(TILE_LEVEL):
                write(folder / f"{function.label}.o", compiled(source, _carried_symbol(function)))
                shipped += 1
    (folder / "source_digest").write_text(source_digest())
    return shipped


@cache
def _target(*, linked: bool = False) -> llvm.TargetMachine:
    """linked: for code that a linker puts into a library; else for code of a process.

    There LLVM loads ELF on Windows too: llvmlite asks for it on Windows, and this function where Windows is the target.
    """
    elf = "-elf" if "windows" in TRIPLE and os.name != "nt" and not linked else ""
    target = backend().Target.from_triple(TRIPLE + elf)
    if linked:
        return target.create_target_machine(cpu=PROCESSOR, features=FEATURES, opt=3, reloc="pic", codemodel="small")
    reloc = "static" if TRIPLE.startswith("x86_64") else "default"
    return target.create_target_machine(
        cpu=PROCESSOR, features=FEATURES, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
    )


@cache
def _engine() -> llvm.ExecutionEngine:
    llvm = backend()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{TRIPLE}"'), _target())


def _loaded_by_llvm(code: bytes, symbol: str, others: Mapping[str, int]) -> int:
    """`loading.load` for what that does not take; 0 where there is no such function."""
    engine, llvm = _engine(), backend()
    for name, address in others.items():
        llvm.add_symbol(name, address)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(symbol)


def _optimised(module: llvm.ModuleRef) -> None:
    llvm = backend()
    options = llvm.create_pipeline_tuning_options()
    options.speed_level = 3
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(_target(), options)
    builder.getModulePassManager().run(module, builder)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """The collector looks at a growing module again and again, a third of the time to write it, and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def text(
    inner: Inner,
    arguments: tuple[Type, ...],
    result: Type | None,
    name: str,
    symbol: Callable[[Exported], str] = operator.attrgetter("name"),
) -> str:
    """The module of LLVM of an exported function, as it is before LLVM works on it. symbol: of shared functions."""
    with _without_collecting():
        module = Module(ir.Module(name), symbol)
        module.llvm.triple, module.llvm.data_layout = TRIPLE, str(_target().target_data)
        module.export(inner, arguments, result, name)
        return str(module.llvm)


def compiled(source: str, symbol: str, *, linked: bool = False) -> bytes:
    """The machine code of a module of LLVM. symbol: of its exported function. linked: see `Exported.linkable`."""
    with _lock:
        with Deferred():  # LLVM's objects change owners, and are disposed of where nothing may be raised
            module = backend().parse_assembly(source)
            module.verify()
            if linked:
                module.get_function(symbol).visibility = "hidden"
            _optimised(module)
        with Deferred():  # after a chance to interrupt
            code = _target(linked=linked).emit_object(module)
            del module
    return code


class Exported:
    """A C function, compiled or loaded when its address is first asked for."""

    every: ClassVar[list[Exported]] = []

    def __init__(self, inner: Inner, arguments: tuple[Type, ...], result: Type | None) -> None:
        self._inner, self._arguments, self._result = inner, arguments, result
        self.every.append(self)

    @functools.cached_property
    def _known(self) -> tuple[str, list[Exported]]:
        digest, seen = hashlib.sha256(_compiler()), dict[int, Any]()
        digest.update(repr((self._arguments, self._result)).encode())
        _describe(self._inner, digest.update, seen)
        name = f"{self._inner.name.replace('<locals>.', '')}-{digest.hexdigest()[:24]}"
        return name, [f.shared for f in seen.values() if isinstance(f, Inner) and f.shared not in (None, self)]

    @property
    def name(self) -> str:
        """The symbol, and the name of the file: the function's and a digest of all that it depends on."""
        return self._known[0]

    @property
    def shared(self) -> list[Exported]:
        """The shared functions that it calls, directly or not; of what is carried, those that its code names."""
        code = self._carried
        if code is None:
            return self._known[1]
        functions = (f for f in self.every if f._inner.shared is f and f is not self)
        return [f for f in functions if _carried_symbol(f).encode() + b"\0" in code]

    @property
    def label(self) -> str:
        """What the function is called, whatever it depends on."""
        return self._inner.name

    @property
    def at_hand(self) -> bool:
        """Whether nothing has to be compiled."""
        return "address" in vars(self) or self._carried is not None or self.cached

    @functools.cached_property
    def _carried(self) -> bytes | None:
        """The machine code, if the installed wheel has it."""
        paths = (folder / f"{self.label}.o" for folder in _carried())
        return next((read(path) for path in paths if path.is_file()), None)

    @property
    def _path(self) -> Path | None:
        folder = cache_folder()
        return folder / f"{self.name}.o" if folder else None

    @property
    def cached(self) -> bool:
        """Whether the machine code lies on disk."""
        return self._path is not None and self._path.is_file()

    def compile(self) -> bytes:
        """The machine code, which is cached on disk."""
        code = self.machine_code()
        if self._path:
            write(self._path, code)
        return code

    @property
    def linked_symbol(self) -> str:
        """A name in C."""
        return re.sub(r"\W", "_", self.name)

    def linkable(self) -> bytes:
        """The machine code for a library, which does not export `linked_symbol`; it is cached on disk too."""
        folder = cache_folder()
        path = folder / f"{self.name}.linked" if folder else None
        code = path and read(path)
        if code is None:
            code = self.machine_code(operator.attrgetter("linked_symbol"), linked=True)
            if path:
                write(path, code)
        return code

    def machine_code(
        self, symbol: Callable[[Exported], str] = operator.attrgetter("name"), *, linked: bool = False
    ) -> bytes:
        """For this processor. symbol: what it, and each shared function, is called. linked: see `linkable`."""
        return compiled(self.text(symbol), symbol(self), linked=linked)

    def text(self, symbol: Callable[[Exported], str]) -> str:
        """The module of LLVM, see `machine_code`."""
        with _lock:
            return text(self._inner, self._arguments, self._result, symbol(self), symbol)

    @functools.cached_property
    def address(self) -> int:
        """Of the function in this process."""
        with _lock:
            if "address" in vars(self):  # meanwhile, by another thread
                return vars(self)["address"]
            symbol, code = _carried_symbol, self._carried
            if code is None:
                symbol, code = operator.attrgetter("name"), (self._path and read(self._path)) or self.compile()
            called = {symbol(function): function.address for function in self.shared}
            with Deferred():
                address = loading.load(code, symbol(self), called) or _loaded_by_llvm(code, symbol(self), called)
                if not address:
                    raise RuntimeError(f"no machine code for {symbol(self)}")
                vars(self)["address"] = address  # or it would be added once more
            return address
