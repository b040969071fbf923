"""The command on two ranks of a real MPI: equal to one process, and ended as a whole. `make distributed` has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.mpi import check_ended, finished, mpiexec, on_ranks, started, training_arguments, weights

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no mpiexec")


def test_mpiexec_is_installed() -> None:
    """So that no test here is passed over: a wheel of the extra `test` brings it."""
    assert mpiexec()


def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    """SGD, batches of five rows."""
    train = (
        *training_arguments(tmp_path),
        "--optimizer",
        "sgd",
        "--clip-norm",
        "0.05",
        "--evaluation",
        str(tmp_path / "data.npz"),
    )
    together = on_ranks(
        2, *train, "-o", str(tmp_path / "two.onnx"), "--epochs", "2", "--log", str(tmp_path / "two.csv")
    )
    alone = [sys.executable, *train, "-o", str(tmp_path / "one.onnx"), "--epochs", "2"]
    single = started(alone)
    out, _ = finished(together)
    assert out.count("written:") == 1  # rank 0 speaks
    finished(single)
    one = weights(tmp_path, "one")
    for name, value in weights(tmp_path, "two").items():
        np.testing.assert_allclose(value, one[name], atol=1e-6, err_msg=name)
    assert len((tmp_path / "two.csv").read_text().splitlines()) == 11


def test_sums_beside_the_backward_pass_and_divided_updates() -> None:
    """With real requests of two ranks, statistics being summed meanwhile: the bits of one sum behind it."""
    finished(on_ranks(2, "-m", "tests.support.rank_overlap"))


def test_what_ends_one_rank_ends_all(tmp_path: Path) -> None:
    """Within seconds, with one line that names the rank."""
    check_ended(tmp_path, "raise", 1)


LATE = """
import time
from onnx_backprop.distributed.mpi import world
if world().rank:
    from mpi4py import MPI
    MPI.Finalize()
    time.sleep(1.5)
    print("the late rank has ended by itself")
"""


def test_a_rank_that_ends_first_ends_no_other() -> None:
    """MPICH's launcher kills all ranks when one goes without its leave, which is taken in C's exit."""
    out, _ = finished(on_ranks(2, "-c", LATE))
    assert "by itself" in out
