"""What a training needs of whatever connects its ranks: five operations, which any engine can offer."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError

# (array) -> whether its sum is there by now, to be asked until it is
Start = Callable[[np.ndarray], Callable[[], bool]]


@runtime_checkable
class Communicator(Protocol):
    """The ranks 0 … size - 1 of one training. All of them call the same operations in the same order.

    sum, broadcast: arrays that are contiguous in memory, of one shape and type on all ranks. The sum is the same on
    all of them, bit for bit. abort: end all processes, those that wait for this one too; does not return.
    threads: how many threads this rank may use, so that the ranks of a machine share its cores.

    An engine may offer two operations more. `start(array)` begins a sum and comes back; what it answers has to be
    called until it says that the sum is there. One thread does this, beside others that call the rest. It may be None.
    `gather(array, ends)`: array[ends[r - 1] : ends[r]] ← that of rank r, for all r, in place.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def threads(self) -> int: ...
    def sum(self, array: np.ndarray) -> None:
        """array ← Σ over all ranks of their arrays, in place."""

    def broadcast(self, array: np.ndarray) -> None:
        """array ← that of rank 0, in place."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def abort(self, message: str, code: int) -> None:
        """Write the message to the standard error and end every rank with this exit code."""


class _Alone:
    """The only rank there is."""

    rank, size, threads = 0, 1, 0  # 0: as many threads as onnxruntime takes by itself

    def sum(self, array: np.ndarray) -> None:
        del array

    def broadcast(self, array: np.ndarray) -> None:
        del array

    def barrier(self) -> None:
        pass

    def abort(self, message: str, code: int) -> None:
        sys.stderr.write(message)
        raise SystemExit(code)


ALONE: Communicator = _Alone()


def connected(communicator: Any) -> Communicator:
    """A communicator of mpi4py, one of this protocol, or None for a training on its own, as the protocol.

    Of an MPI communicator a duplicate is used, so that messages do not mix: all ranks call this. Errors:
    InvalidArgumentError for anything else.
    """
    if communicator is None:
        return ALONE
    if hasattr(communicator, "Allreduce") and hasattr(communicator, "Dup"):
        from onnx_backprop.distributed.mpi import Mpi  # not before: mpi4py is an extra

        return Mpi(communicator.Dup()) if communicator.Get_size() > 1 else ALONE
    if not isinstance(communicator, Communicator):
        raise InvalidArgumentError(
            f"communicator: expected one of mpi4py, as MPI.COMM_WORLD, or of onnx_backprop.distributed.Communicator, "
            f"got {type(communicator).__name__}"
        )
    return communicator


def start_of(communicator: Communicator) -> Start | None:
    """How sums are begun that go on by themselves; None where the engine does not offer that."""
    return getattr(communicator, "start", None)


def exchange(communicator: Communicator, array: np.ndarray, ends: Sequence[int]) -> None:
    """array[ends[r - 1]:ends[r]] ← that of rank r, for all ranks r; in place, bit for bit."""
    if hasattr(communicator, "gather"):
        communicator.gather(array, ends)  # type: ignore[attr-defined]
        return
    start = ends[communicator.rank - 1] if communicator.rank else 0
    bits = array.view(np.uint8)
    bits[: start * array.itemsize] = 0
    bits[ends[communicator.rank] * array.itemsize :] = 0
    communicator.sum(bits)


def broadcast_json(communicator: Communicator, value: Any) -> Any:
    """What rank 0 gives, on all ranks; what JSON can hold."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
    length = np.array([len(text)], np.int64)
    communicator.broadcast(length)
    if communicator.rank:
        text = np.empty(length[0], np.uint8)
    communicator.broadcast(text)
    return json.loads(text.tobytes())


def gathered(communicator: Communicator, row: np.ndarray) -> np.ndarray:
    """The rows of all ranks, one below the other."""
    rows = np.zeros((communicator.size, *row.shape), row.dtype)
    rows[communicator.rank] = row
    communicator.sum(rows)
    return cast(np.ndarray, rows)


def anywhere(communicator: Communicator, wanted: bool) -> bool:
    """Whether any rank says yes."""
    count = np.array([wanted], np.int64)
    communicator.sum(count)
    return bool(count[0])
