"""Updates alone, beside the time that their bytes need: python -m benchmarks.updates

The tensors of a ResNet-18 (11 M numbers) and of a BERT of base size (110 M), every optimizer, two threads. An update in
place reads value, gradient and state and writes value and state; a copy by two threads of arrays of the same size tells
how many bytes pass in a second. Copy and updates take turns; medians, and the ratio of the update to its bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
import onnx_ir as ir
import onnxruntime

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSProp
from onnx_backprop.converters.training.update.step import optimizer_graph

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": SGD(),
    "SGD with momentum": SGD(momentum=0.9),
    "Adam": Adam(),
    "AdamW": AdamW(),
    "RMSProp": RMSProp(),
    "Adagrad": Adagrad(),
    "Lion": Lion(),
}
PAUSE = 0.1  # seconds: threads of the last contender wait busily for some 40 ms


def resnet18() -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, inside, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and inside != width:
                shapes += [(width, inside, 1, 1), (width,), (width,)]
            inside = width
    return [*shapes, (512, 1000), (1000,)]


def bert() -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    shapes: list[tuple[int, ...]] = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    for _ in range(12):
        shapes += [(768, 768), (768,)] * 4 + [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,), (768,), (768,)]
    return shapes


def timed(run: Callable[[], object]) -> float:
    """Seconds of a run, after a pause and a run that is not counted."""
    time.sleep(PAUSE)
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def updating(optimizer: Optimizer, shapes: list[tuple[int, ...]]) -> tuple[Callable[[], object], int]:
    """A function that updates in place, and the bytes that pass."""
    model = optimizer_graph(optimizer, {f"p{n}": (ir.DataType.FLOAT, shape) for n, shape in enumerate(shapes)})
    session = ob.session(model)
    binding, moved = session.io_binding(), 0
    defaults = {tensor.name for tensor in model.graph.initializer}
    values = {}
    for value in session.get_inputs():
        if value.name in defaults:
            continue
        kind = np.int64 if "int64" in value.type else np.float32
        values[value.name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(value.shape, 1, kind))
        binding.bind_ortvalue_input(value.name, values[value.name])
        moved += values[value.name].tensor_size_in_bytes()
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, values[output.name.removesuffix("_new")])
        moved += values[output.name.removesuffix("_new")].tensor_size_in_bytes()
    return lambda: session.run_with_iobinding(binding), moved


def copying(count: int) -> tuple[Callable[[], object], int]:
    """A function that copies so many float32 by two threads, and the bytes that pass."""
    source, target = np.ones(count, np.float32), np.empty(count, np.float32)
    halves = [(target[: count // 2], source[: count // 2]), (target[count // 2 :], source[count // 2 :])]
    pool = ThreadPoolExecutor(2)
    return lambda: list(pool.map(lambda pair: np.copyto(*pair), halves)), 2 * source.nbytes


def main() -> None:
    """Print a table of each size."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for title, shapes in (("ResNet-18", resnet18()), ("BERT base", bert())):
        count = sum(int(np.prod(shape)) for shape in shapes)
        print(f"{title}, {count / 1e6:.1f} M numbers in {len(shapes)} tensors\n")
        print("| optimizer | ms | of which its bytes | ratio |\n|---|---:|---:|---:|")
        for name, optimizer in OPTIMIZERS.items():
            (update, moved), (copy, copied) = updating(optimizer, shapes), copying(count)
            turns = [(timed(update), timed(copy)) for _ in range(rounds)]
            taken, needed = median(t for t, _ in turns), median(t for _, t in turns) * moved / copied
            print(f"| {name} | {1e3 * taken:.2f} | {1e3 * needed:.2f} | {taken / needed:.2f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
