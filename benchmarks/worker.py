"""One contender in a process of its own: reads requests from standard input, answers with times in seconds.

A request is a JSON line {"case", "gradient", "runs"}; runs = 0 forgets the case. The answer is a JSON list of times,
null for a case that the contender cannot do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

COOLDOWN = 0.1  # seconds; the threads of the contender before wait busily for some 40 ms, on a core that others need


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(arguments.threads)  # before any of the libraries is imported
    from benchmarks.cases import BY_NAME
    from benchmarks.contenders import CONTENDERS

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    prepared = {}
    for line in sys.stdin:
        request = json.loads(line)
        key = request["case"], request["gradient"]
        if not request["runs"]:
            prepared.pop(key, None)
            times = []
        else:
            if key not in prepared:
                run = CONTENDERS[arguments.contender](BY_NAME[key[0]], key[1], arguments.threads)
                prepared[key] = run
                if run is not None:
                    run()
            times = _times(prepared[key], request["runs"])
        answers.write(json.dumps(times) + "\n")
        answers.flush()


def _times(run, count: int) -> list[float] | None:
    if run is None:
        return None
    time.sleep(COOLDOWN)
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
