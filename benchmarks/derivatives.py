"""Jacobians and Hessian-vector products beside onnx-ad on the same models: milliseconds of a run, bytes of a file.

`python -m benchmarks.derivatives`, with onnx-ad 0.3.0 installed beside; one thread, the median of runs in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper, parser
from onnx.shape_inference import infer_shapes

import onnx_backprop as ob

onnx_ad: Any = import_module("onnx_ad")  # of no environment of this project
RUNS, SECONDS = 15, 0.03


def with_weights(text: str, **shapes: tuple[int, ...]) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        scale = 1 / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else max(shape[:1]))
        model.graph.initializer.append(
            numpy_helper.from_array((rng.standard_normal(shape) * scale).astype(np.float32), name)
        )
    return model


MODELS: dict[str, tuple[ModelProto, tuple[int, ...]]] = {
    "MLP 32-128-128-10": (
        with_weights(
            "g (float[1, 32] x) => (float[1, 10] y) { a = Gemm(x, w1, b1) t = Tanh(a) b = Gemm(t, w2, b2) "
            "u = Tanh(b) y = Gemm(u, w3, b3) }",
            w1=(32, 128), b1=(128,), w2=(128, 128), b2=(128,), w3=(128, 10), b3=(10,),
        ),
        (1, 32),
    ),
    "CNN 3×32×32": (
        with_weights(
            "g (float[1, 3, 32, 32] x) => (float[1, 10] y) { a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) r = Relu(a) "
            "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) b = Conv<pads = [1, 1, 1, 1]>(p, w2, b2) "
            "t = Tanh(b) q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(t) f = Flatten(q) "
            "y = Gemm(f, w3, b3) }",
            w1=(16, 3, 3, 3), b1=(16,), w2=(32, 16, 3, 3), b2=(32,), w3=(2048, 10), b3=(10,),
        ),
        (1, 3, 32, 32),
    ),
    "attention 16×64": (
        with_weights(
            "g (float[1, 16, 64] x) => (float[1, 8] y) { q = MatMul(x, w1) k = MatMul(x, w2) v = MatMul(x, w3) "
            "kt = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, kt) p = Softmax<axis = -1>(s) z = MatMul(p, v) "
            "m = ReduceMean<keepdims = 0>(z, axes) y = MatMul(m, w4) }",
            w1=(64, 64), w2=(64, 64), w3=(64, 64), w4=(64, 8),
        ),
        (1, 16, 64),
    ),
}  # fmt: skip
MODELS["attention 16×64"][0].graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))


def scalar(model: ModelProto) -> ModelProto:
    """Σ y² in the place of the outputs."""
    text = parser.parse_graph("g (float y) => (float[] energy) { yy = Mul(y, y) energy = ReduceSum<keepdims = 0>(yy) }")
    result = ModelProto()
    result.CopyFrom(model)
    result.graph.node.extend(text.node)
    del result.graph.output[:]
    result.graph.output.extend(text.output)
    return result


def only(model: ModelProto, name: str) -> ModelProto:
    """With one output."""
    result = ModelProto()
    result.CopyFrom(model)
    kept = [value for value in result.graph.output if value.name == name]
    del result.graph.output[:]
    result.graph.output.extend(kept)
    return result


def runner(
    model: ModelProto, feeds: dict[str, np.ndarray], output: str, kernels: str | None
) -> Callable[[], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ob.session(model, kernels=kernels, session_options=options)
    return lambda: np.asarray(session.run([output], feeds)[0])


def milliseconds(calls: dict[str, Callable[[], np.ndarray]]) -> dict[str, float]:
    """Medians, the calls taking turns so that a busy machine meets all of them."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(RUNS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append((time.perf_counter() - start) / counts[name])
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


Row = tuple[ModelProto, dict[str, np.ndarray], str, str | None]  # model, feeds, output, kernels


def compared(title: str, theirs: Callable[[], Row], ours: Row, same: Callable[[np.ndarray], np.ndarray]) -> None:
    """A line of the table; what is compared gives the same numbers."""
    rows: dict[str, Row] = {"onnx": ours, "native": (*ours[:3], "native")}
    try:
        rows["onnx-ad"] = theirs()
    except onnx_ad.UnsupportedOperator:
        print(f"(onnx-ad refuses: {title})")
    calls = {name: runner(*row) for name, row in rows.items()}
    results = {name: call() for name, call in calls.items()}
    for name, result in results.items():
        result = same(result).reshape(results["onnx"].shape) if name == "onnx-ad" else result
        np.testing.assert_allclose(result, results["onnx"], rtol=1e-3, atol=1e-4, err_msg=f"{title} {name}")
    timings = milliseconds(calls)
    cells = [f"{timings[name]:.3f}" if name in timings else "refused" for name in ("onnx-ad", "onnx", "native")]
    sizes = {name: len(rows[name][0].SerializeToString()) for name in ("onnx-ad", "onnx") if name in rows}
    cells += [f"{sizes[name]:,}" if name in sizes else "" for name in ("onnx-ad", "onnx")]
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def adjoint(model: ModelProto, feeds: dict[str, np.ndarray]) -> Row:
    return onnx_ad.reverse(model, layout="onnx"), feeds, "adj_x", None


def tangent_of_adjoint(model: ModelProto, feeds: dict[str, np.ndarray]) -> Row:
    derived = onnx_ad.forward(onnx_ad.reverse(model, layout="onnx"), layout="onnx", outputs=["adj_x"])
    return only(derived, "fwd_adj_x"), feeds, "fwd_adj_x", None


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(1)
    print("| | onnx-ad, ms | onnx, ms | native, ms | onnx-ad, bytes | onnx, bytes |\n|---|---:|---:|---:|---:|---:|")
    for name, (model, shape) in MODELS.items():
        x, v = (rng.standard_normal(shape).astype(np.float32) for _ in "xv")
        source = infer_shapes(only(model, "y"))
        outputs = source.graph.output[0].type.tensor_type.shape.dim[1].dim_value
        unit = np.eye(outputs, dtype=np.float32).reshape(1, outputs, outputs)
        compared(
            f"Jacobian, {name}, {outputs} rows",
            partial(adjoint, source, {"x": x, "adj_y": unit}),
            (ob.jacobian(source, ["x"], ["y"]), {"x": x}, "y_jacobian_x", "onnx"),
            lambda j: np.moveaxis(j, -1, 0),
        )
        energy = infer_shapes(scalar(source))
        seeds = {
            "adj_energy": np.ones(1, np.float32),
            "fwd_x": v[..., None],
            "fwd_adj_energy": np.zeros((1, 1), np.float32),
        }
        compared(
            f"Hessian-vector product, {name}",
            partial(tangent_of_adjoint, energy, {"x": x, **seeds}),
            (only(ob.hvp(energy, ["x"], ["energy"]), "x_hvp"), {"x": x, "x_direction": v}, "x_hvp", "onnx"),
            lambda h: h,
        )


if __name__ == "__main__":
    main()
