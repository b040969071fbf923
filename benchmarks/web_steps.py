"""A training step in wasm beside the route "onnx" in Python, one thread each, as the table of docs/web.md.

python -m benchmarks.web_steps
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

import onnx_backprop as ob
from onnx_backprop.web.site import write_site
from tests.onnx_backprop.web import javascript
from tests.onnx_backprop.web.javascript import CASES

RATE, STEPS, COMPARED = 1e-3, 600, 20


def main() -> None:
    """Print the rows of the table."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for name, case in CASES.items():
        rows = case.rows(np.random.default_rng(1))
        count = len(rows["image"])
        graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw", inline=True)
        trainer = ob.Trainer(graph, learning_rate=RATE, kernels=None, session_options=options)
        losses, times = [], []
        for step in range(STEPS):
            first = step * case.batch % count
            batch = {n: array[first : first + case.batch] for n, array in rows.items()}
            start = time.perf_counter()
            losses.append(trainer.step(batch))
            times.append(1000 * (time.perf_counter() - start))
        with tempfile.TemporaryDirectory() as folder:
            about = {"train": count, "title": name, "batch": case.batch, "learning_rate": RATE}
            size = write_site(Path(folder), graph, rows, **about)["model/training.onnx"]
            result = javascript.steps(Path(folder), STEPS)
        python, wasm = (min(all_[-100:]) for all_ in (times, result["times"]))
        worst = max(abs(a / b - 1) for a, b in zip(result["losses"][:COMPARED], losses[:COMPARED], strict=True))
        print(
            f"| {name} | {python:.1f} | {wasm:.1f} | {wasm / python:.1f} | {size / 1000:.0f} | {worst:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
