"""`make bench`: our kernels and the peers' side by side, `benchmarks/results/` written anew.

The contenders take turns within every shape, so a machine that slows down slows all of them; medians and ratios are
what to read. `--against CHECKOUT` adds the native kernels of another checkout of this project, "before",
run with that checkout's .venv where it has one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import CASES, Case
from benchmarks.contenders import CONTENDERS
from benchmarks.report import BEFORE, write
from benchmarks.roofline import copy_bandwidth, multiply_add_rate
from onnx_backprop.ort_ops.compiler.machine import processors

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("onnx-backprop", "onnxruntime", "onnxruntime-extensions", "llvmlite", "numpy", "torch", "onnxsim")


class Worker:
    """A contender's process; `times` is None for what it cannot do."""

    def __init__(self, contender: str, threads: int, checkout: Path | None = None) -> None:
        venv = (checkout or Path()) / ".venv" / "bin" / "python"  # a checkout may need other libraries than we do
        python = str(venv.absolute()) if checkout and venv.exists() else sys.executable
        command = [python, "-m", "benchmarks.worker", contender, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def times(self, case: Case, gradient: str, runs: int) -> list[float] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": case.name, "gradient": gradient, "runs": runs}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a contender ended at {case.name} ({gradient}); its last words are above")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


Statistic = Callable[[list[float]], float]


def measure(
    case: Case, gradient: str, workers: dict[str, Worker], rounds: int, budget: float, statistic: Statistic
) -> dict[str, float]:
    """Seconds per contender, `rounds` turns each; short ones run several times a turn."""
    counts: dict[str, int] = {}
    for name, worker in workers.items():
        first = worker.times(case, gradient, 1)
        if first is not None:
            counts[name] = max(1, min(20, int(budget / max(first[0], 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(rounds):
        for name, count in counts.items():
            times[name] += workers[name].times(case, gradient, count) or []
    for name in counts:
        workers[name].times(case, gradient, 0)
    return {name: statistic(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--threads", type=int, default=min(2, processors()), help="for every contender (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender at a shape (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[""], help="shapes whose name contains one of these")
    parser.add_argument("--best", action="store_true", help="fastest runs, not medians: where others use the machine")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose kernels take part")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    arguments = parser.parse_args()
    rows = []
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "statistic": "fastest" if arguments.best else "median",
        "multiply_add_per_second": multiply_add_rate(arguments.threads),
        "copy_bytes_per_second": copy_bandwidth(arguments.threads),
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    workers = {name: Worker(name, arguments.threads) for name in arguments.contenders}
    if arguments.against:
        workers[BEFORE] = Worker("native", arguments.threads, arguments.against)
    chosen = [case for case in CASES if any(part in case.name for part in arguments.only)]
    work = [(case, gradient) for case in chosen for gradient in case.gradients]
    if not work:
        names = ", ".join(case.name for case in CASES)
        parser.error(f"no shape's name contains {' or '.join(arguments.only)}; the names are {names}")
    for case, gradient in tqdm(work, unit="shape", disable=None):
        seconds = measure(case, gradient, workers, arguments.rounds, 0.1, min if arguments.best else statistics.median)
        rows.append(
            {"case": case.name, "gradient": gradient, "flops": case.flops, "bytes": case.bytes, "seconds": seconds}
        )
    for worker in workers.values():
        worker.close()
    write(arguments.output, machine, rows)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
