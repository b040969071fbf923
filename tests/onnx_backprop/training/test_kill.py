"""Trainings killed, stopped and crowded out at random moments: nothing is lost, bit for bit.

3 kills here; `make kill` sets KILLS=100. The figures are printed (`pytest -s`).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from onnx_backprop.training.checkpoint import read_checkpoint
from tests.support import killed_training
from tests.support.forked import Forked

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("SEED", "20261121"))
STEPS_BETWEEN = 6  # about as many steps between two kills
BATCHES = 9  # of an epoch
EPOCHS = -(-KILLS * STEPS_BETWEEN * 2 // BATCHES)
PATIENCE = 120.0  # seconds without a step before the test gives up
THREADS = 4

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def started(mode: str, *folders: Path) -> Forked:
    return Forked(killed_training.main, mode, EPOCHS, list(folders))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Reference:
    """A training that nobody disturbs: its losses, the hash of the checkpoint behind every step, its model."""

    def __init__(self, folder: Path) -> None:
        assert started("reference", folder).wait() == 0
        self.losses = lines(folder / "losses")
        assert [int(line.split()[0]) for line in self.losses] == list(range(EPOCHS * BATCHES))
        self.hashes = {int(steps): digest for steps, digest in map(str.split, lines(folder / "hashes"))}
        self.model = (folder / "trained.onnx").read_bytes()

    def check_read(self, path: Path) -> int:
        """A checkpoint is whole, and the one that its step has in the undisturbed training; how many steps it has."""
        steps = read_checkpoint(path)[1]["steps"]
        content = path.read_bytes()  # of a later step perhaps
        assert hashlib.sha256(content).hexdigest() in self.hashes.values(), f"seed {SEED}: another checkpoint"
        return steps

    def check_end(self, folder: Path, repeated: int) -> int:
        """The outcome of a disturbed training, which may have gone through so many steps again; how many it has."""
        # a step is gone through again when the kill came after its line and before its checkpoint was in place
        got = [line for line in lines(folder / "losses") if line.strip()]
        assert set(got) == set(self.losses), f"seed {SEED}: other losses after a fault"
        assert len(got) - len(self.losses) <= repeated
        assert self.check_read(folder / "checkpoint") == len(self.losses)
        assert (folder / "trained.onnx").read_bytes() == self.model
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not hidden, "a part of a checkpoint, or a lock, was left"
        return len(got) - len(self.losses)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def wait_for(what: Callable[[], bool], look: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "nothing happens any more"
        look()
        time.sleep(0.002)


def wait_for_steps(
    count: int, processes: Sequence[Forked], *folders: Path, look: Callable[[], object] = lambda: None
) -> None:
    """Until so many more have been made, or a process has ended."""

    def steps() -> int:
        return sum(len(lines(folder / "losses")) for folder in folders)

    before = steps()
    wait_for(lambda: steps() - before >= count or any(p.poll() is not None for p in processes), look)


@pytest.mark.parametrize(("mode", "wanted"), [("fit", KILLS), ("save", -(-KILLS // 3))])
def test_two_processes_contend_for_a_checkpoint(tmp_path: Path, reference: Reference, mode: str, wanted: int) -> None:
    """With `fit` one waits for the other, with `save` both write; the one that is killed is anyone."""
    rng, kills, seen = np.random.default_rng(SEED), 0, Counter[int]()

    def look() -> None:
        if (tmp_path / "checkpoint").exists():
            seen[reference.check_read(tmp_path / "checkpoint")] += 1

    def ready(process: Forked) -> bool:
        return (tmp_path / f"ready.{process.pid}").exists() or process.poll() is not None

    with ExitStack() as stack:
        processes = [stack.enter_context(started(mode, tmp_path)) for _ in range(2)]
        stack.callback(lambda: [process.kill() for process in processes])
        while kills < wanted:
            wait_for(lambda: all(map(ready, processes)), look)
            for process in processes:
                process.send_signal(signal.SIGCONT)
            wait_for_steps(int(rng.integers(0, 2 * STEPS_BETWEEN - 2)), processes, tmp_path, look=look)
            time.sleep(float(rng.uniform(0, 0.01)))  # anywhere in a step or in the writing of a checkpoint
            victim = int(rng.integers(2))
            processes[victim].kill()
            kills += processes[victim].wait() == -signal.SIGKILL
            # the other one stands still, in the middle of anything, until there are two again
            processes[1 - victim].send_signal(signal.SIGSTOP)
            processes[victim] = stack.enter_context(started(mode, tmp_path))
        wait_for(lambda: all(map(ready, processes)), look)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        wait_for(lambda: all(process.poll() is not None for process in processes), look)
        assert [process.returncode for process in processes] == [0, 0]
    steps_of_both = len(lines(tmp_path / "losses"))
    assert started("fit", tmp_path).wait() == 0
    repeated = reference.check_end(tmp_path, kills if mode == "fit" else steps_of_both)
    print(
        f"\n2 processes, {mode}: {kills} kills, {seen.total()} reads of {len(seen)} checkpoints, all whole; "
        f"{len(reference.losses)} steps, {repeated} gone through again"
    )


def test_four_trainings_in_four_threads(tmp_path: Path, reference: Reference) -> None:
    """Killed, terminated and stopped while all of them write."""
    rng, folders, codes = np.random.default_rng(SEED), [make(tmp_path / str(n)) for n in range(THREADS)], Counter[int]()
    for number in (signal.SIGTERM, signal.SIGKILL) * -(-KILLS // 6):
        with started("fit", *folders) as process:
            try:
                wait_for_steps(1, [process], *folders)
                for _ in range(3):
                    wait_for_steps(int(rng.integers(0, 2 * STEPS_BETWEEN)), [process], *folders)
                    process.send_signal(signal.SIGSTOP)
                    for folder in folders:
                        if (folder / "checkpoint").exists():
                            reference.check_read(folder / "checkpoint")
                    process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            finally:
                codes[process.wait()] += 1
    assert set(codes) <= {-signal.SIGTERM, -signal.SIGKILL}
    assert started("fit", *folders).wait() == 0
    repeated = [reference.check_end(folder, codes.total()) for folder in folders]
    print(
        f"\n4 threads: ended by {dict(codes)}, stopped {3 * codes.total()} times; steps gone through again: {repeated}"
    )


def test_a_disk_that_is_full_every_other_moment(tmp_path: Path, reference: Reference) -> None:
    """Trainings in four threads go on from memory once there is room."""
    folders = [make(tmp_path / str(n)) for n in range(THREADS)]
    assert started("full", *folders).wait() == 0
    failures = [int((folder / "failures").read_text()) for folder in folders]
    assert sum(failures) > 0
    for folder in folders:
        assert reference.check_end(folder, 0) == 0
    print(f"\n4 threads on a full disk: {failures} failures to write, {len(reference.losses)} steps each, none again")
