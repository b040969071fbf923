"""The first training step, with an empty cache of compiled kernels and with a full one: python -m benchmarks.first_step

Every network is trained for one step in a process of its own, first with an empty NUMBA_CACHE_DIR and then with what
that process has left there. Printed are seconds of the processor (user and system, of its children too) and of the
clock, from the start of the process to the end of the step; the graph is made before, elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NETWORKS = ("super_resolution", "resnet", "unet_conv_transpose", "unet_resize")


def _graph(name: str) -> Any:
    import onnx_backprop as ob
    from models import resnet, super_resolution, unet_conv_transpose, unet_resize

    if name == "super_resolution":
        return super_resolution.training_graph(super_resolution.build())
    build: Any = {"resnet": resnet, "unet_conv_transpose": unet_conv_transpose, "unet_resize": unet_resize}[name].build
    sizes = {"features": 64} if name == "resnet" else {"features": 32, "levels": 3}
    loss = "softmax_cross_entropy" if name == "resnet" else "bce_with_logits"
    return ob.training_graph(build(**sizes), loss=loss, optimizer=ob.optimizers.SGD(momentum=0.9))


def _batch(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    if name == "super_resolution":
        shapes = (8, 1, 20, 20), (8, 1, 40, 40)
    elif name == "resnet":
        return [rng.standard_normal((8, 3, 64, 64)).astype(np.float32), rng.integers(0, 10, 8)]
    else:
        shapes = (4, 1, 128, 128), (4, 1, 128, 128)
    return [rng.random(shape).astype(np.float32) for shape in shapes]


def step(name: str, path: str) -> None:
    """In a process of its own: one step, its time and its loss."""
    import onnx_backprop as ob

    trainer = ob.Trainer(path, learning_rate=1e-3)
    loss = trainer.step(dict(zip(trainer.graph.inputs, _batch(name), strict=True)))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"processor": sum(u.ru_utime + u.ru_stime for u in used), "loss": loss}))


def _measured(name: str, path: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds of the processor, of the clock, loss)."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.first_step", "--step", str(path), name]
    result = subprocess.run(
        command, env={**os.environ, "NUMBA_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - start
    answer = json.loads(result.stdout)
    return answer["processor"], seconds, answer["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_step", description="The first training step, timed."
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"some of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--step", metavar="GRAPH", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        step(given.networks[0], given.step)
        return
    print(f"{'seconds':24}{'empty cache':>20}{'full cache':>20}")
    print(f"{'':24}" + 2 * f"{'processor':>12}{'clock':>8}")
    for name in given.networks or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "training.onnx"
            _graph(name).save(path)
            runs = [_measured(name, path, Path(folder) / "cache") for _ in range(2)]
        times = "".join(f"{processor:12.1f}{clock:8.1f}" for processor, clock, _ in runs)
        print(f"{name:24}{times}    loss {runs[0][2]:.9g}", flush=True)


if __name__ == "__main__":
    main()
