"""MPI behind the protocol, through mpi4py; whether this process is a rank of an MPI job, and that the job is sound."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_backprop.distributed.communicator import ALONE, Communicator, Start
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError

if TYPE_CHECKING:
    from mpi4py import MPI

START_SECONDS = "ONNX_BACKPROP_START_SECONDS"  # how long the ranks wait for each other when they start
_ON_ONE_MACHINE, _ON_SEVERAL = 8.0, 300.0  # its defaults
# What launchers tell a process: how many ranks there are, and how many of them on this machine.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_MOST_CORES = 2**14  # of a machine
_UNTIL_FORWARDED = 0.3  # seconds that a launcher has to pass on what is written: openmpi's drops it when ranks end
_PIECE = 2**28  # bytes of one message: counts of MPI are 32 bits


class Mpi:
    """A communicator of mpi4py that nobody else sends through."""

    def __init__(self, communicator: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi, self._communicator = MPI, communicator
        self._beside = communicator.Dup()  # of sums that go on while others begin
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.threads = self._threads()
        self.start: Start | None = self._start if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None
        if self.size > 1:  # alone it may well outlive the shell that has started it
            _end_with_launcher()

    def _threads(self) -> int:
        """The cores that this process may use, divided by the ranks of this machine that may use the same ones."""
        from onnx_backprop.ort_ops.compiler import machine  # not before: it needs llvmlite

        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED)
        mask = np.zeros(_MOST_CORES, np.uint8)
        mask[machine.bound_to()] = 1
        everybody = np.empty((node.Get_size(), len(mask)), np.uint8)
        node.Allgather(mask, everybody)
        node.Free()
        same = int((everybody == mask).all(axis=1).sum())
        return max(1, machine.cores() // same)

    def sum(self, array: np.ndarray) -> None:
        """array ← Σ over all ranks of their arrays, in place."""
        for piece in _pieces(array):
            self._communicator.Allreduce(self._mpi.IN_PLACE, piece, op=self._mpi.SUM)

    def _start(self, array: np.ndarray) -> Callable[[], bool]:
        """Begin array ← Σ over all ranks; whether it is there."""
        pieces = _pieces(array)
        requests = [self._beside.Iallreduce(self._mpi.IN_PLACE, piece, op=self._mpi.SUM) for piece in pieces]
        return lambda: self._mpi.Request.Testall(requests)

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> None:
        """array[ends[r - 1]:ends[r]] ← that of rank r, for all r, in place."""
        starts = [0, *ends[:-1]]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        bits = array.view(f"u{array.itemsize}")  # MPI knows no float16
        request = self._communicator.Iallgatherv(self._mpi.IN_PLACE, [bits, (counts, starts)])
        while not request.Test():  # where ranks share cores, a call that waits would keep the others from sending
            time.sleep(0)

    def broadcast(self, array: np.ndarray) -> None:
        """array ← that of rank 0, in place."""
        for piece in _pieces(array.reshape(-1).view(np.uint8)):
            self._communicator.Bcast(piece, root=0)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._communicator.Barrier()

    def abort(self, message: str, code: int) -> None:
        """Write the message to the standard error and end every rank with this exit code."""
        sys.stdout.flush()
        sys.stderr.write(message)
        sys.stderr.flush()
        time.sleep(_UNTIL_FORWARDED)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPICH's own words say less than these
        self._communicator.Abort(code)


@cache  # once a process
def _end_with_launcher() -> None:
    """Let this rank end within a second of what has started it: nobody would end it, and it may wait for ever."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        with suppress(OSError):  # who reads it has ended as well, perhaps
            os.write(2, b"onnx-backprop: error: the launcher of the ranks has ended\n")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _end_without_destructors() -> None:
    """Let C's `exit`, by which MPICH ends ranks inside a call, run nothing but what is registered from here on.

    The destructors of an extension module would crash there. MPI must not have begun: at a regular end MPICH takes its
    leave of the launcher in `exit`, and a launcher ends the ranks of which one has gone without that.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "on_exit"):  # glibc
        with suppress(ImportError):  # what was registered last runs first, and this is what crashes
            import_module("onnx_backprop.ort_ops.runtime.extensions")
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    flat = array.reshape(-1)
    assert np.shares_memory(flat, array) or not array.size  # a copy would be summed and thrown away
    length = _PIECE // array.itemsize
    return [flat[start : start + length] for start in range(0, len(flat), length)]


def world(environment: Mapping[str, str] = os.environ) -> Communicator:
    """All ranks of the MPI job that this process belongs to; ALONE where it belongs to none.

    Where a rank does not start within START_SECONDS, the others end. Errors: KernelError without mpi4py or a library
    of MPI, InvalidArgumentError where the launcher's ranks and MPI's are not the same, as under another MPI's mpiexec:
    every process would train on its own, and write the same files.
    """
    expected = next((int(environment[name]) for name in _SIZES if environment.get(name, "").isdecimal()), 1)
    if expected == 1:
        return ALONE
    _end_without_destructors()
    with _Patience(_patience(environment, expected), expected):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as e:
            raise KernelError(
                f"this process is one of {expected} ranks, and mpi4py does not load: {e}. Install it and a library of "
                "MPI, as by pip install 'onnx-backprop[mpi]' mpich"
            ) from e
        size = MPI.COMM_WORLD.Get_size()
        if size != expected:
            raise InvalidArgumentError(
                f"the launcher has started {expected} processes, and MPI sees {size}: {_library(MPI)}. Start them "
                "with the mpiexec of this library, or under Slurm with srun --mpi=pmix"
            )
        MPI.COMM_WORLD.Barrier()
    return Mpi(MPI.COMM_WORLD.Dup())


def _library(mpi: Any) -> str:
    return mpi.Get_library_version().splitlines()[0].strip("\0 ")


def _patience(environment: Mapping[str, str], expected: int) -> float:
    text = environment.get(START_SECONDS)
    if text is None:
        local = next((environment[name] for name in _LOCAL_SIZES if name in environment), "")
        return _ON_ONE_MACHINE if local == str(expected) else _ON_SEVERAL
    try:
        return float(text)
    except ValueError as e:
        raise InvalidArgumentError(f"{START_SECONDS}: expected a number of seconds, got {text!r}") from e


# The end of its input means that the other process has gone on, or has ended.
_WATCH = """
import os, select, sys, time
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    try:
        os.write(2, sys.argv[2].encode())
        time.sleep(float(sys.argv[4]))
    finally:
        os.kill(int(sys.argv[3]), 9)
"""


class _Patience:
    """A block that ends this process when it takes too long.

    By another one: no thread of Python runs while MPI starts, which holds the interpreter's lock.
    """

    def __init__(self, seconds: float, ranks: int) -> None:
        message = (
            f"onnx-backprop: error: not all of {ranks} ranks have started within {seconds:g} s "
            f"({START_SECONDS} sets another time)\n"
        )
        self._command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WATCH,
            str(seconds),
            message,
            str(os.getpid()),
            str(_UNTIL_FORWARDED),
        ]

    def __enter__(self) -> None:
        self._watcher = subprocess.Popen(self._command, stdin=subprocess.PIPE)

    def __exit__(self, *_: object) -> None:
        self._watcher.communicate()
