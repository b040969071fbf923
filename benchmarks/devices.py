"""Training steps on a device beside the CPU: python -m benchmarks.devices webgpu

The networks of tests/devices, medians of the steps behind the first ones, in which kernels are compiled. Losses are
read every ten steps, so that the device does not wait; the CPU runs our native kernels. Where the device is a software
adapter the numbers say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from statistics import median

import onnx_backprop as ob
from tests.devices.networks import CASES, Case

WARM_UP, RUNS, EACH = 10, 5, 10  # steps, runs, and steps of a run


def milliseconds(case: Case, device: str) -> float:
    """Of a step."""
    trainer = ob.Trainer(case.graph(), device=device, read_every=EACH)
    (batch,) = case.batches(1)

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            trainer.step(batch)
        trainer.read_losses()
        return 1000 * (time.perf_counter() - start) / count

    steps(WARM_UP)
    return median(steps(EACH) for _ in range(RUNS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=str(__doc__).partition("\n")[0])
    parser.add_argument("device", help="one of onnx_backprop.devices()")
    parser.add_argument("--only", nargs="+", help="names of networks (default: all)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ob.OnnxBackpropWarning)  # of a decoder's cache
    print(next(str(device) for device in ob.devices() if device.name == arguments.device))
    print(f"| Network | cpu, ms | {arguments.device}, ms |\n|---|---:|---:|")
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            times = [milliseconds(case, device) for device in ("cpu", arguments.device)]
            print(f"| {case.name} | {times[0]:.2f} | {times[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
