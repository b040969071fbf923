"""Commands on the ranks of an MPI job: where mpiexec is, the training that they run, its data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
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


def mpiexec() -> str | None:
    """That of the wheel beside this Python; None without one."""
    return shutil.which("mpiexec", path=sysconfig.get_path("scripts"))


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | _OPENMPI | {"PYTHONPATH": path} | more


def on_ranks(count: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Python with these arguments on every rank."""
    return subprocess.Popen(
        [str(mpiexec()), "-n", str(count), sys.executable, *arguments],
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def made_training(folder: Path, *, rows: int = 22) -> tuple[str, ...]:
    """The arguments of a training on a model and data that are written into a folder."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((rows, 1, 8, 8)).astype(np.float32)
    onnx.save(unet_resize.build(features=2), folder / "model.onnx")
    np.savez(folder / "data.npz", image=image, target=(image > 0.3).astype(np.float32))
    given = f"train {folder / 'model.onnx'} --data {folder / 'data.npz'} --loss bce_with_logits --batch-size 5".split()
    return ("-m", "onnx_backprop", *given)


def ranks(output: Path) -> dict[int, int]:
    """The ranks that train a model into a file, and the numbers of their processes."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            entries = (folder / "environ").read_bytes().split(b"\0")
            told = {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}
        except OSError:
            continue
        rank = told.get(b"OMPI_COMM_WORLD_RANK") or told.get(b"PMI_RANK")
        if rank and str(output).encode() in arguments:
            found[int(rank)] = int(folder.name)
    return found


def finished(process: subprocess.Popen[str], *, seconds: float = 120) -> tuple[str, str]:
    """What a process that succeeds has written."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    return out, err


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return read_checkpoint(folder / f"{name}.onnx.checkpoint.safetensors")[0]


SAID = {
    "kill": "",  # which mpiexec tells in words of its own
    "terminate": "onnx-backprop: error on rank {} of 2: ended by signal 15",
    "raise": "onnx-backprop: error on rank {} of 2: ValueError: this row cannot be read",
    "nan": "onnx-backprop: error on rank 0 of 2: the training has failed: the loss is nan in step 4",
    "full": "onnx-backprop: error on rank {} of 2: cannot write the checkpoint",
    "leave": "onnx-backprop: error: not all of 2 ranks have started within 3 s",
}


def check_ended(folder: Path, way: str, rank: int) -> None:
    """What befalls one rank ends all of them within seconds, with one line, and an exit code that is not 0."""
    train = made_training(folder)[2:]
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
    said = [line for line in err.splitlines() if line.startswith("onnx-backprop:")]
    assert (said[0].startswith(SAID[way].format(rank)) and len(said) == 1) if SAID[way] else not said, err
    took = time.time() - float(begun.read_text())
    assert took < SECONDS
    print(f"{way} on rank {rank}: all ended after {took:.1f} s")
    assert not ranks(folder / "m.onnx")
