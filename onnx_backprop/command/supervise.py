"""`train --launch COMMAND --restarts N`: the training in processes of its own, started again where they were killed."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from onnx_backprop.opset.core.errors import InvalidArgumentError

_FINAL = (0, 2, 130)  # done, refused, interrupted: it would be the same once more
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def supervise(arguments: argparse.Namespace, checkpoint: Path) -> int:
    """Run the command again without --launch and --restarts, in processes started by the former; its exit code.

    A run that was killed or has crashed goes on from the checkpoint, if it or one before has written that.
    """
    if any(name in os.environ for name in _RANKS):
        raise InvalidArgumentError(
            "--launch, --restarts: this process was started by mpiexec or srun already, which end with their ranks. "
            'Start the ranks by --launch "mpiexec -n 4", or let the scheduler requeue the job with --resume'
        )
    command = [*_launcher(arguments.launch), sys.executable, "-m", "onnx_backprop", *arguments.argv]
    command += ["--launch=", "--restarts=0"]
    before, left = _stamp(checkpoint), arguments.restarts
    more: list[str] = []
    while True:
        code, ended = _run(command + more)
        if code in _FINAL or ended or not left:
            return code
        resumes = arguments.resume or _stamp(checkpoint) != before  # never from a checkpoint of another training
        more = ["--force", *(["--resume"] if resumes else [])]  # what is there is ours, the first run has seen to that
        where = f"from {checkpoint}" if resumes else "from the beginning"
        sys.stderr.write(f"onnx-backprop: the training has ended with exit code {code}; again {where}, {left} left\n")
        left -= 1


def _launcher(text: str | None) -> list[str]:
    """The words of a launcher; one that lies beside this Python, as those of wheels do, comes first."""
    words = shlex.split(text or "")
    if words:
        places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        launcher = shutil.which(words[0], path=places)
        if launcher is None:
            raise InvalidArgumentError(f"--launch: there is no command {words[0]!r}. pip install mpich brings mpiexec")
        words[0] = launcher
    return words


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _run(command: list[str]) -> tuple[int, bool]:
    """The exit code of a command, and whether somebody has ended it through this process by SIGTERM.

    Ctrl-C reaches the processes of a terminal by itself.
    """
    process, ended = subprocess.Popen(command), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal ended
        ended = True
        process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code, ended
