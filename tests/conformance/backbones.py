"""The backbone networks that the onnx wheel carries, with weights: every gradient, and how long the conversion takes.

The wheel's files hold no weights but ConstantOfShape nodes; these become initializers drawn at random, scaled so that a
signal keeps its size through the layers. `python -m tests.conformance.backbones [NAME …]` converts all of them, runs the
training graph in a session and checks the gradients of the whole network by random directions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from tests.support.gradient_checks import session_run

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SMALL = ("shufflenet", "squeezenet")  # what a test run has the time for
NAMES = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
SEED = 11
LIMIT = 10.0  # seconds of one processor that a conversion may take


def backbone(name: str, seed: int = SEED) -> ModelProto:
    """A network of the wheel with weights instead of ConstantOfShape nodes."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph = model.graph
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rng = np.random.default_rng(seed)
    kept, filled = [], set()
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        (given,), (output,) = node.input, node.output
        filled.add(given)
        array = _weights(rng, tuple(int(n) for n in shapes[given]))
        graph.initializer.append(numpy_helper.from_array(array, output))
    del graph.node[:]
    graph.node.extend(kept)
    unread = filled - {input for node in kept for input in node.input}
    for values in (graph.initializer, graph.input):
        remaining = [value for value in values if value.name not in unread]
        del values[:]
        values.extend(remaining)
    names = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in names]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = 8
    inputs = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in inputs.items()}
    _normalise(model, feeds, rng)
    _calm(model, feeds)
    return model


def _normalise(model: ModelProto, feeds: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Let every channel before a Relu be 1 ± 0.25, so that few units lie at its kink, where differences say nothing.

    A BatchNormalization gets the mean and the variance of what it gets, as after training; a Conv with a Relu behind it
    is scaled and shifted so that its own are those of one. A copy that normalises by itself tells them in one run.
    """
    arrays = {tensor.name: tensor for tensor in model.graph.initializer}

    def put(name: str, array: np.ndarray) -> None:
        arrays[name].CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))

    readers = {name: node.op_type for node in model.graph.node for name in node.input}
    for node in model.graph.node:
        if node.op_type == "Unsqueeze":  # the scales and the shifts behind normalisations without their own
            length = arrays[node.input[0]].dims[0]
            near_1 = rng.uniform(0.9, 1.1, length)
            put(node.input[0], near_1 / 4 if readers[node.output[0]] == "Mul" else near_1)
    seen = ModelProto()
    seen.CopyFrom(model)
    size = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    nodes, values = [], {}
    for node in seen.graph.node:
        nodes.append(node)
        if node.op_type == "BatchNormalization":
            wanted, channels = node.input[0], size[node.input[1]]
            del node.input[1:], node.attribute[:]  # of one image, statistics of a batch are those of an instance
            node.op_type, inner = "InstanceNormalization", node
        elif node.op_type == "Conv" and readers.get(node.output[0]) == "Relu":
            inner = helper.make_node("InstanceNormalization", [f"{node.output[0]}/raw"], [node.output[0]])
            channels, node.output[0] = size[node.input[1]], f"{node.output[0]}/raw"
            wanted = node.output[0]
            nodes.append(inner)
        else:
            continue
        inside = readers.get(inner.output[0]) == "Mul"  # a scale and a shift of their own follow
        values[inner.output[0]] = (
            (0.0 if inside else 0.25) * rng.uniform(0.5, 1.5, channels).astype(np.float32) + np.float32(inside),
            np.full(channels, not inside, np.float32) + rng.uniform(-0.1, 0.1, channels).astype(np.float32),
        )
        for part, array in zip(("scale", "shift"), values[inner.output[0]], strict=True):
            seen.graph.initializer.append(numpy_helper.from_array(array, f"{inner.output[0]}/{part}"))
            inner.input.append(f"{inner.output[0]}/{part}")
        seen.graph.output.append(helper.make_tensor_value_info(wanted, TensorProto.FLOAT, None))
    del seen.graph.node[:]
    seen.graph.node.extend(nodes)
    computed = iter(session_run(seen)(feeds)[1:])
    for node in model.graph.node:
        if node.output[0] not in values:
            continue
        scale, shift = values[node.output[0]]
        value = next(computed)
        mean, variance = value.mean((0, 2, 3)), value.var((0, 2, 3))
        if node.op_type == "BatchNormalization":
            for name, array in zip(node.input[1:], (scale, shift, mean, variance), strict=True):
                put(name, array)
        else:
            factor = scale / np.sqrt(variance + np.float32(1e-5))
            weight, bias = (numpy_helper.to_array(arrays[name]) for name in node.input[1:])
            put(node.input[1], weight * factor[:, None, None, None])
            put(node.input[2], (bias - mean) * factor + shift)


def _calm(model: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Scale the last layer so that the softmax behind it does not saturate, where no gradient would be left."""
    (last,) = (node for node in model.graph.node if model.graph.output[0].name in node.output)
    if last.op_type != "Softmax":
        return
    seen = ModelProto()
    seen.CopyFrom(model)
    seen.graph.output[0].name = last.input[0]
    spread = float(session_run(seen)(feeds)[0].std())
    layer = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")][-1]
    for tensor in model.graph.initializer:
        if tensor.name in layer.input[1:]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(spread), tensor.name))


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Around 0 with a variance of 2 / fan-in."""
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 100
    return (rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / fan_in))).astype(np.float32)


def weights(model: ModelProto) -> list[str]:
    """The float initializers that the network reads, but for running statistics."""
    read = {name for node in model.graph.node for name in node.input}
    read -= {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
    return [t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and t.name in read]


@dataclass
class Outcome:
    """One network: its sizes, the seconds of the conversion, and what the check says."""

    nodes: int
    weights: int
    seconds: float
    report: ob.GradientReport

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.weights} weights, converted in {self.seconds:.1f} s, {self.report.verdict}"

    @property
    def right(self) -> bool:
        return self.report.verdict == "right" and self.seconds < LIMIT


def section(outcomes: Mapping[str, Outcome]) -> str:
    """The page's part."""
    lines = [
        "## Backbones",
        "",
        "The networks in the onnx wheel (opset 9), with random weights. The gradients of all weights are compared with "
        "differences of the whole network, or node by node if those do not settle. Each network converts in less than "
        f"{LIMIT:.0f} s.",
        "",
        "| network | nodes | weights | gradients |",
        "|---|---:|---:|---|",
        *(f"| {name} | {o.nodes} | {o.weights} | {o.report.verdict} |" for name, o in outcomes.items()),
    ]
    return "\n".join(lines) + "\n"


def examine(name: str) -> Outcome:
    """Convert a network by every weight, run the training graph as it is written, and check its gradients."""
    model = backbone(name)
    start = time.process_time()
    training = ob.backward(model)
    seconds = time.process_time() - start
    wanted = {f"{weight}_grad" for weight in weights(model)}
    missing = wanted - {value.name for value in training.graph.output}
    assert not missing, f"{name}: no gradient for {sorted(missing)[:5]}"
    report = ob.check_gradients(model, kernels="onnx", seed=SEED)
    return Outcome(len(model.graph.node), len(wanted), seconds, report)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        print(chosen, examine(chosen), flush=True)
