"""Trains what `onnx-backprop compile` has written with onnxruntime and NumPy alone; this package is not imported.

python examples/plugin.py FOLDER TARGET DATA.npz [--learning-rate R] [--epochs N] [--time]

DATA.npz: an array for every input of the graph, the batches along a first axis more. Prints the loss of every step.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import onnxruntime


def _copy(array: np.ndarray) -> onnxruntime.OrtValue:
    """In memory of onnxruntime's own."""
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
    value.update_inplace(array)
    return value


class Training:
    """The state of a training and its step. Two sets of buffers: a step reads one and writes the other."""

    def __init__(self, folder: Path, library: Path, threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # hold what a run needs at a time and no more, as `Trainer` does
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.register_custom_ops_library(str(library))
        self.session = onnxruntime.InferenceSession(str(folder / "training.onnx"), options)
        initial = onnxruntime.InferenceSession(str(folder / "initial.onnx"))
        self.names = [value.name for value in initial.get_outputs()]
        arrays = dict(zip(self.names, map(np.asarray, initial.run(None, {})), strict=True))
        about = self.session.get_modelmeta().custom_metadata_map
        same = about["in_place"].split("\n")  # what a step overwrites, as the last thing that it does
        first = {name: _copy(array) for name, array in arrays.items()}
        second = {name: first[name] if name in same else _copy(array) for name, array in arrays.items()}
        outputs = [value.name for value in self.session.get_outputs()]
        self.loss, new = outputs[0], dict(zip(self.names, outputs[1:], strict=False))
        self.guard = np.ones((), np.float32)  # a step that has overwritten its state raises it
        self.bindings = []
        for read, written in ((first, second), (second, first)):
            binding = self.session.io_binding()
            for name in self.names:
                binding.bind_ortvalue_input(name, read[name])
                binding.bind_ortvalue_output(new[name], written[name])
            binding.bind_output(self.loss)
            if about["guard"]:
                binding.bind_ortvalue_input(about["guard"], onnxruntime.OrtValue.ortvalue_from_numpy(self.guard))
            self.bindings.append((binding, read))

    def step(self, feeds: dict[str, np.ndarray]) -> float:
        """One step; the loss before its update. A loss that is no finite number leaves the state as it was."""
        binding, _ = self.bindings[0]
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        self.session.run_with_iobinding(binding)
        loss = float(binding.get_outputs()[-1].numpy())
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}. Lower the learning rate")
        self.bindings.reverse()
        return loss

    def state(self) -> dict[str, np.ndarray]:
        """A copy of what the next step reads."""
        return {name: value.numpy().copy() for name, value in self.bindings[0][1].items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--time", action="store_true", help="print the median of the steps' seconds, too")
    given = parser.parse_args()
    (path,) = (given.folder / given.target).glob("onnx_backprop.*")
    training = Training(given.folder, path)
    data = dict(np.load(given.data))
    rate = {"learning_rate": np.array(given.learning_rate, np.float32)}
    seconds = []
    for _ in range(given.epochs):
        for n in range(len(next(iter(data.values())))):
            start = time.perf_counter()
            loss = training.step({name: array[n] for name, array in data.items()} | rate)
            seconds.append(time.perf_counter() - start)
            print(loss)
    if given.time:
        print(np.median(seconds))
