"""Train one file in whatever onnxruntime this interpreter has, and compare the losses. Needs numpy and onnxruntime.

    python runner.py MODEL.onnx CASE.json CASE.npz

MODEL.disabled holds the optimisers that the file is to be loaded without, as its metadata name them. Before 1.20, such
files are loaded without memory patterns too.
Prints one line of JSON: {"outcome": "trains"}, or the error, or how far the losses are off; with "seconds", the time to
load the file.
"""

import json
import sys
import time

import numpy as np
import onnxruntime

LOADS = 5


def main(model, case, arrays):
    onnxruntime.set_default_logger_severity(4)
    with open(case) as file:
        about = json.load(file)
    with np.load(arrays) as file:
        stored = dict(file)
    try:
        seconds = min(load(model)[1] for _ in range(LOADS))
        losses = train(load(model)[0], about, stored)
    except Exception as e:  # noqa: BLE001 - what old versions raise is the result
        return {"outcome": " ".join(str(e).split())}
    off = np.abs(losses - stored["losses"]) / np.abs(stored["losses"])
    outcome = "trains" if off.max() <= about["tolerance"] else f"losses off by {off.max():.1g}"
    return {"outcome": outcome, "seconds": seconds, "off": float(off.max())}


def load(model):
    old = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 20)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with open(model[: -len("onnx")] + "disabled") as file:
        disabled = file.read().split()
    options.enable_mem_pattern = not (disabled and old)
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    return session, time.perf_counter() - start


def train(session, about, stored):
    """The loss of every step; each takes what the one before has put out."""
    state = {name: stored["state/" + name] for name in about["updates"]}
    outputs = [about["loss"], *about["updates"].values()]
    losses = []
    for step in range(about["steps"]):
        feeds = {name: stored["feed/" + name][step] for name in about["inputs"]}
        feeds[about["learning_rate"]] = np.array(about["rate"], np.float32)
        feeds.update(state)
        loss, *new = session.run(outputs, feeds)
        state = dict(zip(about["updates"], new))  # noqa: B905 - also for Pythons that do not know strict
        losses.append(float(np.reshape(loss, ())))
    return np.array(losses)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
