"""An exception on one rank ends all of them: the others would wait for it for ever."""

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from onnx_backprop.distributed.communicator import Communicator
from onnx_backprop.opset.core.errors import OnnxBackpropError

_AFTER = 3.0  # seconds that others leave to rank 0, which says once what all have met, and to its launcher


@contextmanager
def ending_all(communicator: Communicator) -> Iterator[None]:
    """A block whose exceptions end all ranks, with one line of the rank that failed; alone they go on as they are."""
    try:
        yield
    except BaseException as e:
        if communicator.size == 1 or (isinstance(e, SystemExit) and not e.code):
            raise
        _end(communicator, e)


def _end(communicator: Communicator, error: BaseException) -> None:
    if communicator.rank:
        time.sleep(_AFTER)
    where = f"on rank {communicator.rank} of {communicator.size}"
    if isinstance(error, OnnxBackpropError):
        communicator.abort(f"onnx-backprop: error {where}: {' '.join(str(error).split())}\n", 2)
    elif isinstance(error, KeyboardInterrupt):
        communicator.abort(f"onnx-backprop: interrupted {where}{'. ' if error.args else ''}{error}\n", 130)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        what = f"signal {code - 128}" if code > 128 else f"exit code {error.code}"
        communicator.abort(f"onnx-backprop: error {where}: ended by {what}\n", code)
    else:
        traceback.print_exception(error)
        communicator.abort(f"onnx-backprop: error {where}: {type(error).__name__}: {error}\n", 1)


def end_all_on_uncaught(communicator: Communicator) -> None:
    """Let an exception that nobody catches end all ranks, in programs of one's own."""
    if communicator.size == 1:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if communicator.rank:
            time.sleep(_AFTER)
        communicator.abort(f"onnx-backprop: rank {communicator.rank} of {communicator.size} has failed\n", 1)

    sys.excepthook = hook
