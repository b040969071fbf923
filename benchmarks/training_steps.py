"""Whole training steps beside PyTorch eager: python -m benchmarks.training_steps [--rounds N] [--threads N]

Forward, loss, backward and SGD with momentum on the networks of `models/`. Every contender is a process of its own, and
they take turns within every case, so that a machine that slows down slows all of them. Read the ratios of the medians;
above 1 we are faster. Memory is the largest resident set of the process. Writes benchmarks/results/training_steps.json;
--profile prints where our steps spend their time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("onnx-backprop", "PyTorch", "PyTorch channels_last")
RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """A network, its input and the number of classes, None for a target of the output's shape."""

    build: Callable[[], ModelProto]
    shape: tuple[int, ...]
    classes: int | None = None

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Input and target."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal(self.shape).astype(np.float32)
        if self.classes:
            return x, rng.integers(0, self.classes, self.shape[0])
        return x, rng.random((self.shape[0], 1, *self.shape[2:])).astype(np.float32)


def _cases() -> dict[str, Case]:
    from models import resnet, unet_conv_transpose, unet_resize

    return {
        "ResNet-18 64x64 b8": Case(partial(resnet.build, features=64), (8, 3, 64, 64), 10),
        "U-Net ConvTranspose 128x128 b4": Case(
            partial(unet_conv_transpose.build, features=32, levels=3), (4, 1, 128, 128)
        ),
        "U-Net Resize 128x128 b4": Case(partial(unet_resize.build, features=32, levels=3), (4, 1, 128, 128)),
    }


def ours(case: Case, threads: int) -> Callable[[], object]:
    """A step of a Trainer."""
    import onnx_backprop as ob

    with tempfile.TemporaryDirectory() as folder:
        # converted elsewhere, so that the memory measured is that of the training
        path = Path(folder) / "training.onnx"
        process = multiprocessing.get_context("spawn").Process(target=_write, args=(case, path))
        process.start()
        process.join()
        trainer = ob.Trainer(path, learning_rate=RATE, session_options=_options(threads))
    feeds = dict(zip(trainer.graph.inputs, case.batch(), strict=True))
    return lambda: trainer.step(feeds)


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return options


def _write(case: Case, path: Path) -> None:
    _graph(case).save(path)


def _graph(case: Case) -> Any:
    import onnx_backprop as ob

    loss = "softmax_cross_entropy" if case.classes else "bce_with_logits"
    return ob.training_graph(case.build(), loss=loss, optimizer=ob.optimizers.SGD(momentum=MOMENTUM))


def pytorch(case: Case, threads: int, *, channels_last: bool) -> Callable[[], object]:
    """A step of PyTorch eager with the same network, node by node."""
    from benchmarks.torch_twin import Twin, functional, torch

    torch.set_num_threads(threads)
    model = case.build()
    twin = Twin(model)
    x, target = (torch.tensor(array) for array in case.batch())
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
        for parameter in twin.parameters.values():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    loss_of = functional.cross_entropy if case.classes else functional.binary_cross_entropy_with_logits
    optimizer = torch.optim.SGD(twin.parameters.values(), lr=RATE, momentum=MOMENTUM)
    name = model.graph.input[0].name

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(twin({name: x}), target)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def work(contender: str, case_name: str, threads: int) -> None:
    """The process of a contender: a number of steps on each line in, their times out; the end of input: memory."""
    case = _cases()[case_name]
    if contender == "onnx-backprop":
        step = ours(case, threads)
    else:
        step = pytorch(case, threads, channels_last=contender.endswith("channels_last"))
    losses = [step() for _ in range(3)]
    print(json.dumps(losses), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), flush=True)


class Worker:
    """A contender's process."""

    def __init__(self, contender: str, case: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.training_steps", "--work", contender, "--case", case]
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.losses: list[float] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a contender has ended; its last words are above")
        return json.loads(line)

    def times(self, count: int) -> list[float]:
        """Seconds of some steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> float:
        """End it; the largest resident set in MiB."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        memory = self._answer()
        self._process.wait()
        return memory


def measure(case: str, rounds: int, steps: int, threads: int) -> dict[str, dict[str, float]]:
    """Median milliseconds, memory and the first losses' last of every contender."""
    workers = {name: Worker(name, case, threads) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in tqdm(range(rounds), desc=case, unit="round", disable=not sys.stderr.isatty()):
        for name, worker in workers.items():
            times[name] += worker.times(steps)
    return {
        name: {
            "milliseconds": 1000 * statistics.median(times[name]),
            "memory_mib": worker.close(),
            "loss": worker.losses[-1],
        }
        for name, worker in workers.items()
    }


def profile(case_name: str, threads: int) -> None:
    """Print where our steps spend their time."""
    import onnx_backprop as ob
    from onnx_backprop.training.profiling import profile as measured

    case = _cases()[case_name]
    trainer = ob.Trainer(_graph(case), session_options=_options(threads))
    found = measured(trainer, dict(zip(trainer.graph.inputs, case.batch(), strict=True)))
    print(f"\n{case_name}")
    for timing in found.operators[:12]:
        print(f"  {timing.name:28}{timing.calls:6.0f}{timing.milliseconds:10.2f} ms{100 * timing.share:7.1f} %")
    for timing in found.nodes[:12]:
        print(f"    {timing.name:80}{timing.milliseconds:8.2f} ms")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of a contender in a round (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", help="one case only")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.case, given.threads)
        return
    names = [given.case] if given.case else list(_cases())
    if given.profile:
        for name in names:
            profile(name, given.threads)
        return
    rows = {name: measure(name, given.rounds, given.steps, given.threads) for name in names}
    ratios = []
    print(f"\n{'case':34}" + "".join(f"{name:>28}" for name in CONTENDERS) + f"{'ratio':>8}{'memory':>8}")
    for name, row in rows.items():
        best = min((row[c] for c in CONTENDERS[1:]), key=lambda r: r["milliseconds"])
        own = row[CONTENDERS[0]]
        ratios.append(best["milliseconds"] / own["milliseconds"])
        shown = "".join(f"{row[c]['milliseconds']:17.1f} ms{row[c]['memory_mib']:5.0f} MB" for c in CONTENDERS)
        memory = own["memory_mib"] / min(row[c]["memory_mib"] for c in CONTENDERS[1:])
        print(f"{name:34}{shown}{ratios[-1]:8.2f}{memory:8.2f}")
    print(f"geometric mean of the ratios: {math.exp(statistics.mean(map(math.log, ratios))):.2f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "training_steps.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
