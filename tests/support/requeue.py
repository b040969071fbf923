"""`python -m tests.support.requeue TIMES COMMAND…`: a scheduler that requeues a job which fails, as Slurm with --requeue.

The job is started again as it was, this often at most, with nothing but what its own files say of the run before.
"""

from __future__ import annotations

import signal
import subprocess
import sys

GIVEN_UP = 1


def main(times: int, command: list[str]) -> int:
    for left in range(times, -1, -1):
        with subprocess.Popen(command) as job:
            signal.signal(signal.SIGTERM, lambda number, _, job=job: job.send_signal(number))
            code = job.wait()
        if code == 0:
            return 0
        print(f"requeue: exit code {code}, {left} left", file=sys.stderr, flush=True)
    return GIVEN_UP


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
