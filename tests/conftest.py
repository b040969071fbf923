"""Fixtures for every test."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from onnx_backprop.ort_ops import default_options


def pytest_configure() -> None:
    """Ctrl-C interrupts, though a shell has started this in the background. No session waits busily.

    Waiting takes the cores from the other processes; sessions with options of their own are their tests' business.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    of_a_session, of_a_trainer = {}, {"lean": True, "threads": 0}
    for more in (of_a_session, of_a_trainer):
        default_options(python_operators=False, **more).add_session_config_entry("session.intra_op.allow_spinning", "0")


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
