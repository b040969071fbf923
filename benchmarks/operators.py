"""Times the operators of the domain in onnxruntime sessions: `python -m benchmarks.operators`.

One row an operator and shape: median, fastest and slowest of the counted runs, in milliseconds, through
`session.run`, feeding and fetching included. The rows take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob

# batch, source channels, destination channels, length of a square image, kernel, stride, pad
CONVOLUTIONS = ((8, 64, 64, 56, 3, 1, 1), (8, 256, 64, 56, 1, 1, 0), (8, 128, 128, 56, 3, 2, 1))
# batch, channels, source length, destination length
INTERPOLATIONS = ((8, 64, 64, 128), (8, 64, 128, 64))

Work = tuple[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the operators of the domain.")
    parser.add_argument("--kernels", default="numpy", help="kernel route to time (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each row (default: %(default)s)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    works = [*_convolutions(arguments.kernels, rng), *_interpolations(arguments.kernels, rng)]
    times: dict[str, list[float]] = {name: [] for name, _ in works}
    for turn in range(arguments.runs + 1):
        for name, run in works:
            start = time.perf_counter()
            run()
            if turn:  # the first is a warm-up
                times[name].append(1e3 * (time.perf_counter() - start))
    print(f"{'':62}{'median':>9}{'min':>9}{'max':>9}   ms, kernels={arguments.kernels}")
    for name, values in times.items():
        print(f"{name:62}{statistics.median(values):9.1f}{min(values):9.1f}{max(values):9.1f}")


def _convolutions(kernels: str, rng: np.random.Generator) -> list[Work]:
    works: list[Work] = []
    for n, c, d, length, k, stride, pad in CONVOLUTIONS:
        out = (length + 2 * pad - k) // stride + 1
        x, w, dy = (
            rng.standard_normal(shape, np.float32) for shape in ((n, c, length, length), (d, c, k, k), (n, d, out, out))
        )
        common: dict[str, object] = {
            "strides": [stride] * 2,
            "dilations": [1, 1],
            "pads_begin": [pad] * 2,
            "pads_end": [pad] * 2,
            "data_format": "NCX",
            "weights_format": "OIX",
        }
        shape = f"N{n} C{c} O{d} {length}² k{k} s{stride} p{pad}"
        for op_type, inputs, wanted in (
            ("ConvolutionBackwardData", {"diff_dst": dy, "weights": w}, {"dst_shape": x.shape}),
            ("ConvolutionBackwardWeights", {"src": x, "diff_dst": dy}, {"weights_shape": w.shape}),
        ):
            works.append(_work(f"{op_type} {shape}", op_type, inputs, common | wanted, kernels))
    return works


def _interpolations(kernels: str, rng: np.random.Generator) -> list[Work]:
    works: list[Work] = []
    for n, c, length, out in INTERPOLATIONS:
        x = np.zeros((n, c, length, length), np.float32)
        dy = rng.standard_normal((n, c, out, out), np.float32)
        for mode in ("nearest", "linear"):
            attributes = {"mode": mode, "data_format": "NCX", "sizes": [out, out]}
            name = f"InterpolateBackward {mode} N{n} C{c} {length}² -> {out}²"
            works.append(_work(name, "InterpolateBackward", {"src": x, "diff_dst": dy}, attributes, kernels))
    return works


def _work(name: str, op_type: str, inputs: dict[str, np.ndarray], attributes: dict, kernels: str) -> Work:
    session = ob.session(_model(op_type, inputs, attributes), kernels=kernels)
    return name, lambda: session.run(None, inputs)


def _model(op_type: str, inputs: dict[str, np.ndarray], attributes: dict) -> ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()]
    node = helper.make_node(op_type, list(inputs), ["result"], domain=ob.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node], op_type, infos, [helper.make_tensor_value_info("result", TensorProto.FLOAT, None)]
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


if __name__ == "__main__":
    main()
