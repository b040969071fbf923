"""What several ranks cost: python -m benchmarks.scaling_out [--ranks N …] [--network NAME] [--rows N] [--steps N]

Each rank has as many rows, one thread, and a network of 10 Gbit/s that is emulated; ways to sum take turns in one run.
A step is that of the rank that is last. What a sum costs beyond the backward pass is the wait of the rank that waits
least, as the others wait for that one too. Medians, and the least. Then the same from the model of docs/distributed.md,

    done_k = max(ready_k, done_{k-1}) + t_sum(bytes_k),   exposed = done - t_gradients

with the times at which buckets are ready as they were measured. --predict prints that model for many nodes of
25 Gbit/s, with the update and the time of adding up too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any, cast

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob
from benchmarks.emulated_network import LATENCY, TEN_GIGABIT, EmulatedNetwork
from models import resnet
from models.graphs import Network, Value
from onnx_backprop.distributed import Communicator, Shard
from onnx_backprop.distributed.mpi import world
from onnx_backprop.distributed.overlap import Overlap
from onnx_backprop.distributed.replica import Replica

WAYS = {"behind": {"overlap": False}, "beside": {}, "beside, update sharded": {"shard_update": True}}
NODES = (8, 16, 32, 64, 128, 256)
TWENTY_FIVE_GIGABIT = 2.6e9  # bytes a second of TCP to and from a node, an assumption
MESSAGE = 50e-6  # seconds of a message between two nodes, an assumption


def resnet_50() -> ModelProto:
    """ResNet-50: image (N, 3, H, W) -> logits (N, 1000); He et al., CVPR 2016, without the first max pool."""
    net = Network("resnet_50", seed=0)
    x = net.relu(net.batch_norm(net.conv(net.input("image", 3), 64, kernel=7, stride=4, bias=False)))
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            x = _bottleneck(net, x, 64 << stage, stride=2 if stage and not block else 1)
    return net.model("logits", net.classify(x, 1000), size=())


def _bottleneck(net: Network, x: Value, features: int, *, stride: int) -> Value:
    y = net.relu(net.batch_norm(net.conv(x, features, kernel=1, bias=False)))
    y = net.relu(net.batch_norm(net.conv(y, features, kernel=3, stride=stride, bias=False)))
    y = net.batch_norm(net.conv(y, 4 * features, kernel=1, bias=False))
    if stride != 1 or x.channels != 4 * features:
        x = net.batch_norm(net.conv(x, 4 * features, kernel=1, stride=stride, bias=False))
    return net.relu(net.add(x, y))


NETWORKS = {"ResNet-18": (lambda: resnet.build(features=64), 32, 10), "ResNet-50": (resnet_50, 64, 1000)}


@dataclass
class Measured:
    """Of one way, in seconds: by steps, of all ranks together."""

    way: str
    step: list[float]
    gradients: list[float]
    exposed: list[float]
    update: list[float]
    exchange: list[float]
    bytes: int  # of the gradients
    buckets: list[int]  # bytes
    ready: list[float]  # when each was, as a part of the gradients' time


class _Timed:
    """A trainer on an emulated network, and when its parts began and ended."""

    def __init__(self, graph: ob.TrainingGraph, network: EmulatedNetwork, way: str) -> None:
        self.network, self.way = network, way
        options = cast(dict[str, Any], WAYS[way])
        self.trainer = ob.Trainer(graph, learning_rate=1e-3, communicator=network, verify_every=0, **options)
        ranks, self.ready = self.trainer._ranks, list[float]()
        self.replica = None if ranks is None else ranks.replica
        self._inside = self._gradients = 0.0  # seconds in the replica, and of them beside sums
        if self.replica is not None:
            self._watch_replica(self.replica)

    def _watch_replica(self, replica: Replica) -> None:
        if replica.overlap is not None:
            self._watch(replica.overlap)
        whole = replica.step

        def step(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = whole(*arguments)
            self._inside = time.perf_counter() - start
            return result

        setattr(replica, "step", step)  # noqa: B010 - pyright takes it for an override

    def _watch(self, overlap: Overlap) -> None:
        begin, start, finish = overlap.begin, overlap._start, overlap.finish
        began = [0.0]

        def watched_begin(*arguments: Any, **more: Any) -> None:
            began[0] = time.perf_counter()
            self.ready.clear()
            begin(*arguments, **more)

        def watched_start(array: np.ndarray) -> Any:
            self.ready.append(time.perf_counter() - began[0])
            return start(array)

        def watched_finish() -> None:
            self._gradients = time.perf_counter() - began[0]
            finish()

        overlap.begin, overlap._start, overlap.finish = watched_begin, watched_start, watched_finish

    def step(self, batch: Shard) -> tuple[float, ...]:
        """Seconds of a step, of the gradients, of the wait for their sum, of the update, of the exchange of weights."""
        overlap, network = None if self.replica is None else self.replica.overlap, self.network
        waited, summed, gathered = 0.0 if overlap is None else overlap.waited, network.summed, network.gathered
        start = time.perf_counter()
        self.trainer.step(batch)
        took = time.perf_counter() - start
        wait = network.summed - summed if overlap is None else overlap.waited - waited
        exchange = network.gathered - gathered
        gradients = self._inside - wait if overlap is None else self._gradients
        return took, gradients, wait, took - self._inside - exchange, exchange


def measure(engine: Communicator, name: str, rows: int, steps: int) -> list[Measured]:
    """All ways in turn, on every rank."""
    build, size, classes = NETWORKS[name]
    graph = ob.training_graph(build(), loss="softmax_cross_entropy", optimizer="adamw")
    rng = np.random.default_rng(engine.rank)
    image = rng.standard_normal((rows, 3, size, size)).astype(np.float32)
    batch = Shard(image=image, labels=rng.integers(0, classes, rows))
    timed = []
    for way in WAYS if engine.size > 1 else ["behind"]:
        network = EmulatedNetwork(engine, TEN_GIGABIT)
        network.threads = 1
        timed.append(_Timed(graph, network, way))
        timed[-1].step(batch)  # compiles, and is not one of those that are measured
        timed[-1].step(batch)
    seconds: dict[str, list[np.ndarray]] = {one.way: [] for one in timed}
    ready: dict[str, list[list[float]]] = {one.way: [] for one in timed}
    for _ in range(steps):
        for one in timed:
            engine.barrier()
            took = np.zeros((engine.size, 5))
            took[engine.rank] = one.step(batch)
            engine.sum(took)
            seconds[one.way].append(took)
            ready[one.way].append([at / took[engine.rank, 1] for at in one.ready])
    result = []
    for one in timed:
        parts = np.array(seconds[one.way])
        buffer = None if one.replica is None else one.replica._buffer
        sizes = [] if buffer is None else [bucket.nbytes for bucket in buffer.buckets]
        shares = [statistics.median(share) for share in zip(*ready[one.way], strict=True)][: len(sizes)]
        result.append(
            Measured(
                one.way,
                parts[:, :, 0].max(axis=1).tolist(),
                parts[:, :, 1].max(axis=1).tolist(),
                parts[:, :, 2].min(axis=1).tolist(),
                parts[:, :, 3].min(axis=1).tolist(),
                parts[:, :, 4].min(axis=1).tolist(),
                0 if buffer is None else sum(array.nbytes for array in buffer._gradients()),
                sizes,
                shares,
            )
        )
    return result


def adding_up() -> float:
    """Seconds of a byte of one array that is added to another: what a rank does with those that come to it."""
    array, other = np.zeros(2**23, np.float32), np.ones(2**23, np.float32)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        array += other
        best = min(best, time.perf_counter() - start)
    return best / array.nbytes


def sum_seconds(size: float, ranks: int, rate: float, message: float, reduction: float) -> float:
    """2·⌈log₂ N⌉ messages, 2·(N - 1)/N of the bytes over the link, (N - 1)/N of them added up."""
    part = (ranks - 1) / ranks
    return 2 * ceil(log2(ranks)) * message + part * size * (2 / rate + reduction)


def exposed(gradients: float, buckets: Sequence[float], ready: Sequence[float]) -> float:
    """What of sums that take so long, each begun when its bucket is ready, is left behind the gradients."""
    done = 0.0
    for share, took in zip(ready, buckets, strict=True):
        done = max(done, min(share, 1.0) * gradients) + took
    return max(0.0, done - gradients)


def table(engine: Communicator, name: str, rows: int, results: list[Measured]) -> list[str]:
    lines = []
    for one in results:
        if engine.size == 1:
            step = f"{1e3 * statistics.median(one.step):.0f} ({1e3 * min(one.step):.0f})"
            lines.append(f"| {name}, {rows} rows | 1 | | {step} | | | | | | |")
            continue
        transfer = one.bytes / TEN_GIGABIT
        parts = [one.step, one.gradients, one.exposed, one.update, one.exchange]
        cells = [f"{1e3 * statistics.median(part):.0f} ({1e3 * min(part):.0f})" for part in parts]
        left = [f"{100 * share / transfer:.0f}" for share in (statistics.median(one.exposed), min(one.exposed))]
        whole = [LATENCY + size / TEN_GIGABIT for size in one.buckets]
        model = exposed(statistics.median(one.gradients), whole, one.ready) if whole else LATENCY + transfer
        cells += [f"{left[0]} ({left[1]})", f"{1e3 * model:.1f}"]
        lines.append(f"| {name}, {rows} rows | {engine.size} | {one.way} | {' | '.join(cells)} |")
    return lines


HEAD = (
    "| network, rows of a rank | ranks | sums | step, ms | gradients | exposed | update | exchange "
    "| exposed, % of the transfer | exposed by the model, ms |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def worker(arguments: argparse.Namespace) -> None:
    engine = world()
    results = measure(engine, arguments.network, arguments.rows, arguments.steps)
    if engine.rank == 0:
        print("\n".join(table(engine, arguments.network, arguments.rows, results)))
        if arguments.output:
            measured = {"adding_up": adding_up(), "ways": [asdict(one) for one in results]}
            Path(arguments.output).write_text(json.dumps(measured))


def predict(measured: dict[str, Any], computes: Sequence[float] = (0.05, 0.1, 0.25, 1.0)) -> list[str]:
    """Rows a second of many nodes, in percent of that many times one node's, by the seconds that gradients take."""
    ways = {way["way"]: Measured(**way) for way in measured["ways"]}
    beside, reduction = ways["beside"], measured["adding_up"]
    update = min(ways["behind"].update)
    lines = [
        f"<!-- {beside.bytes / 1e6:.0f} MB in {len(beside.buckets)} buckets, update {1e3 * update:.0f} ms, "
        f"{1 / reduction / 1e9:.1f} GB/s added up -->",
        f"| gradients, s | sums | {' | '.join(f'{nodes} nodes' for nodes in NODES)} |",
        f"|---|---|{'---|' * len(NODES)}",
    ]
    for compute in computes:
        rows: dict[str, list[str]] = {}
        for nodes in NODES:

            def sums(size: float, nodes: int = nodes) -> float:
                return sum_seconds(size, nodes, TWENTY_FIVE_GIGABIT, MESSAGE, reduction)

            gather = ceil(log2(nodes)) * MESSAGE + (nodes - 1) / nodes * beside.bytes / TWENTY_FIVE_GIGABIT
            left = exposed(compute, [sums(size) for size in beside.buckets], beside.ready)
            steps = {
                "behind": compute + sums(beside.bytes) + update,
                "beside": compute + left + update,
                "beside, update sharded": compute + left + update / nodes + gather,
            }
            for way, step in steps.items():
                rows.setdefault(way, []).append(f"{100 * (compute + update) / step:.0f}")
        lines += [f"| {compute:g} | {way} | {' | '.join(cells)} |" for way, cells in rows.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_out", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(%(default)s)")
    parser.add_argument("--network", choices=list(NETWORKS), default="ResNet-18", help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of a rank (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="that are measured (%(default)s)")
    parser.add_argument("--predict", action="store_true", help="the model for many nodes, from the last of the ranks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    print("\n".join(HEAD))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        for ranks in arguments.ranks:
            options = (
                f"--worker --network {arguments.network} --rows {arguments.rows} --steps {arguments.steps}".split()
            )
            launcher = shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or "mpiexec"
            command = [launcher, "-n", str(ranks), sys.executable, "-m", "benchmarks.scaling_out"]
            subprocess.run([*command, *options, "--output", str(path)], check=True)
        if arguments.predict:
            print("\n".join(predict(json.loads(path.read_text()))))


if __name__ == "__main__":
    main()
