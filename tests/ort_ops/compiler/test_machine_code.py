"""Machine code of kernels: when it is compiled again, what a wheel carries, and what needs LLVM."""

from __future__ import annotations

import ctypes
import dis
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import pytest
from llvmlite import ir

from onnx_backprop.ort_ops.compiler import loading, objects
from onnx_backprop.ort_ops.compiler.decorators import exported, fast, inner, shared
from onnx_backprop.ort_ops.compiler.llvm import load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.values import DOUBLE, INT, CompileError, Intrinsic

TABLE = (3, 1, 4, 1, 5)

SOURCE = '''
"""A module."""
from onnx_backprop.ort_ops.compiler.decorators import compiled, exported, inner
from onnx_backprop.ort_ops.compiler.llvm import intrinsic
from onnx_backprop.ort_ops.compiler.values import INT
CONSTANT, OTHER = 5, 6
class Writer:
    def write(self, builder, x):
        return builder.add(x, x.type(0))
@intrinsic(INT, INT)
def written(builder, x):
    return Writer().write(builder, x)
def helper(n):
    @compiled(f"helper_{n}")
    def add(x):
        return x + n
    return add
three = helper(3)
@inner
def called(x):
    """What it does."""
    return 2 * x + CONSTANT  # and why
@inner
def unrelated(x):
    return x - OTHER
@exported("int64", "int64")
def outer(x):
    return written(three(called(x)))
'''


def _outer(folder: Path, name: str, text: str):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("onnx_backprop.a_module", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.outer


UNCHANGED = {
    "a comment": ("# and why", "# and what for"),
    "a docstring": ("What it does.", "What it really does."),
    "lines": ("@inner\ndef called", "\n\n\n@inner\ndef called"),
    "another function": ("x - OTHER", "x - 2 * OTHER"),
    "a constant that nobody reads": ("5, 6", "5, 60"),
}

CHANGED = {
    "a constant": ("5, 6", "50, 6", 2 * 4 + 50 + 3),
    "a called function": ("2 * x", "3 * x", 3 * 4 + 5 + 3),
    "a closure": ("helper(3)", "helper(4)", 2 * 4 + 5 + 4),
    "a factory": ("x + n", "x - n", 2 * 4 + 5 - 3),
    "a method that writes code": ("x.type(0)", "x.type(9)", 2 * 4 + 5 + 3 + 9),
    "the function itself": ("three(called(x))", "three(x)", 4 + 3),
}


def test_machine_code_is_reused_if_nothing_that_matters_changes(tmp_path) -> None:
    first = _outer(tmp_path / "here", "first", SOURCE)
    for n, (old, new) in enumerate(UNCHANGED.values()):
        assert old in SOURCE
        assert _outer(tmp_path / "there", f"other_{n}", SOURCE.replace(old, new)).name == first.name


def test_machine_code_is_never_stale(tmp_path) -> None:
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    first = _outer(tmp_path, "first", SOURCE)
    assert call(first.address)(4) == 2 * 4 + 5 + 3
    names = {first.name}
    for n, (old, new, want) in enumerate(CHANGED.values()):
        assert old in SOURCE
        other = _outer(tmp_path, f"other_{n}", SOURCE.replace(old, new))
        assert call(other.address)(4) == want
        names.add(other.name)
    assert len(names) == 1 + len(CHANGED)


def test_a_file_that_changed_after_it_was_imported_is_not_compiled(tmp_path) -> None:
    outer = _outer(tmp_path, "first", SOURCE.replace("CONSTANT, OTHER = 5, 6", "CONSTANT, OTHER = 5, 77"))
    (tmp_path / "first.py").write_text(SOURCE.replace("2 * x", "x // 3"))
    with pytest.raises(CompileError, match="changed since"):
        outer.compile()


def test_damaged_files_are_compiled_again(tmp_path) -> None:
    """Of a cut file, garbage and an empty one, which one line tells of; nobody has to delete anything."""
    program = (
        "from onnx_backprop.ort_ops.compiler import objects\n"
        "from onnx_backprop.ort_ops.runtime import call, ahead\n"
        "f, g, h = call.destroy, call.compute, ahead.CLEAR\n"
        "print(f.cached, bool(f.address and g.address and h.address))"
    )

    def answer() -> tuple[list[str], str]:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split(), done.stderr

    assert answer() == (["False", "True"], "")
    paths = sorted(tmp_path.rglob("*.o"))
    whole = [path.read_bytes() for path in paths]
    assert len(whole) == 3
    for path, damaged in zip(paths, (whole[0][:-100], b"garbage" * 100, b""), strict=True):
        path.write_bytes(damaged)
    folder = paths[0].parent
    assert answer() == (
        ["True", "True"],
        f"machine code in {folder} is damaged; what is needed of it is compiled anew\n",
    )
    assert [path.read_bytes() for path in paths] == whole
    assert answer() == (["True", "True"], "")


def test_fast_arithmetic_is_another_function() -> None:
    def product(x):
        return x * x + x

    exact, loose = inner(product), fast("contract")(product)
    names = set()
    for chosen in (exact, loose):

        @exported(DOUBLE, DOUBLE)
        def outer(x, chosen=chosen):
            return chosen(x)

        names.add(outer.name)
    assert len(names) == 2


def test_machine_code_that_a_wheel_carries(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used where its sources and what they know of the machine are the same, and nothing is compiled then."""

    def triple(x):
        return 3 * x

    wrapped = inner(triple)
    monkeypatch.setattr(objects, "SHIPPED", tmp_path)
    monkeypatch.setattr(objects, "levels", lambda: ["wider", "this"])
    monkeypatch.setattr(objects.Exported, "every", [exported(INT, INT)(wrapped)])
    assert objects.ship(tmp_path / "this") == 1
    objects._carried.cache_clear()
    try:
        function = objects.Exported(wrapped, (INT,), INT)
        monkeypatch.setattr(function, "compile", None)
        assert function.at_hand
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(function.address)(5) == 15
        (tmp_path / "this" / "source_digest").write_text("other sources")
        objects._carried.cache_clear()
        assert objects.Exported(wrapped, (INT,), INT)._carried is None
    finally:
        objects._carried.cache_clear()


def test_amx_code_is_cached_in_its_own_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process where it is to make such code for a processor without them."""

    def zero(builder) -> None:
        tile = ir.FunctionType(ir.VoidType(), [ir.IntType(8)])
        builder.call(ir.Function(builder.module, tile, "llvm.x86.tilezero"), [ir.IntType(8)(0)])

    clear = Intrinsic(None, (), zero)

    @inner
    def with_tiles(x):
        clear()
        return x

    @inner
    def without(x):
        return x + 2

    functions = [exported(INT, INT)(wrapped) for wrapped in (with_tiles, without)]
    monkeypatch.setattr(objects, "SHIPPED", tmp_path)
    monkeypatch.setattr(objects.Exported, "every", list(functions))
    monkeypatch.setattr(objects, "compiled", lambda source, symbol: f"{symbol} {'tilezero' in source}".encode())
    assert [objects.ship(tmp_path / level) for level in ("v4", "amx-v4")] == [1, 1]
    for levels, tiles in ((["amx-v4", "v4"], b"True"), (["v4"], None)):
        monkeypatch.setattr(objects, "levels", lambda levels=levels: levels)
        objects._carried.cache_clear()
        try:
            carried = [objects.Exported(function._inner, (INT,), INT)._carried for function in functions]
        finally:
            objects._carried.cache_clear()
        assert carried[1] is not None
        assert carried[1].endswith(b"without False")
        assert (carried[0] and carried[0][-4:]) == tiles


_place = stack(1)


@shared
def _times_three(place, x):
    store_i64(place, 0, 3 * x)


def _by_the_shared(x):
    place = _place()
    _times_three(place, np.int32(x))
    return load_i64(place, 0) + 1


def _and_more(x):
    place = _place()
    _times_three(place, x)
    return load_i64(place, 0) + x + 1


def test_a_shared_function_is_no_part_of_its_callers(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled once, called by several, and a caller is another one where it changes."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    objects.cache_folder.cache_clear()
    try:
        call, wrapped = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64), inner(_by_the_shared)
        first, second = exported(INT, INT)(wrapped), exported(INT, INT)(_and_more)
        assert first.shared == second.shared == [_times_three.shared]
        assert (call(first.address)(-5), call(second.address)(7)) == (-14, 29)
        assert len(list(tmp_path.rglob("*_times_three*.o"))) == 1
        assert b"_times_three" in first.machine_code()
        name = first.name
        with monkeypatch.context() as patch:
            patch.setattr(_times_three, "shared", None)
            assert exported(INT, INT)(wrapped).name != name
        monkeypatch.setattr(_times_three, "function", lambda place, x: store_i64(place, 0, 4 * x))
        assert exported(INT, INT)(wrapped).name != name
    finally:
        objects.cache_folder.cache_clear()


@shared
def _plus_one(place, x):
    store_i64(place, 0, x + 1)


def _by_both(x):
    place = _place()
    _times_three(place, x)
    _plus_one(place, load_i64(place, 0))
    return load_i64(place, 0)


def test_shared_functions_that_a_wheel_carries(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, which do not call each other, are loaded before what names them, each once."""
    wrapped = inner(_by_both)
    monkeypatch.setattr(objects, "SHIPPED", tmp_path)
    monkeypatch.setattr(objects, "levels", lambda: ["this"])
    monkeypatch.setattr(objects.Exported, "every", [exported(INT, INT)(wrapped), _times_three.shared, _plus_one.shared])
    assert objects.ship(tmp_path / "this") == 3
    objects._carried.cache_clear()
    try:
        again = [inner(f.function) for f in (_times_three, _plus_one)]
        for function in again:
            function.shared = objects.Exported(function, (INT, INT), None)
        monkeypatch.setattr(objects.Exported, "every", [f.shared for f in again])
        monkeypatch.setattr(objects.Exported, "compile", None)
        function = objects.Exported(wrapped, (INT,), INT)
        assert function.shared == [f.shared for f in again]
        assert [f.shared.shared for f in again] == [[], []]
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(function.address)(5) == 16
    finally:
        objects._carried.cache_clear()


@inner
def _of_table(x):
    place = _place()
    _times_three(place, x)
    return load_i64(place, 0) + TABLE[x % 5]


ELF = pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="objects of x86-64's ELF"
)


def test_the_global_names_that_code_reads() -> None:
    """Those that dis finds; from the 128th on a name takes two instructions to say."""
    names = [f"name_{n}" for n in range(300)]
    many = compile(f"def many(): return {' + '.join(names)}", "many", "exec")
    codes = [many, *(c for c in many.co_consts if isinstance(c, CodeType))]
    codes += [f.__code__ for f in vars(objects).values() if isinstance(f, FunctionType)]
    for code in codes:
        expected = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
        assert objects._loaded(code) == expected, code
    assert objects._loaded(codes[1]) == names


@ELF
@pytest.mark.parametrize("by_llvm", ["_of_table", "_times_three", "nothing"])
def test_code_is_loaded_with_and_without_llvm(monkeypatch: pytest.MonkeyPatch, by_llvm: str) -> None:
    """What either has loaded is called by what the other loads."""
    load, loaded = loading.load, dict[str, int | None]()

    def noted(code: bytes, symbol: str, others: dict[str, int]) -> int | None:
        loaded[symbol] = None if by_llvm in symbol else load(code, symbol, others)
        return loaded[symbol]

    monkeypatch.setattr(loading, "load", noted)
    again = inner(_times_three.function)
    again.shared = objects.Exported(again, (INT, INT), None)

    @inner
    def _of_table(x):
        place = _place()
        again(place, x)
        return load_i64(place, 0) + TABLE[x % 5]

    function = exported(INT, INT)(_of_table)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(function.address)
    assert [call(x) for x in range(-3, 9)] == [3 * x + TABLE[x % 5] for x in range(-3, 9)]
    assert len(loaded) == 2
    assert {name.split("-")[0].rpartition(".")[2] for name, at in loaded.items() if at is None} == {by_llvm} - {
        "nothing"
    }


@ELF
def test_code_that_needs_llvm_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another format or processor, unknown symbols, other relocations."""
    function = exported(INT, INT)(_of_table)
    code, others = function.machine_code(), {_times_three.shared.name: _times_three.shared.address}
    assert loading.load(code, function.name, others)
    for other in (b"", b"MZ" + code[2:], code[:18] + bytes((183, 0)) + code[20:]):
        assert loading.load(other, function.name, others) is None
    assert loading.load(code, function.name, {}) is None
    assert loading.load(code, "another name", others) is None
    monkeypatch.setattr(loading, "_ADDRESS", 2)
    assert loading.load(code, function.name, others) is None


COMPILES_NOTHING = """
import sys
import numpy as np, onnx, onnx_backprop as ob
from onnx import parser
model = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,3] y) <float[4,3] a = {ZEROS}> { h = MatMul(x, a) y = Relu(h) }')
trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="adamw"))
trainer.step(np.ones((6, 4), np.float32), np.ones((6, 3), np.float32))
sys.kept = trainer  # to the end, when nothing else is left
print(trainer.kernels, "llvmlite.binding" in sys.modules)
""".replace("{ZEROS}", "{" + ", ".join(["0"] * 12) + "}")


@ELF
def test_a_process_that_compiles_nothing_has_no_llvm(tmp_path: Path) -> None:
    """And it ends well: sessions destroy their kernels after all modules are gone."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", COMPILES_NOTHING],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert printed == ["native True\n", "native False\n"]


LETS_NOTHING_BE_EXECUTED = """
import ctypes, sys
import numpy as np, onnx_backprop as ob
from onnx import parser
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE
    sys.exit("this Linux cannot forbid it")
model = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[N,2] x) => (float[N,2] y) <float[2] a = {1, 2}> { y = Mul(x, a) }')
trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"))
trainer.step(np.ones((6, 2), np.float32), np.ones((6, 2), np.float32))
print(trainer.kernels)
"""


@ELF
def test_a_system_that_lets_no_new_code_be_executed() -> None:
    """As systemd's MemoryDenyWriteExecute: the first call of a kernel had ended the process."""
    command = [sys.executable, "-c", LETS_NOTHING_BE_EXECUTED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "this Linux cannot forbid it" in ended.stderr:
        pytest.skip("this Linux cannot forbid it")
    assert ended.stdout == "onnx\n", (ended.returncode, ended.stderr[-2000:])
    assert "OSError: this system lets no code be executed that a process has made: " in ended.stderr
