"""Commands on the ranks of an MPI job: where mpiexec is, the training that they run, its data."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx

from models import unet_resize
from onnx_backprop.training.checkpoint import read_checkpoint

SECONDS = 10.0  # that all ranks may take to end
ROOT = Path(__file__).parents[2]
# openmpi refuses root and more ranks than cores unless it is told; binding would give all ranks one core
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


# Of every process that the tests here start: launchers give each rank a session of its own.
_MARK = {"ONNX_BACKPROP_TEST_JOB": uuid.uuid4().hex}
_PR_SET_PDEATHSIG = 1


def mpiexec() -> str | None:
    """That of the wheel beside this Python; None without one."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts"))


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | _OPENMPI | _MARK | {"PYTHONPATH": path} | more


def rank_command(count: int, *arguments: str) -> list[str]:
    return [str(mpiexec()), "-n", str(count), sys.executable, *arguments]


def on_ranks(count: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Python with these arguments on every rank."""
    return started(rank_command(count, *arguments), **more)


def started(command: list[str], **more: str) -> subprocess.Popen[str]:
    """A command in a session of its own, which ends when this process does; `end_jobs` ends all that is left of it."""
    return subprocess.Popen(
        command,
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Number, arguments and environment of everything that runs and was started here."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments, entries = (
                (folder / name).read_bytes().decode(errors="replace").split("\0") for name in ("cmdline", "environ")
            )
            variables = {name: value for name, _, value in (entry.partition("=") for entry in entries)}
            if variables.items() >= _MARK.items() and int(folder.name) != os.getpid():
                yield int(folder.name), arguments, variables


def end_jobs(*, seconds: float) -> list[str]:
    """The commands of processes that were started here and have not ended after some seconds; they are killed."""
    end = time.monotonic() + seconds
    while (left := list(_processes())) and time.monotonic() < end:
        time.sleep(0.05)
    for number, _, _ in left:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return [" ".join(arguments) for _, arguments, _ in left]


def training_arguments(folder: Path, *, rows: int = 22, data: str = "data.npz") -> tuple[str, ...]:
    """The arguments of a training on a model and data, an .npz or a Parquet file, that are written into a folder."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((rows, 1, 8, 8)).astype(np.float32)
    onnx.save(unet_resize.build(features=2), folder / "model.onnx")
    arrays = {"image": image, "target": (image > 0.3).astype(np.float32)}
    if data.endswith(".npz"):
        np.savez(folder / data, **arrays)
    else:
        table = import_module("pyarrow").table({name: array.tolist() for name, array in arrays.items()})
        import_module("pyarrow.parquet").write_table(table, folder / data, row_group_size=3)
    given = f"train {folder / 'model.onnx'} --data {folder / data} --loss bce_with_logits --batch-size 5".split()
    return ("-m", "onnx_backprop", *given)


def ranks(output: Path) -> dict[int, int]:
    """The ranks that train a model into a file, and the numbers of their processes."""
    processes: dict[int, int] = {}
    for number, arguments, variables in _processes():
        rank = variables.get("OMPI_COMM_WORLD_RANK") or variables.get("PMI_RANK")
        if rank and str(output) in arguments:
            processes[int(rank)] = number
    return processes


def launcher_of(process: subprocess.Popen[str]) -> int:
    """The number of what a process has started last."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[-1])


def stamp(path: Path) -> int | None:
    """What changes when a file is written anew."""
    return path.stat().st_mtime_ns if path.exists() else None


def finished(process: subprocess.Popen[str], *, seconds: float = 120) -> tuple[str, str]:
    """What a process that succeeds has written."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    return out, err


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return read_checkpoint(folder / f"{name}.onnx.checkpoint.safetensors")[0]


MESSAGES = {
    "kill": "",  # which mpiexec tells in words of its own
    "terminate": "onnx-backprop: error on rank {} of 2: ended by signal 15",
    "raise": "onnx-backprop: error on rank {} of 2: ValueError: this row cannot be read",
    "nan": "onnx-backprop: error on rank 0 of 2: the training has failed: the loss is nan in step 4",
    "full": "onnx-backprop: error on rank {} of 2: cannot write the checkpoint",
    "leave": "onnx-backprop: error: not all of 2 ranks have started within 3 s",
}


def check_ended(folder: Path, way: str, rank: int) -> None:
    """What befalls one rank ends all of them within seconds, with one line, and an exit code that is not 0."""
    train = training_arguments(folder)[2:]
    begun = folder / "begun"  # written when it happens
    begun.write_text(str(time.time()))
    process = on_ranks(
        2,
        *("-m", "tests.support.failing_rank", way, str(rank), "3", *train, "-o", str(folder / "m.onnx"), "--quiet"),
        BEGUN=str(begun),
        ONNX_BACKPROP_START_SECONDS="3" if way == "leave" else "60",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode, err
    messages = [line for line in err.splitlines() if line.startswith("onnx-backprop:")]
    assert (
        (messages[0].startswith(MESSAGES[way].format(rank)) and len(messages) == 1) if MESSAGES[way] else not messages
    ), err
    assert "Abort(" not in err  # of MPICH
    took = time.time() - float(begun.read_text())
    assert took < SECONDS
    assert "Fatal Python error" not in err, err
    print(f"{way} on rank {rank}: all ended after {took:.1f} s")
    assert not ranks(folder / "m.onnx")
