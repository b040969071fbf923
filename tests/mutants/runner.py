"""Tests of a mutant: in a copy of the tree, in a process forked from one that has imported what the rooms stand on."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .contexts import Contexts, Recorder, function_of, named_after, turn
from .mutations import Mutation

# What a process of tests imports beside the project.
_WARM = ("numpy", "onnx", "onnx.reference", "onnx.parser", "onnx_ir", "onnx_ir.passes.common", "onnxruntime")
_WARM += ("onnxruntime_extensions", "llvmlite.binding", "ml_dtypes", "safetensors", "safetensors.numpy", "tqdm")
FIRST_SECONDS, FIRST_FILES, FILE_SECONDS = 4.0, 5, 0.5  # of the tests that run first; what collecting a file costs
HUNG = 20.0  # seconds of the processor after which a test hangs: the mutant counts as found


def warm() -> None:
    """Import what forked processes need. No session has been made, so no thread is lost."""
    for name in _WARM:
        importlib.import_module(name)


def copied(root: Path, folder: Path) -> None:
    """A tree with what git knows or does not ignore; files that have not changed keep their compiled forms."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = [
        n for n in subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0") if n
    ]
    for name in names:
        source, target = root / name, folder / name
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                shutil.copy2(source, target)
    kept = set(names)
    for path in folder.rglob("*.py"):
        if path.resolve() == path and path.relative_to(folder).as_posix() not in kept:
            path.unlink()


@dataclass
class Process:
    """A forked process that runs tests."""

    pid: int
    log: Path
    end: float

    def ended(self) -> int | None:
        """The exit status of pytest, minus the number of a signal; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        """With all processes that its tests have started."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def forked(tree: Path, log: Path, seconds: float, work: Callable[[], int], kernels: Path) -> Process:
    """Run in another process whose project is the tree, for so many seconds of the processor at most."""
    log.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return Process(pid, log, time.monotonic() + 10 * seconds)  # a busy machine
    status = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 10))
        output = os.open(log.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["NUMBA_CACHE_DIR"] = str(kernels)
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "onnx_backprop")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(p for p in sys.path if p and not (Path(p) / "onnx_backprop").is_dir())]
        importlib.invalidate_caches()
        status = work()
    except BaseException:  # noqa: BLE001 (the fork never returns to what it was forked from)
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


class Chosen:
    """A plugin of pytest: what fails, in a log.

    First come cases that are called after what a table has lost, and all of a file that bears the module's name, then
    chosen tests in their order, then other cases of the same functions, and of those of `done`, which have run.
    """

    def __init__(self, order: list[str], log: Path, mutation: Mutation, done: list[str] | None) -> None:
        self._order, self._log, self._done = {n: i for i, n in enumerate(order)}, log, done
        self._name, self._file = mutation.left_out, named_after(mutation)
        self._functions = {function_of(n) for n in (*order, *(done or ()))}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ranks: list[tuple[int, int, pytest.Item]] = []
        for item in items:
            if function_of(item.nodeid) in self._functions and item.nodeid not in (self._done or ()):
                named = self._name and self._name in re.split(r"\W+", item.nodeid.partition("[")[2])
                near = self._done is not None and self._file in item.nodeid.partition("::")[0]
                rank = -1 if named or near else self._order.get(item.nodeid, len(self._order))
                if rank < len(self._order) or self._done is not None:
                    ranks.append((rank, turn(item.nodeid), item))
        items[:] = [item for _, _, item in sorted(ranks, key=lambda entry: entry[:2])]

    def _write(self, *words: object) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", nodeid, time.monotonic())
        signal.setitimer(signal.ITIMER_PROF, HUNG)  # then SIGPROF ends the process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


def _pytest(files: list[str], plugin: object, *options: str) -> int:
    quiet = ["--quiet", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging"]
    return int(pytest.main([*quiet, *options, *files], plugins=[plugin]))


def record(tree: Path, file: str, folder: Path, kernels: Path, seconds: float) -> Process:
    """Record a file of tests."""

    def work() -> int:
        recorder = Recorder(tree)
        status = _pytest([file], recorder)
        name = folder / f"{file.replace('/', '-')}.json"
        name.write_text(json.dumps(recorder.tests))
        return status

    return forked(tree, folder / f"{file.replace('/', '-')}.log", seconds, work, kernels)


@dataclass
class Verdict:
    """killed: by a test, by a crash or by a test that hangs. tests: how many passed or failed. by: what killed it."""

    killed: bool
    by: str
    tests: int
    seconds: float


class Job:
    """A mutant in a tree, over its two rounds of tests: `poll` until there is a verdict."""

    moment = 0  # of the last mutant's file: no two have the same, so that no compiled form is taken for another's

    def __init__(self, tree: Path, mutation: Mutation, contexts: Contexts, kernels: Path, limit: float) -> None:
        self.mutation, self._tree, self._contexts, self._limit = mutation, tree, contexts, limit
        self._path = tree / mutation.path
        self._code, self._stat = self._path.read_bytes(), self._path.stat()
        Job.moment += 1
        self._path.write_bytes(mutation.applied(self._code))
        stamp = self._stat.st_mtime + 100_000 + 2 * Job.moment
        os.utime(self._path, (stamp, stamp))
        self._start, self._tests = time.monotonic(), 0
        self._temporary = None
        self._kernels = kernels
        if "loops/" in mutation.path:  # Numba keeps callers as they were
            self._temporary = tempfile.TemporaryDirectory()
            self._kernels = Path(self._temporary.name)
            (self._kernels / "onnx_backprop").symlink_to(kernels / "onnx_backprop")
        self._waiting = self._rounds(contexts.order(mutation))
        self._process: Process | None = None
        self._next()

    def _rounds(self, order: list[str]) -> list[tuple[list[str], list[str] | None]]:
        """What runs in each round, and behind the first what has run."""
        first, files, seconds = list[str](), set[str](), 0.0
        for nodeid in order:
            file = nodeid.partition("::")[0]
            if len(files | {file}) <= FIRST_FILES and seconds + self._contexts.seconds[nodeid] <= FIRST_SECONDS:
                first.append(nodeid)
                files.add(file)
                seconds += self._contexts.seconds[nodeid]
        rest, files, seconds = list[str](), set[str](), 0.0
        for nodeid in order:
            file = nodeid.partition("::")[0]
            cost = self._contexts.seconds[nodeid] + FILE_SECONDS * (file not in files)
            if nodeid not in first and seconds + cost <= self._limit:
                rest.append(nodeid)
                files.add(file)
                seconds += cost
        return [(first, None), (rest, first)] if first else [(rest, [])] if rest else []

    def _next(self) -> None:
        order, done = self._waiting.pop(0) if self._waiting else ([], None)
        self._process = None
        if order or done:
            files = list(dict.fromkeys(nodeid.partition("::")[0] for nodeid in (*order, *(done or ()))))
            log = self._tree.with_suffix(".log")
            plugin = Chosen(order, log, self.mutation, done)
            work: Callable[[], int] = lambda: _pytest(files, plugin, "-x")  # noqa: E731
            self._process = forked(self._tree, log, self._limit, work, self._kernels)

    def poll(self) -> Verdict | None:
        """The verdict; None while tests run."""
        if self._process is None:
            return self._verdict(False, "")
        status = self._process.ended()
        lines = self._lines(self._process.log)
        if status is None:
            if time.monotonic() < self._process.end:
                return None
            self._process.kill()
            begun = max((line[2] for line in lines if line[0] == "start"), default=0.0)
            status = -signal.SIGPROF if time.monotonic() - begun > 5 * self._limit else -signal.SIGXCPU
        self._tests += sum(line[0] == "start" for line in lines)
        failed = [line[1] for line in lines if line[0] == "failed"]
        if failed:
            return self._verdict(True, failed[0])
        if status == -signal.SIGXCPU:
            return self._verdict(False, "")
        if status == -signal.SIGPROF:
            return self._verdict(True, f"{lines[-1][1]} hangs")
        if status not in (0, 5):
            return self._verdict(True, "a crash" if status < 0 else "nothing can be imported")
        self._next()
        return None if self._process else self._verdict(False, "")

    def _lines(self, log: Path) -> list[Any]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []

    def _verdict(self, killed: bool, by: str) -> Verdict:
        self._path.write_bytes(self._code)
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))
        if self._temporary:
            self._temporary.cleanup()
        return Verdict(killed, by, self._tests, round(time.monotonic() - self._start, 1))

    def close(self) -> None:
        """End at once."""
        if self._process:
            self._process.kill()
        self._verdict(False, "")
