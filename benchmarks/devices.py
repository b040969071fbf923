"""Training steps on a device beside the CPU: python -m benchmarks.devices webgpu [--large]

The networks of tests/devices, medians of the steps behind the first ones, in which kernels are compiled. Losses are
read every ten steps, so that the device does not wait; the CPU runs our native kernels. Where the device is a software
adapter the numbers say nothing of a GPU.
--large: the networks of `benchmarks.networks` instead, in batches eight times as large, beside PyTorch eager on CUDA
where it is there, both in float32 without TF32, with SGD with momentum; needs what `make field` installs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import onnx_backprop as ob
from benchmarks.networks import Network, networks
from benchmarks.training_steps import MOMENTUM, RATE, _graph
from tests.devices.networks import CASES, Case

WARM_UP, RUNS, EACH = 10, 5, 10  # steps, runs, and steps of a run
LARGER = 8  # batches of --large, beside those of the CPU


def milliseconds(steps: Callable[[int], None]) -> float:
    """Of a step."""
    steps(WARM_UP)

    def run() -> float:
        start = time.perf_counter()
        steps(EACH)
        return 1000 * (time.perf_counter() - start) / EACH

    return median(run() for _ in range(RUNS))


def trained(graph: ob.TrainingGraph, batch: dict[str, Any], device: str) -> Callable[[int], None]:
    """So many steps of a Trainer."""
    trainer = ob.Trainer(graph, device=device, learning_rate=RATE, read_every=EACH)

    def steps(count: int) -> None:
        for _ in range(count):
            trainer.step(batch)
        trainer.read_losses()

    return steps


def of_pytorch(network: Network) -> Callable[[int], None]:
    """So many steps of PyTorch eager on CUDA."""
    torch: Any = import_module("torch")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    module = network.source.module().cuda()
    if constants := getattr(module, "constants", None):
        module.constants = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in constants.items()}
    x, target = (torch.tensor(array).cuda() for array in network.batch())
    functional = torch.nn.functional
    loss_of = functional.cross_entropy if network.classes else functional.binary_cross_entropy_with_logits
    rule = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)

    def steps(count: int) -> None:
        for _ in range(count):
            rule.zero_grad()
            loss_of(module(x), target).backward()
            rule.step()
        torch.cuda.synchronize()

    return steps


def _small(case: Case, device: str) -> str:
    (batch,) = case.batches(1)
    times = [milliseconds(trained(case.graph(), batch, place)) for place in ("cpu", device)]
    return " | ".join(f"{t:.2f}" for t in times)


def _large(network: Network, device: str) -> str:
    torch: Any = import_module("torch")
    network = replace(network, shape=(LARGER * network.shape[0], *network.shape[1:]))
    graph = _graph(network, "SGD")
    ours = milliseconds(trained(graph, dict(zip(graph.inputs, network.batch(), strict=True)), device))
    theirs = milliseconds(of_pytorch(network)) if torch.cuda.is_available() else float("nan")
    return f"{theirs:.2f} | {ours:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=str(__doc__).partition("\n")[0])
    parser.add_argument("device", help="one of onnx_backprop.devices()")
    parser.add_argument("--only", nargs="+", help="names of networks (default: all)")
    parser.add_argument("--large", action="store_true", help="networks of their usual size, beside PyTorch on CUDA")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ob.OnnxBackpropWarning)  # of a decoder's cache
    print(next(str(device) for device in ob.devices() if device.name == arguments.device))
    print(f"| Network | {'PyTorch' if arguments.large else 'cpu'}, ms | {arguments.device}, ms |\n|---|---:|---:|")
    cases: dict[str, Any] = networks() if arguments.large else {case.name: case for case in CASES}
    for name, case in cases.items():
        if not arguments.only or name in arguments.only:
            times = (_large if arguments.large else _small)(case, arguments.device)
            print(f"| {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
