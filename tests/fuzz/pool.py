"""Cases run in a forked process with a limit of time and memory for each; what ends it is told of the case it ran."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import re
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SECONDS = 10.0  # of the processor, which other work may have
PATIENCE = 20  # times as long by the clock, for what waits
BYTES = 2 * 2**30
_STATE = struct.Struct("qdd")  # the case that runs, when it began, and the processor time of its process then
_ANSWER = struct.Struct("q200s")


@dataclass
class Answer:
    """What became of a case: "answered", "refused: <class>", or one of `BAD` with what was found."""

    case: int
    what: str


BAD = ("untyped", "crash", "slow", "big")


def run(cases: range, step: Callable[[int], str], *, seconds: float = SECONDS, size: int = BYTES) -> Iterator[Answer]:
    """`step(case)` for every case, in one process as long as it lives. Where it dies the next case goes on in another."""
    first = cases.start
    while first < cases.stop:
        state = mmap.mmap(-1, _STATE.size)
        state[:] = _STATE.pack(first, time.monotonic(), 0)
        reading, writing = os.pipe()
        stack = tempfile.TemporaryFile("w+")  # noqa: SIM115 - which a fault of the process is written to
        child = os.fork()
        if not child:
            os.close(reading)
            gc.freeze()  # a session that is garbage here joins threads when it ends, which this process has not
            faulthandler.enable(stack, all_threads=False)
            _work(range(first, cases.stop, cases.step), step, state, writing, size)
        os.close(writing)
        os.set_blocking(reading, False)
        ended = ""
        rest = b""
        while True:
            content = _read(reading)
            if content:
                rest += content
                while len(rest) >= _ANSWER.size:
                    case, text = _ANSWER.unpack_from(rest)
                    rest = rest[_ANSWER.size :]
                    first = case + cases.step
                    yield Answer(case, text.rstrip(b"\0").decode("utf-8", "replace"))
            elif content == b"":
                _, status = os.waitpid(child, 0)
                if first < cases.stop:
                    code = os.waitstatus_to_exitcode(status)
                    yield Answer(first, ended or f"crash: the process ended with {code}{_where(stack)}")
                    first += cases.step
                break
            else:
                _, began, used = _STATE.unpack(state[:])
                waits = time.monotonic() - began > PATIENCE * seconds
                if not ended and (waits or _processor_time(child) - used > seconds):
                    ended = f"slow: more than {PATIENCE * seconds if waits else seconds:g} s"
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.002)
        os.close(reading)
        stack.close()


def _where(stack: IO[str]) -> str:
    """The innermost calls of a process that met a fault; nothing where there was none."""
    stack.seek(0)
    calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack.read())
    return "".join(f"; {name} at {file}:{line}" for file, line, name in calls[:4])


def _read(pipe: int) -> bytes | None:
    """What a pipe holds: nothing once it is closed, None while it is open and empty."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return None


def _work(cases: range, step: Callable[[int], str], state: mmap.mmap, writing: int, size: int) -> None:
    """The process itself, which never returns."""
    code = 1
    try:
        for case in cases:
            state[:] = _STATE.pack(case, time.monotonic(), time.process_time())
            before = _peak()
            _limit(size)
            what = step(case)
            grown = _peak() - before
            if grown > size * 3 // 4:  # where it was refused more, somebody has caught that
                what = f"big: {grown >> 20} MiB; {what}"
            os.write(writing, _ANSWER.pack(case, what.encode()[:200]))
        code = 0
    finally:
        os._exit(code)


def _processor_time(process: int) -> float:
    """Seconds that all threads of a process have had."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit(size: int) -> None:
    """Let the process have so much more than it has now."""
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + size, resource.RLIM_INFINITY))
