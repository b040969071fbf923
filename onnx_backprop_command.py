"""What the command `onnx-backprop` starts with: Ctrl-C ends it with one line, also while all the rest is imported.

SIGTERM ends it as well as an exception can.

Outside of the package, because importing anything of that imports it as a whole, which takes a second.
"""

from __future__ import annotations

import os
import signal


def _end(*_: object) -> None:
    """Where there is nothing to undo: at the beginning and at the end of the process."""
    os.write(2, b"onnx-backprop: interrupted\n")
    os._exit(130)


def _terminated(*_: object) -> None:
    """An exception, so that nothing half written is left."""
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Run the command; returns its exit code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nobody may interrupt this process
        from onnx_backprop.command.main import main as run

        return run()
    signal.signal(signal.SIGINT, _end)
    from onnx_backprop.command.main import main as run

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:  # just before or behind what `run` catches
        _end()
        raise
    return code
