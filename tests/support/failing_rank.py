"""`python -m tests.support.failing_rank WAY RANK STEP train …`: the command, and what befalls one rank in one step.

WAY: kill, terminate, raise, nan, full, leave (before it has begun), or none.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> int:
    way, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    this_rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    if way == "leave" and this_rank == rank:
        time.sleep(60)
        return 0
    from onnx_backprop.training import checkpoint
    from onnx_backprop.training.trainer import Trainer

    run = Trainer.step

    def failing(self: Trainer, *feeds: Any, **more: Any) -> float:
        if this_rank == rank and self.steps == step:
            begun()
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif way == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            elif way == "raise":
                raise ValueError("this row cannot be read")
            elif way == "nan":
                feeds = (type(feeds[0])({name: array * np.float32("nan") for name, array in feeds[0].items()}),)
        return run(self, *feeds, **more)

    def begun() -> None:
        Path(os.environ["BEGUN"]).write_text(str(time.time()))

    def full(*_: Any) -> Any:
        begun()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if way == "full" and this_rank == rank:
        checkpoint.replacing = full
    Trainer.step = failing
    from onnx_backprop_command import main as command

    del sys.argv[1:4]
    return command()


if __name__ == "__main__":
    sys.exit(main())
