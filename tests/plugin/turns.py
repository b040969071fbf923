"""A contender's process: for each line in, seconds of processor time of the steps of a turn, least and median.

python tests/plugin/turns.py (library FOLDER TARGET | trainer FOLDER) DATA.npz; "library" imports nothing of this package.
"""

import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

STEPS = 3
THREADS = 1  # those that wait for another count as work


def library(folder: str, target: str) -> Callable[[dict[str, np.ndarray]], float]:
    (path,) = (Path(folder) / target).glob("onnx_backprop.*")
    train = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "plugin.py"))["Training"]
    training, rate = train(Path(folder), path, threads=THREADS), np.array(1e-6, np.float32)
    return lambda batch: training.step({**batch, "learning_rate": rate})


def trainer(folder: str) -> Callable[[dict[str, np.ndarray]], float]:
    import onnxruntime

    import onnx_backprop as ob

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = THREADS
    return ob.Trainer(Path(folder) / "graph.onnx", learning_rate=1e-6, session_options=options).step


if __name__ == "__main__":
    kind, *arguments, data = sys.argv[1:]
    step = {"library": library, "trainer": trainer}[kind](*arguments)
    batch = {name: array[0] for name, array in np.load(data).items()}
    losses = [step(batch) for _ in range(3)]
    print(json.dumps(losses), flush=True)
    for _ in sys.stdin:
        step(batch)
        seconds = []
        for _ in range(STEPS):
            start = time.process_time()
            step(batch)
            seconds.append(time.process_time() - start)
        print(json.dumps([min(seconds), statistics.median(seconds)]), flush=True)
