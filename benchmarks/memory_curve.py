"""Time of a training step against its memory: python -m benchmarks.memory_curve [--case NAME | --file MODEL.onnx …]

Ours at several budgets of `memory=` beside PyTorch: eager, eager with `torch.utils.checkpoint` over parts of about as
many nodes each, and torch.compile with `activation_memory_budget`. Forward, loss, backward and SGD with momentum.
Every contender is a process of its own, and they take turns. Memory is the largest resident set during the steps less
that before the first: parameters and libraries do not count, but gradients of parameters, PyTorch's momentum and what
allocators waste do. Writes benchmarks/results/memory_curve.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

RESULTS = Path(__file__).parent / "results"
BUDGETS = ("", "100%", "70%", "50%")  # the first: without `memory=`
PARTS = (1, 2, 4, 8)
COMPILED = (1.0, 0.5, 0.2)
RATE, MOMENTUM, WARM_UP = 0.01, 0.9, 3


@dataclass(frozen=True)
class Case:
    """A network, its input and the number of classes, None for a target of the output's shape with one channel."""

    build: Callable[[], ModelProto]
    shape: tuple[int, ...]
    classes: int | None = None
    training_mode: bool = False

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Input and target."""
        rng = np.random.default_rng(1)
        element = self.build().graph.input[0].type.tensor_type.elem_type
        whole = element == onnx.TensorProto.INT64
        x = rng.integers(0, 1000, self.shape) if whole else rng.standard_normal(self.shape).astype(np.float32)
        if self.classes:
            return x, rng.integers(0, self.classes, self.shape[0])
        return x, rng.random((self.shape[0], 1, *self.shape[2:])).astype(np.float32)

    def lengths(self) -> dict[str, int]:
        """Of the input's symbolic dimensions."""
        dims = self.build().graph.input[0].type.tensor_type.shape.dim
        return {d.dim_param: n for d, n in zip(dims, self.shape, strict=True) if d.dim_param}


def _cases() -> dict[str, Case]:
    from models import resnet, transformer, unet_conv_transpose, unet_resize

    encoder = partial(transformer.build, inputs=64, width=256, heads=8, layers=6)
    return {
        "U-Net ConvTranspose": Case(partial(unet_conv_transpose.build, features=32, levels=3), (4, 1, 128, 128)),
        "U-Net Resize": Case(partial(unet_resize.build, features=32, levels=3), (4, 1, 128, 128)),
        "ResNet-18": Case(partial(resnet.build, features=64), (8, 3, 64, 64), 10),
        "transformer": Case(encoder, (8, 128, 64), 5),
    }


def _write(case: Case, budget: str, path: Path) -> None:
    import onnx_backprop as ob

    loss = "softmax_cross_entropy" if case.classes else "bce_with_logits"
    options = {"memory": budget, "lengths": case.lengths()} if budget else {}
    optimizer = ob.optimizers.SGD(momentum=MOMENTUM)
    ob.training_graph(case.build(), loss=loss, optimizer=optimizer, training_mode=case.training_mode, **options).save(
        path
    )


def ours(case: Case, budget: str, threads: int) -> Callable[[], object]:
    """A step of a Trainer; the graph is made in another process, so that the memory is that of the training."""
    import onnxruntime

    import onnx_backprop as ob

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.onnx"
        process = multiprocessing.get_context("spawn").Process(target=_write, args=(case, budget, path))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"no training graph within {budget}")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        trainer = ob.Trainer(path, learning_rate=RATE, session_options=options)
    feeds = dict(zip(trainer.graph.inputs, case.batch(), strict=True))
    return lambda: trainer.step(feeds)


def pytorch(case: Case, parts: int, budget: float | None, threads: int) -> Callable[[], object]:
    """A step of PyTorch with the same network, node by node: eager in some parts, or compiled with a budget."""
    from benchmarks.torch_twin import Twin, functional, torch

    checkpoint = import_module("torch.utils.checkpoint").checkpoint

    torch.set_num_threads(threads)
    twin = Twin(case.build())
    x, target = (torch.tensor(array) for array in case.batch())
    loss_of = functional.cross_entropy if case.classes else functional.binary_cross_entropy_with_logits
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE, momentum=MOMENTUM)
    cuts = [round(n * len(twin.steps) / parts) for n in range(parts + 1)]
    stretches = [(twin.steps[a:b], {v for s in twin.steps[b:] for v in s[2]}) for a, b in pairwise(cuts)]

    def forward(image: Any) -> Any:
        values = {twin.input: image}
        for steps, later in stretches:
            kept = [s[3] for s in steps if s[3] in later or s[3] == twin.output]
            run = partial(twin.run, steps, kept)
            results = run(values) if parts == 1 else checkpoint(run, values, use_reentrant=False)
            values = {v: value for v, value in values.items() if v in later} | dict(zip(kept, results, strict=True))
        return values[twin.output]

    if budget is not None:
        config: Any = import_module("torch._functorch.config")
        config.activation_memory_budget = budget
        forward = torch.compile(forward)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(forward(x), target)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def resident() -> float:
    """MiB that the process holds; the peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> float:
    """The most MiB at once since `resident`; `ru_maxrss` of a process starts with that of the one that started it."""
    return _status("VmHWM")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def work(case: Case, contender: str, threads: int) -> None:
    """The process of a contender: numbers of steps in, a line each, their times out; at the end memory and a loss."""
    what, _, how = contender.partition(" ")
    step = {
        "ours": lambda: ours(case, how, threads),
        "checkpoint": lambda: pytorch(case, int(how), None, threads),
        "compile": lambda: pytorch(case, 1, float(how), threads),
    }[what]()
    before = _status("VmRSS")
    losses = [step()] if what == "compile" else []  # compiling takes memory of its own
    resident()
    losses += [step() for _ in range(WARM_UP - len(losses))]
    print("ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)
    print(json.dumps([peak() - before, losses[-1]]), flush=True)


def measure(arguments: list[str], contenders: list[str], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Median milliseconds, MiB and a loss of every contender that runs."""
    command = [sys.executable, "-m", "benchmarks.memory_curve", *arguments, "--work"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    rows: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    workers: dict[str, Any] = {}
    for name in contenders:
        worker: Any = subprocess.Popen([*command, name], text=True, **pipes)
        if worker.stdout.readline() != "ready\n":
            print(f"{name}: does not run")
        else:
            workers[name] = worker
    for _ in range(rounds):
        for name, worker in workers.items():
            time.sleep(0.1)  # the threads of the one before wait busily
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
            times[name] += json.loads(worker.stdout.readline())
    for name, worker in workers.items():
        worker.stdin.close()
        memory, loss = json.loads(worker.stdout.readline())
        rows[name] = {"milliseconds": 1000 * statistics.median(times[name]), "mib": memory, "loss": loss}
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=_cases(), help="one case only")
    parser.add_argument("--file", help="a classifier instead, without PyTorch")
    parser.add_argument("--shape", type=int, nargs="+", help="of its input")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--contenders", nargs="+", help="as 'ours 50%%', 'checkpoint 4', 'compile 0.5' (default: all)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of a contender in a round (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = _cases()
    if given.file:
        case = Case(partial(onnx.load, given.file), tuple(given.shape), given.classes, training_mode=True)
        cases = {given.file: case}
    if given.work:
        work(cases[given.file or given.case], given.work, given.threads)
        return
    measured: dict[str, Any] = {}
    for name in [given.case] if given.case else list(cases):
        contenders = [f"ours {budget}" for budget in BUDGETS]
        arguments = ["--case", name, "--threads", str(given.threads)]
        if given.file:
            arguments = ["--file", name, "--shape", *map(str, given.shape), "--classes", str(given.classes)]
        else:
            contenders += [f"checkpoint {n}" for n in PARTS] + [f"compile {budget}" for budget in COMPILED]
        measured[name] = measure(arguments, given.contenders or contenders, given.rounds, given.steps)
        print(f"\n{name}")
        for contender, row in measured[name].items():
            print(f"  {contender:16}{row['milliseconds']:9.1f} ms{row['mib']:8.0f} MiB   loss {row['loss']:.6g}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory_curve.json").write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
