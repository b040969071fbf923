"""Processes that begin as copies of one that has imported everything, with the methods of `subprocess.Popen`.

To import takes longer than most of what tests do in a process of their own. The copies have run nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Self

MODULES = ("tests.support.killed_training",)


class Forked:
    """A process that calls a function and exits with what that returns. Without fork it imports by itself."""

    def __init__(self, function: Callable[..., int | None], *args: object) -> None:
        context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
        context.set_forkserver_preload(list(MODULES))
        self._process = context.Process(target=_exit, args=(function, *args))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, "it still runs"
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def _exit(function: Callable[..., int | None], *args: object) -> None:
    sys.exit(function(*args))
