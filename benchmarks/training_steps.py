"""Whole training steps beside PyTorch: python -m benchmarks.training_steps [--only NAME …] [--rounds N] [--threads N]

Forward, loss, backward and update, with SGD with momentum and with AdamW, of every network of `benchmarks.networks`:
our Trainer beside PyTorch eager, eager with tensors in channels_last, and compiled, each with its fused optimizer.
Every contender is a process of its own, and they take turns, a pause and a step that is not counted before each, so
that a machine that slows down slows all of them. Read the ratios of the medians to the best of PyTorch; above 1 we are
faster.
Memory is the largest resident set of the process, beside the least of PyTorch. Adds what it has measured to
benchmarks/results/training_steps.json; --table prints all of that; --module does the same with
`ob.torch.module` in PyTorch's own loop, into torch_module.json; --profile prints where our steps spend their time.
Needs what `make field` installs.
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
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.networks import Network, networks

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("onnx-backprop", "PyTorch", "PyTorch channels_last", "PyTorch compiled")
MODULE = "onnx-backprop in PyTorch"  # --module: in the place of the first
OPTIMIZERS = ("SGD", "AdamW")
RATE, MOMENTUM, DECAY = 1e-6, 0.9, 0.01  # the loss stays what it is, and gradients no subnormal numbers, which are slow
PAUSE = 0.1  # seconds: threads of the last contender wait busily for some 40 ms
TURN = 0.3  # seconds that the steps of a turn take at least

Step = Callable[[], float]


def ours(network: Network, optimizer: str, threads: int) -> Step:
    """A step of a Trainer."""
    import onnx_backprop as ob

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.onnx"
        _elsewhere(_write, network, optimizer, path)
        trainer = ob.Trainer(path, learning_rate=RATE, session_options=_options(threads))
    feeds = dict(zip(trainer.graph.inputs, network.batch(), strict=True))
    return lambda: trainer.step(feeds)


def _elsewhere(write: Callable[..., None], *arguments: Any) -> None:
    """In another process, so that the memory measured is that of the training."""
    process = multiprocessing.get_context("spawn").Process(target=write, args=arguments)
    process.start()
    process.join()


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return options


def _write(network: Network, optimizer: str, path: Path) -> None:
    """And run a step, so that the kernels are compiled: that takes memory once, which no training needs."""
    import onnx_backprop as ob

    _graph(network, optimizer).save(path)
    trainer = ob.Trainer(path, learning_rate=RATE)
    trainer.step(dict(zip(trainer.graph.inputs, network.batch(), strict=True)))


def _graph(network: Network, optimizer: str) -> Any:
    import onnx_backprop as ob

    loss = "softmax_cross_entropy" if network.classes else "bce_with_logits"
    rule = ob.optimizers.SGD(momentum=MOMENTUM) if optimizer == "SGD" else ob.optimizers.AdamW(weight_decay=DECAY)
    with tempfile.TemporaryDirectory() as folder:
        forward = Path(folder) / "forward.onnx"
        network.source.write(forward, network.batch()[0])
        return ob.training_graph(forward, loss=loss, optimizer=rule)


def pytorch(network: Network, optimizer: str, threads: int, way: str) -> Step:
    """A step of PyTorch: way is "", "channels_last" or "compiled"."""
    torch: Any = import_module("torch")
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    module = _module(network, threads) if way == MODULE else network.source.module()
    x, target = (torch.tensor(array) for array in network.batch())
    if way == "channels_last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        module = module.to(memory_format=torch.channels_last)
    loss_of = (
        torch.nn.functional.cross_entropy if network.classes else torch.nn.functional.binary_cross_entropy_with_logits
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    rule = (
        torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, fused=True)
        if optimizer == "SGD"
        else torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    )
    forward = torch.compile(module) if way == "compiled" else module

    def step() -> float:
        rule.zero_grad()
        loss = loss_of(forward(x), target)
        loss.backward()
        rule.step()
        return float(loss.detach())

    return step


def _module(network: Network, threads: int) -> Any:
    """The network as a module that computes in our sessions."""
    import onnx_backprop as ob

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forward.onnx"
        _elsewhere(network.source.write, path, network.batch()[0])
        options = ob.register_ops(_options(threads))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return ob.torch.module(path, session_options=options)


def work(contender: str, name: str, optimizer: str, threads: int) -> None:
    """The process of a contender: for each line in, the times of a turn; the end of input: the memory."""
    network = networks()[name]
    if contender == CONTENDERS[0]:
        step = ours(network, optimizer, threads)
    else:
        way = contender if contender == MODULE else contender.removeprefix("PyTorch").strip()
        step = pytorch(network, optimizer, threads, way)
    losses = [step() for _ in range(3)]
    start = time.perf_counter()
    step()
    count = max(3, min(200, int(TURN / (time.perf_counter() - start))))
    print(json.dumps(losses), flush=True)
    for _ in sys.stdin:
        time.sleep(PAUSE)
        step()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), flush=True)


class Worker:
    """A contender's process."""

    def __init__(self, contender: str, name: str, optimizer: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.training_steps", "--work", contender, "--only", name]
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [*command, "--optimizers", optimizer, "--threads", str(threads)],
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

    def turn(self) -> list[float]:
        """Seconds of the steps of a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> float:
        """End it; the largest resident set in MiB."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        memory = self._answer()
        self._process.wait()
        return memory


def measure(
    name: str, optimizer: str, rounds: int, threads: int, contenders: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Median milliseconds, memory and the third loss of every contender."""
    workers = {contender: Worker(contender, name, optimizer, threads) for contender in contenders}
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in tqdm(range(rounds), desc=f"{name}, {optimizer}", unit="round", disable=not sys.stderr.isatty()):
        for contender, worker in workers.items():
            times[contender] += worker.turn()
    return {
        contender: {
            "milliseconds": 1000 * statistics.median(times[contender]),
            "memory_mib": worker.close(),
            "loss": worker.losses[-1],
        }
        for contender, worker in workers.items()
    }


def profile(name: str, optimizer: str, threads: int) -> None:
    """Print where our steps spend their time."""
    import onnx_backprop as ob
    from onnx_backprop.training.reports.profiling import profile as measured

    network = networks()[name]
    trainer = ob.Trainer(_graph(network, optimizer), session_options=_options(threads))
    timings = measured(trainer, dict(zip(trainer.graph.inputs, network.batch(), strict=True)))
    print(f"\n{name}, {optimizer}")
    for timing in timings.operators[:12]:
        print(f"  {timing.name:28}{timing.calls:6.0f}{timing.milliseconds:10.2f} ms{100 * timing.share:7.1f} %")
    for timing in timings.nodes[:12]:
        print(f"    {timing.name:80}{timing.milliseconds:8.2f} ms")


def table(rows: dict[str, dict[str, dict[str, float]]], contenders: Sequence[str]) -> str:
    """Markdown: times, the ratio of PyTorch's best to ours, and that of our memory to PyTorch's least."""
    lines = [
        "| network | optimizer | " + " | ".join(f"{c}, ms" for c in contenders) + " | times PyTorch's best"
        " | ours, MiB | PyTorch's least | ratio |",
        "|---|---|" + "---:|" * (len(contenders) + 4),
    ]
    ratios: list[float] = []
    memory: list[float] = []
    for key, row in rows.items():
        first, others = row[contenders[0]], [row[c] for c in contenders[1:]]
        least = min(other["memory_mib"] for other in others)
        ratios.append(min(other["milliseconds"] for other in others) / first["milliseconds"])
        memory.append(first["memory_mib"] / least)
        network, optimizer = key.rsplit(", ", 1)
        shown = " | ".join(f"{row[c]['milliseconds']:.3g}" for c in contenders)
        sizes = f"{first['memory_mib']:.0f} | {least:.0f} | {memory[-1]:.2f}"
        lines.append(f"| {network} | {optimizer} | {shown} | {ratios[-1]:.2f} | {sizes} |")
    means = [math.exp(statistics.mean(map(math.log, values))) for values in (ratios, memory)]
    lines.append(f"\nGeometric means: {means[0]:.2f} times PyTorch's best, {means[1]:.2f} of its memory.")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="networks whose names contain one of these")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--module", action="store_true", help="ob.torch.module in PyTorch's loop, not the Trainer")
    parser.add_argument("--eager", action="store_true", help="without what PyTorch compiles")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.only[0], given.optimizers[0], given.threads)
        return
    contenders = (MODULE, *CONTENDERS[1:]) if given.module else CONTENDERS
    contenders = contenders[:-1] if given.eager else contenders
    stem = ("torch_module" if given.module else "training_steps") + "_eager" * given.eager
    results = RESULTS / f"{stem}.json"
    rows = json.loads(results.read_text()) if results.exists() else {}
    if given.table:
        print(table(rows, contenders))
        return
    for name in networks():
        if given.only and not any(part in name for part in given.only):
            continue
        for optimizer in given.optimizers:
            if given.profile:
                profile(name, optimizer, given.threads)
                continue
            row = measure(name, optimizer, given.rounds, given.threads, contenders)
            print(f"{name}, {optimizer}: " + ", ".join(f"{c} {_shown(v)}" for c, v in row.items()), flush=True)
            rows[f"{name}, {optimizer}"] = row
            RESULTS.mkdir(exist_ok=True)
            results.write_text(json.dumps(rows, indent=1))
    if rows and not given.profile:
        print(table(rows, contenders))


def _shown(row: dict[str, float]) -> str:
    return f"{row['milliseconds']:.3g} ms {row['memory_mib']:.0f} MiB (loss {row['loss']:.6f})"


if __name__ == "__main__":
    main()
