"""Which test runs which function: recorded once for each file of tests, in build/mutants/contexts.

A function is "path:qualified name". Native kernels are what the addresses that a test asks for are compiled of. Loops
that Numba compiles leave no trace: the tests of their folder run for them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from .draw import ROOMS
from .mutations import Mutation

ROOT = Path(__file__).parents[2]
SAMPLE = 8  # recorded of a test function's cases; the others run after these
SECONDS = 40.0  # of the processor, for a file of tests
SLOWEST = 10.0  # of the tests that run for mutants
# Not run for mutants: about the pace, about processes and packages, or about texts.
LEFT_OUT = (
    "tests/docs/",
    "tests/field/",
    "tests/fidelity/",
    "tests/fuzz/",
    "tests/models/",
    "tests/mutants/",
    "tests/processors/",
    "tests/runtimes/",
    "tests/onnx_backprop/command/",
    "tests/onnx_backprop/web/",
    "tests/onnx_backprop/distributed/test_mpi.py",
    "tests/onnx_backprop/training/test_kill.py",
    "tests/onnx_backprop/test_torch",
    "tests/opset/test_documentation.py",
    "tests/ort_ops/runtime/test_interruptions.py",
    "tests/test_",
)


def test_files(root: Path) -> list[str]:
    """Files of tests that can run for a mutant."""
    paths = (p.relative_to(root).as_posix() for p in sorted((root / "tests").rglob("test_*.py")))
    return [path for path in paths if not path.startswith(LEFT_OUT) and "pace" not in path]


def function_of(nodeid: str) -> str:
    """A test without its case."""
    return nodeid.partition("[")[0]


def named_after(mutation: Mutation) -> str:
    """How the path of a file of tests goes on that bears the name of the changed module."""
    return f"/test_{Path(mutation.path).stem}"


def turn(nodeid: str) -> int:
    """An order of cases in which any first ones are a sample."""
    return zlib.crc32(nodeid.encode())


class Recorder:
    """A plugin of pytest: the functions that each of a sample of tests runs, unless it fails or takes long."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self._codes: dict[int, CodeType] = {}
        self._names: dict[int, str | None] = {}
        self._failed: set[str] = set()
        self._end = time.process_time() + SECONDS

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._watch_kernels()
        groups = defaultdict(list)
        for item in sorted(items, key=lambda item: turn(item.nodeid)):
            groups[function_of(item.nodeid)].append(item)
        rounds = [
            (n, place, item) for place, group in enumerate(groups.values()) for n, item in enumerate(group[:SAMPLE])
        ]
        items[:] = [item for _, _, item in sorted(rounds, key=lambda entry: entry[:2])]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._codes = {}
        start = time.process_time()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.process_time() - start
            if item.nodeid not in self._failed:
                names = {self._name(code) for code in list(self._codes.values())}
                self.tests[item.nodeid] = round(seconds, 3), sorted(name for name in names if name)
            if time.process_time() > self._end:
                item.session.shouldstop = "the time of a file of tests is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._failed.add(report.nodeid)

    def _called(self, frame: FrameType, *_: Any) -> None:
        self._codes[id(frame.f_code)] = frame.f_code

    def _name(self, code: CodeType) -> str | None:
        if id(code) not in self._names:
            path = Path(code.co_filename).resolve()
            inside = path.is_relative_to(self.root) and path.relative_to(self.root).parts[0] in ROOMS
            words = [w for w in code.co_qualname.split(".") if not w.startswith("<")]
            self._names[id(code)] = f"{path.relative_to(self.root).as_posix()}:{'.'.join(words)}" if inside else None
        return self._names[id(code)]

    def _watch_kernels(self) -> None:
        """Count a kernel as run by whoever asks for its address."""
        from onnx_backprop.ort_ops.compiler import objects  # not before the tests' own tree is the one in use

        original, of_function, compiled = vars(objects.Exported)["address"], objects._of_function, {}

        def codes(function: Any) -> list[CodeType]:
            result: list[CodeType] = []

            def looked_at(inner: Any) -> Any:
                result.append(inner.__code__)
                return of_function(inner)

            objects._of_function = looked_at
            try:
                objects._describe(function._inner, lambda _: None, set())
            finally:
                objects._of_function = of_function
            return result

        def address(function: Any) -> int:
            if id(function) not in compiled:
                compiled[id(function)] = function, codes(function)
            self._codes.update((id(code), code) for code in compiled[id(function)][1])
            return original.__get__(function, type(function))

        objects.Exported.address = property(address)  # type: ignore[assignment, misc]


class Readers:
    """Which functions read a name that a module assigns."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._reads: dict[str, set[str]] = defaultdict(set)  # name -> "path:scope" that reads it
        self._assigned: set[str] = set()  # "path:name"
        for path, code in files.items():
            for statement in ast.parse(code).body:
                self._look(path, statement, "")

    def _look(self, path: str, node: ast.AST, scope: str) -> None:
        inner = scope
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{scope}.{node.name}".strip(".")
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and not scope:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            inner = names[0] if names else ""
            self._assigned.update(f"{path}:{name}" for name in names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._reads[node.id].add(f"{path}:{scope}")
        elif isinstance(node, ast.Attribute):
            self._reads[node.attr].add(f"{path}:{scope}")
        for child in ast.iter_child_nodes(node):
            self._look(path, child, inner)

    def __call__(self, path: str, name: str) -> set[str]:
        """Of the module itself or of others, over names that are assigned from it."""
        seen, waiting, functions = set(), [(path, name)], set()
        while waiting:
            path, name = waiting.pop()
            for reader in self._reads.get(name.rpartition(".")[2], ()):
                where, _, scope = reader.partition(":")
                if name.startswith("_") and where != path and "." not in name:
                    continue
                if reader in self._assigned and reader not in seen:
                    seen.add(reader)
                    waiting.append((where, scope))
                elif scope:
                    functions.add(reader)
        return functions


class Contexts:
    """The recorded tests, and which of them a mutant has to pass."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.seconds: dict[str, float] = {}
        self._of: dict[str, set[str]] = defaultdict(set)  # function -> tests
        self._of_module: dict[str, set[str]] = defaultdict(set)
        self._files = files
        for path in sorted(folder.glob("*.json")):
            for nodeid, (seconds, functions) in json.loads(path.read_text()).items():
                if seconds <= SLOWEST:
                    self.seconds[nodeid] = seconds
                    for function in functions:
                        self._of[function].add(nodeid)
                        self._of_module[function.partition(":")[0]].add(nodeid)

    @cached_property
    def _texts(self) -> dict[str, str]:
        """The files of the recorded tests."""
        files = {nodeid.partition("::")[0] for nodeid in self.seconds}
        return {file: (ROOT / file).read_text() for file in sorted(files) if (ROOT / file).is_file()}

    @cached_property
    def readers(self) -> Readers:
        return Readers(self._files)

    def reaching(self, mutation: Mutation) -> set[str]:
        """Recorded tests that run what was changed, or read it; else those that run the module; else of its folder."""
        path, scope = mutation.path, mutation.scope
        functions = {f"{path}:{scope}"}
        if functions.isdisjoint(self._of):
            functions |= self.readers(path, scope)
        tests = set().union(*(self._of.get(function, set()) for function in functions))
        if f"{path}:{scope}" not in self._of:  # a table, which tests may read by themselves
            naming = {file for file, text in self._texts.items() if re.search(rf"\b{re.escape(scope)}\b", text)}
            tests |= {nodeid for nodeid in self.seconds if nodeid.partition("::")[0] in naming}
        return tests or self._of_module.get(path, set()) or self.beside(path)

    def beside(self, path: str) -> set[str]:
        """Tests of the module's folder, or of a file with its name."""
        folder, stem = Path("tests", path).parent, Path(path).stem
        near = {f"test_{name}.py" for name in (stem, folder.name)}
        files = {n: Path(n.partition("::")[0]) for n in self.seconds}
        return {n for n, file in files.items() if file.name in near or file.parent == folder}

    def order(self, mutation: Mutation) -> list[str]:
        """Tests in the order in which they run: one case of each test function after the other, the fastest first.

        All cases of a file that bears the module's name come first.
        """
        groups: dict[str, list[str]] = defaultdict(list)
        home = f"tests/{Path(mutation.path).parent.as_posix()}/"
        cost = {n: self.seconds[n] * (1 if n.startswith(home) else 3) for n in self.reaching(mutation)}
        for nodeid in sorted(cost, key=lambda n: (cost[n], n)):
            groups[function_of(nodeid)].append(nodeid)
        rounds = [
            (n * (named_after(mutation) not in nodeid.partition("::")[0]), cost[nodeid], nodeid)
            for group in groups.values()
            for n, nodeid in enumerate(group)
        ]
        return [nodeid for _, _, nodeid in sorted(rounds)]
