"""Memory and time of the last product of a language model and its loss: blocks of rows, the plain graph, and PyTorch.

    python -m benchmarks.linear_cross_entropy --rows 1024 --classes 49152 --width 576

Each contender runs in a process of its own on one thread: processor seconds of a forward and backward pass, the least
of some, and how much the process has grown by at its peak above what it held before the first. `frozen`: gradients by
the hidden states alone, as LoRA asks for them.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.memory_curve import peak, resident

CONTENDERS = ("blocks", "plain", "torch")


def main() -> None:
    """Print a table; with --contender, the figures of one as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 1024), ("classes", 49152), ("width", 576), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has PyTorch")
    arguments = parser.parse_args()
    if arguments.contender:
        print(json.dumps(measure(arguments)))
        return
    for contender in CONTENDERS:
        python = arguments.torch_python if contender == "torch" else sys.executable
        command = [python, "-m", "benchmarks.linear_cross_entropy", *sys.argv[1:], "--contender", contender]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{contender:8} {row['seconds']:7.2f} s of processor {row['megabytes']:7.0f} MB  loss {row['loss']}")


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds, megabytes and the loss of one contender."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, arguments.rows, arguments.width), np.float32)
    w = rng.standard_normal((arguments.classes, arguments.width), np.float32) * np.float32(0.05)
    labels = rng.integers(0, arguments.classes, (1, arguments.rows))
    if arguments.contender == "torch":
        run = in_torch(x, w, labels, frozen=arguments.frozen)
    else:
        run = in_onnx(x, w, labels, blocks=arguments.contender == "blocks", frozen=arguments.frozen)
    del w
    before = resident()
    times: list[float] = []
    loss = 0.0
    for _ in range(arguments.repeats):
        start = time.process_time()
        loss = run()
        times.append(time.process_time() - start)
    return {"seconds": min(times), "megabytes": peak() - before, "loss": loss}


def in_onnx(x: np.ndarray, w: np.ndarray, labels: np.ndarray, *, blocks: bool, frozen: bool) -> Callable[[], float]:
    """The training graph of a model of one product by a transposed matrix."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    import onnx_backprop as ob
    from onnx_backprop.converters.training.slots import PARAMETER, Slot
    from onnx_backprop.converters.training.split import step_alone
    from onnx_backprop.ort_ops import default_options, session

    width, classes = x.shape[-1], w.shape[0]
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "wt"], ["y"], name="head"),
        ],
        "head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "time", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "time", classes])],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    loss = ob.losses.NextToken(shift=False, block_rows=None if blocks else 0)
    if frozen:
        converted = ob.training_graph(model, loss=loss, trainable=["x"])
    else:
        converted = ob.training_graph(model, loss=loss, wrt_inputs=["x"])
    del model, graph
    slots = tuple(Slot(name, output, PARAMETER) for name, output in converted.parameters.items())
    alone = step_alone(replace(converted, state=slots), converted.model)  # without the logits
    options = default_options(python_operators=False, lean=True, threads=1)
    runner = session(alone, session_options=options)
    del alone
    feeds = {"x": x, "labels": labels}
    names = [output.name for output in runner.get_outputs()]
    binding = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    return lambda: float(runner.run_with_ort_values(names, binding)[0].numpy())


def in_torch(x: np.ndarray, w: np.ndarray, labels: np.ndarray, *, frozen: bool) -> Callable[[], float]:
    """PyTorch's linear and cross_entropy."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    hidden, matrix = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=not frozen)
    target = torch.tensor(labels).reshape(-1)

    def run() -> float:
        hidden.grad = matrix.grad = None
        logits = torch.nn.functional.linear(hidden, matrix)
        loss = torch.nn.functional.cross_entropy(logits.reshape(len(target), -1), target)
        loss.backward()
        return loss.item()

    return run


if __name__ == "__main__":
    main()
