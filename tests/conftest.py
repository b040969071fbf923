"""Fixtures for every test, and what keeps its threads from waiting busily."""

from __future__ import annotations

import gc
import os

# OpenBLAS cuts even small products into threads that wait busily for one another: ten times the processor's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import signal
import zlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import onnxruntime
import pytest

SPINNING = "session.intra_op.allow_spinning"
GARBAGE = 20_000  # objects between two collections, some megabytes
_create = onnxruntime.InferenceSession.__init__


@wraps(_create)
def _create_quietly(self: Any, path_or_bytes: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
    """No session's threads wait busily, which takes the cores from the other processes, unless its options say so."""
    options = onnxruntime.SessionOptions() if sess_options is None else sess_options
    try:
        options.get_session_config_entry(SPINNING)
    except RuntimeError:  # nothing is said
        options.add_session_config_entry(SPINNING, "0")
    _create(self, path_or_bytes, options, *args, **kwargs)


onnxruntime.InferenceSession.__init__ = _create_quietly  # before the package makes sessions of its own of it


def pytest_configure() -> None:
    """Ctrl-C interrupts, though a shell has started this in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay for good: no later collection walks over them, a sixth of the run's time.

    What conversions leave behind in cycles, of nodes and their values, is collected in larger portions than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only; pytest shows the seed when the test fails."""
    seed = zlib.crc32(request.node.nodeid.encode())
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Text for the end of the run, whichever process the test ran in."""
    return lambda text: record_property("told", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests told."""
    for report in (
        r for reports in terminalreporter.stats.values() for r in reports if isinstance(r, pytest.TestReport)
    ):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "told":
                terminalreporter.write_line(str(value))
