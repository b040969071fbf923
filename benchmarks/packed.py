"""Products with packed weights beside those with float ones, in turn: python -m benchmarks.packed [--threads 2]

Of y = x · Wᵀ, W (N, K) of 4 or 8 bits in blocks of 32: dx by the native kernel, by standard operators that unpack W in
each run, and by onnxruntime's MatMul of a constant float W; the forward by onnxruntime's MatMulNBits with
accuracy_level 0 and 4, and by that MatMul. On one thread it is processor time, which a busy machine changes least.
Medians.

Prediction: unpacking a number takes half a cycle, multiplying it with 128 rows 4, so dx takes a tenth longer than the
product of floats; with one row it takes as long as W is unpacked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob

# (rows, N, K): layers of models of 135 M and 500 M parameters, for one word, 128 and 1,024
SHAPES = [(1, 4864, 896), (16, 4864, 896), (128, 576, 576), (128, 1536, 576), (128, 576, 1536), (128, 4864, 896)]
SHAPES += [(1024, 576, 576), (1024, 1536, 576), (1024, 576, 1536), (1024, 1024, 1024)]
SIZE = 32


def options(threads: int) -> onnxruntime.SessionOptions:
    """Options of a session of its own."""
    result = onnxruntime.SessionOptions()
    result.intra_op_num_threads, result.log_severity_level = threads, 4
    return result


def model(node: NodeProto, width: int, tensors: dict[str, np.ndarray]) -> ModelProto:
    """A model of one node, which reads x (rows, width) and constants."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["rows", width]), ("y", None)))
    constants = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, 1), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y], constants), opset_imports=opsets, ir_version=10)


def contenders(rows: int, n: int, k: int, bits: int, threads: int) -> dict[str, Callable[[], object]]:
    """What computes the same, by name."""
    rng, blocks = np.random.default_rng(0), -(-k // SIZE)
    packed = {
        "w": rng.integers(0, 256, (n, blocks, SIZE * bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.02, (n, blocks)).astype(np.float32),
        "points": rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8),
    }
    floats = {"w": rng.standard_normal((n, k)).astype(np.float32)}
    sizes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": SIZE}
    node = helper.make_node("MatMulNBitsBackwardData", ["x", *packed], ["y"], domain=ob.DOMAIN, **sizes)
    models: dict[str, tuple[ModelProto, str | None, int]] = {
        f"dx, {route}": (model(node, n, packed), route, n) for route in ("native", "onnx")
    }
    models["dx, floats"] = model(helper.make_node("MatMul", ["x", "w"], ["y"]), n, floats), None, n
    for level in (0, 4):
        given = sizes | {"domain": "com.microsoft", "accuracy_level": level}
        node = helper.make_node("MatMulNBits", ["x", *packed], ["y"], **given)
        models[f"y, level {level}"] = model(node, k, packed), None, k
    across = {"w": np.ascontiguousarray(floats["w"].T)}
    models["y, floats"] = model(helper.make_node("MatMul", ["x", "w"], ["y"]), k, across), None, k
    runs: dict[str, Callable[[], object]] = {}
    for name, (one, route, width) in models.items():
        session = ob.session(one, kernels=route, session_options=options(threads))
        x = rng.standard_normal((rows, width)).astype(np.float32)
        runs[name] = lambda session=session, x=x: session.run(None, {"x": x})
    return runs


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    threads, turns = vars(parser.parse_args()).values()
    clock = time.process_time if threads == 1 else time.perf_counter
    for rows, n, k in SHAPES:
        for bits in (4, 8):
            runs = contenders(rows, n, k, bits, threads)
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(turns + 2):
                for name, run in runs.items():
                    start = clock()
                    run()
                    if turn > 1:
                        taken[name].append(clock() - start)
            times = {name: median(seconds) for name, seconds in taken.items()}
            rest = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in times.items())
            ratio = times["dx, floats"] / times["dx, native"]
            print(f"{rows} x {n} x {k}, {bits} bits: {rest} ms; dx at {ratio:.2f} times the speed of floats")


if __name__ == "__main__":
    main()
