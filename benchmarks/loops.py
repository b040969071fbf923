"""Gradients of loops: time and memory over the number of steps, and beside onnx-ad where that is installed.

    python -m benchmarks.loops            # 5 minutes on one core; pip install onnx-ad for the second table

Every number is the fastest of some runs in a session of one thread. Memory is what the process has needed at its peak
beyond what it had after a run of ten steps, one process for each number.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.converters.tables import table

WIDTH, STEPS, SEGMENT = 2000, (2500, 5000, 10000), 100
_YES = "yes = Constant <value = bool {1}> ()"
_CELL = "(int64 i, bool go, float[{n}] a) => (bool on, float[{n}] a_new)"
_SINE = "on = Identity(go) p = Mul(a, w) a_new = Sin(p)"
_LONG = f"""g (float[{WIDTH}] s, float[{WIDTH}] w, int64 m) => (float[{WIDTH}] y) {{ {_YES}
    y = Loop (m, yes, s) <body: graph = b {_CELL.format(n=WIDTH)} {{ {_SINE} }}> }}"""
# name: the graph, what to differentiate by, the range of the inputs
BESIDE: dict[str, tuple[str, str, tuple[float, float]]] = {
    "Loop, 1000 steps of 1000 numbers": (
        f"""g (float[1000] s, float[1000] w) => (float[1000] y) {{ {_YES} m = Constant <value_int = 1000> ()
        y = Loop (m, yes, s) <body: graph = b {_CELL.format(n=1000)} {{ {_SINE} }}> }}""",
        "s w",
        (1.0, 1.3),
    ),
    "Loop until a condition, as many": (
        f"""g (float[1000] s, float[1000] w) => (float[1000] y) {{ {_YES} m = Constant <value_int = 1000> ()
        least = Constant <value = float {{1e-30}}> ()
        y = Loop (m, yes, s) <body: graph = b {_CELL.format(n=1000)} {{ p = Mul(a, w) a_new = Sin(p)
        n = ReduceL2 <keepdims = 0> (a_new) on = Greater(n, least) }}> }}""",
        "s w",
        (1.0, 1.3),
    ),
    "Loop that takes row i of (1000, 64)": (
        f"""g (float[64] s, float[1000,64] x) => (float[64] y) {{ {_YES} m = Constant <value_int = 1000> ()
        y = Loop (m, yes, s) <body: graph = b {_CELL.format(n=64)} {{ on = Identity(go) v = Gather(x, i) p = Mul(a, v)
        a_new = Sin(p) }}> }}""",
        "s x",
        (1.0, 1.3),
    ),
    "Scan, recurrent cell, 200 steps of (16, 64)": (
        """g (float[16,64] s, float[200,16,32] x, float[32,64] w, float[64,64] r) => (float[200,16,64] y) {
        last, y = Scan (s, x) <num_scan_inputs = 1, body: graph = b (float[16,64] a, float[16,32] v) =>
        (float[16,64] a_new, float[16,64] u) { p = MatMul(v, w) q = MatMul(a, r) t = Add(p, q) a_new = Tanh(t)
        u = Identity(a_new) }> }""",
        "s x w r",
        (-0.2, 0.2),
    ),
    "Scan, 2000 steps of 4 numbers": (
        """g (float[4] s, float[2000,4] x, float[4] w) => (float[2000,4] y) {
        last, y = Scan (s, x) <num_scan_inputs = 1, body: graph = b (float[4] a, float[4] v) =>
        (float[4] a_new, float[4] u) { p = Mul(v, w) t = Add(p, a) a_new = Tanh(t) u = Mul(a_new, a_new) }> }""",
        "s x w",
        (-0.2, 0.2),
    ),
}


def model_of(text: str) -> ModelProto:
    """A graph in ONNX text as a model of opset 20."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """A stock session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def fastest(*calls: Callable[[], Any], runs: int = 30) -> list[float]:
    """Milliseconds of each call, the calls in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for call, durations in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            durations.append(1e3 * (time.perf_counter() - start))
    return [min(durations) for durations in times]


def one_length(steps: int, checkpoint: int) -> None:
    """Print the milliseconds and the megabytes of a gradient of so many steps."""
    run = session(ob.backward(model_of(_LONG), wrt=["s", "w"], checkpoint=checkpoint)).run
    ones = np.ones(WIDTH, np.float32)

    def call(m: int) -> Any:
        return run(["s_grad", "w_grad"], {"s": ones, "w": ones, "m": np.array(m), "y_grad": ones})

    call(10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (milliseconds,) = fastest(lambda: call(steps), runs=5)
    print(milliseconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def over_steps() -> list[str]:
    """The first table."""
    rows: list[list[str]] = []
    for checkpoint in (0, SEGMENT):
        for steps in STEPS:
            arguments = [sys.executable, "-m", "benchmarks.loops", "--length", str(steps), str(checkpoint)]
            words = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
            rows.append([str(steps), str(checkpoint or "all"), *(f"{float(x):.0f}" for x in words)])
    return table(["steps", "states stored", "ms", "MB"], rows, numbers=range(4))


def beside() -> list[str]:
    """The second table."""
    other = importlib.import_module("onnx_ad")
    rows: list[list[str]] = []
    rng = np.random.default_rng(0)
    for name, (text, wrt, (low, high)) in BESIDE.items():
        model, names = model_of(text), wrt.split()
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
        feeds = {x: rng.uniform(low, high, shape).astype(np.float32) for x, shape in shapes.items()}
        forward = session(model)
        dy = rng.uniform(-1, 1, np.asarray(forward.run(["y"], feeds)[0]).shape).astype(np.float32)
        ours, theirs = ob.backward(model, wrt=names), other.reverse(model, layout="onnx")
        mine, their = session(ours), session(theirs)
        calls = (
            lambda f=forward, x=feeds: f.run(["y"], x),
            lambda s=mine, x=feeds, d=dy, n=names: s.run([f"{one}_grad" for one in n], {**x, "y_grad": d}),
            lambda s=their, x=feeds, d=dy, n=names: s.run([f"adj_{one}" for one in n], {**x, "adj_y": d[..., None]}),
        )
        for a, b in zip(calls[1](), calls[2](), strict=True):
            want, got = np.asarray(a), np.asarray(b)
            limit = 1e-5 * max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-3, atol=limit)
        sizes = [f"{proto.ByteSize() / 1000:.1f}" for proto in (ours, theirs)]
        rows.append([name, *(f"{ms:.1f}" for ms in fastest(*calls)), *sizes])
    header = ["model", "forward ms", "ours ms", "onnx-ad ms", "ours kB", "onnx-ad kB"]
    return table(header, rows, numbers=range(1, 6))


def main() -> None:
    """Print both tables."""
    parsed = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=(__doc__ or "").split("\n")[0])
    parsed.add_argument("--length", type=int, nargs=2, metavar=("STEPS", "CHECKPOINT"), help="one number of the first")
    options = parsed.parse_args()
    if options.length:
        one_length(*options.length)
        return
    print("\n".join(over_steps()))
    print("\n".join(["", *beside()]))


if __name__ == "__main__":
    main()
