"""Derivatives of four surrogates in CasADi: families of `ob.family`, those of onnx-ad, and CasADi's own differences.

    pip install casadi==3.8.2 onnx-ad && python -m benchmarks.casadi_families

Microseconds of processor time of a call on one core, least of three alternating runs; the largest errors of ours and
of the differences, beside CasADi's derivatives of the same formula.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnx_backprop as ob
from tests.doors.surrogates import KINDS, build, symbolic

CALLS = ("jacobian", "gradient", "product", "hessian")


def functions(f: Callable[[Any], Any], size: tuple[int, int], casadi: Any) -> dict[str, Any]:
    """The Jacobian; the gradient, a product with the Hessian and the Hessian of a weighted sum of the outputs."""
    x, direction = casadi.MX.sym("x", *size), casadi.MX.sym("d", *size)
    y = f(x)
    seed = casadi.MX.sym("w", *y.shape)
    gradient = casadi.gradient(casadi.dot(seed, y), x)
    results = {
        "jacobian": casadi.jacobian(y, x),
        "gradient": gradient,
        "product": casadi.jtimes(gradient, x, direction),
        "hessian": casadi.jacobian(gradient, x),
    }
    return {name: casadi.Function(name, [x, seed, direction], [result]) for name, result in results.items()}


def seconds(call: Callable[[], Any], times: int) -> float:
    """Of the processor, for one call; a tenth of the times of what takes long."""
    began = time.perf_counter()
    call()
    times = times if time.perf_counter() - began < 0.02 else max(1, times // 10)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(times):
        call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / times


def main() -> None:
    """A table."""
    parser = argparse.ArgumentParser(description="Derivatives in CasADi.")
    parser.add_argument("--times", type=int, default=50)
    times = parser.parse_args().times
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [0])  # onnxruntime's threads would spin, which counts
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*"))
    os.environ.setdefault("CASADI_ONNXRUNTIME_LIB", str(library))
    casadi, onnx_ad = import_module("casadi"), import_module("onnx_ad")
    print(f"{'surrogate':16}{'':10}{'ours':>8}{'onnx-ad':>9}{'differences':>13}   error of ours, of differences")
    for kind in KINDS:
        for dtype in (np.float64, np.float32):
            with tempfile.TemporaryDirectory() as folder:
                paths = [Path(folder, who, "f.onnx") for who in ("ours", "onnx-ad", "differences")]
                for path in paths:
                    path.parent.mkdir()
                ob.family(build(kind, dtype), paths[0])
                model = onnx.load(paths[0])  # in float64 without Conv and LSTM, as onnxruntime wants it
                onnx_ad.family(model, str(paths[1]), forward_sibling=True)
                onnx.save(model, paths[2])
                opened = [
                    casadi.GraphBuilder(str(path)).create("f", {"enable_fd": path.parent.name == "differences"})
                    for path in paths
                ]
                size = opened[0].size_in(0)
                contenders = [functions(f, size, casadi) for f in opened]
                truth = functions(lambda x, kind=kind: symbolic(kind, x, casadi), size, casadi)
                rng = np.random.default_rng(0)
                values = [rng.uniform(-1, 1, shape) for shape in (size, opened[0].size_out(0), size)]
                for name in CALLS:
                    calls = [partial(one[name], *values) for one in contenders]
                    runs = [[seconds(call, times) for call in calls] for _ in range(3)]
                    best = [1e6 * min(column) for column in zip(*runs, strict=True)]
                    errors = [
                        np.abs(np.array(one[name](*values)) - np.array(truth[name](*values))).max()
                        for one in contenders
                    ]
                    label = f"{kind} {dtype.__name__}" if name == CALLS[0] else ""
                    row = f"{label:16}{name:10}{best[0]:8.0f}{best[1]:9.0f}{best[2]:13.0f}"
                    print(f"{row}   {errors[0]:.0e}  {errors[2]:.0e}", flush=True)


if __name__ == "__main__":
    main()
