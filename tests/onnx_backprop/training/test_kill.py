"""Training killed at random moments (SIGKILL): every resumption goes on as if nothing had happened, bit for bit.

10 kills here; `make kill` sets KILLS=50.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
KILLS = int(os.environ.get("KILLS", "10"))
STEPS_BETWEEN = 6  # about as many steps between two kills
BATCHES = 9  # of an epoch
PATIENCE = 120.0  # seconds without a step before the test gives up


def lines(folder: Path) -> list[str]:
    path = folder / "losses"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def started(folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed_training", str(folder), str(epochs)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
    )


def killed(folder: Path, epochs: int, steps: int, pause: float) -> bool:
    """Kill a training some steps and a pause after its start; whether it was still running."""
    before = len(lines(folder))
    process = started(folder, epochs)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(lines(folder)) - before < steps and process.poll() is None:
            assert time.monotonic() < deadline, "no step in all that time"
            time.sleep(0.002)
        time.sleep(pause)
        process.kill()
    finally:
        process.kill()
        code = process.wait()
    assert code in (0, -9), code
    return code != 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_and_resumed(tmp_path: Path) -> None:
    seed = 20261121
    rng = np.random.default_rng(seed)
    epochs = -(-KILLS * STEPS_BETWEEN * 2 // BATCHES)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert started(whole, epochs).wait() == 0
    expected = lines(whole)
    assert [int(line.split()[0]) for line in expected] == list(range(epochs * BATCHES))
    kills = 0
    for _ in range(KILLS):
        # the pause ends anywhere in a step or in the writing of a checkpoint
        kills += killed(broken, epochs, int(rng.integers(0, 2 * STEPS_BETWEEN - 2)), float(rng.uniform(0, 0.01)))
    assert kills == KILLS, f"seed {seed}: a training ended before it could be killed"
    assert started(broken, epochs).wait() == 0
    got = lines(broken)
    # a step is gone through again when the kill came after its line and before its checkpoint was in place
    again = [line for line in got if line.strip()]
    assert set(again) == set(expected), f"seed {seed}: other losses after a kill"
    assert len(got) - len(expected) <= KILLS
    for name in ("checkpoint", "trained.onnx"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    assert not [path for path in broken.iterdir() if path.suffix == ".tmp"], "a part of a checkpoint was left"
