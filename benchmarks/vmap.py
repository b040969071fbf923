"""`vmap` of a model of one row beside the same model of a batch, and `per_sample` beside a loop: milliseconds of a run.

`python -m benchmarks.vmap`: one thread, processor time, the least of runs in turn.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

N = 32
RUNS, SECONDS = 15, 0.03
# {name: nodes, the shape of a row of x, weights}
CALLS: dict[str, tuple[str, str, dict[str, tuple[int, ...]]]] = {
    "MatMul": ("y = MatMul(x, w)", "256", {"w": (256, 256)}),
    "Gemm": ("y = Gemm(x, w, b)", "256", {"w": (256, 256), "b": (256,)}),
    "Softmax": ("y = Softmax(x)", "64, 256", {}),
    "LayerNormalization": ("y = LayerNormalization(x, w)", "64, 256", {"w": (256,)}),
    "ReduceSum": ("y = ReduceSum<keepdims = 0>(x, last)", "64, 256", {}),
    "Transpose": ("y = Transpose<perm = [0, 2, 1]>(x)", "64, 256", {}),
    "Conv": ("y = Conv<pads = [1, 1, 1, 1]>(x, w, b)", "16, 32, 32", {"w": (32, 16, 3, 3), "b": (32,)}),
    "ConvTranspose": ("y = ConvTranspose<strides = [2, 2]>(x, w)", "16, 16, 16", {"w": (16, 8, 2, 2)}),
    "MaxPool": ("y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)", "16, 32, 32", {}),
    "BatchNormalization": ("y = BatchNormalization(x, b, b, b, b)", "16, 32, 32", {"b": (16,)}),
    "Resize": ('y = Resize<mode = "linear">(x, , scales)', "8, 16, 16", {}),
    "LSTM": ("t = Transpose<perm = [1, 0, 2]>(x) , y = LSTM<hidden_size = 64>(t, w, r)", "16, 32",
             {"w": (1, 256, 32), "r": (1, 256, 64)}),
    "Gather": ("i = ArgMax<axis = 2, keepdims = 0>(x) y = Gather(w, i)", "64, 16", {"w": (16, 256)}),
    "BatchNormalization, Relu": ("a = BatchNormalization(x, b, b, b, b) y = Relu(a)", "16, 32, 32", {"b": (16,)}),
    "BatchNormalization, Relu, pool": ("a = BatchNormalization(x, b, b, b, b) r = Relu(a) y = GlobalAveragePool(r)",
                                       "16, 32, 32", {"b": (16,)}),
    "ConvTranspose, Tanh": ("a = ConvTranspose<strides = [2, 2]>(x, w) y = Tanh(a)", "16, 16, 16",
                            {"w": (16, 8, 2, 2)}),
    "Conv, MaxPool": ("a = Conv<pads = [1, 1, 1, 1]>(x, w) y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)",
                      "16, 32, 32", {"w": (32, 16, 3, 3)}),
    "network of products": ("a = Gemm(x, w, b) t = Tanh(a) y = Gemm(t, v)", "64",
                            {"w": (64, 256), "b": (256,), "v": (256, 10)}),
    "network of convolutions": (
        "a = Conv<pads = [1, 1, 1, 1]>(x, w, b) r = Relu(a) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) "
        "c = Conv<pads = [1, 1, 1, 1]>(p, k) t = Tanh(c) f = Flatten(t) y = Gemm(f, v)", "3, 32, 32",
        {"w": (16, 3, 3, 3), "b": (16,), "k": (32, 16, 3, 3), "v": (8192, 10)},
    ),
    "attention": (
        "q = MatMul(x, w1) k = MatMul(x, w2) kt = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, kt) p = Softmax(s) "
        "y = MatMul(p, q)", "32, 64", {"w1": (64, 64), "w2": (64, 64)},
    ),
}  # fmt: skip


def built(nodes: str, row: str, weights: dict[str, tuple[int, ...]], batch: str) -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[{batch}, {row}] x) => (float[] y) {{ {nodes} }}'
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    values = {name: np.abs(rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in weights.items()}
    values |= {"last": np.array([-1])} if "last" in nodes else {}
    values |= {"scales": np.array([1, 1, 2, 2], np.float32)} if "scales" in nodes else {}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def milliseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least processor time of each, in turn."""
    times, best = dict.fromkeys(calls, 1), dict.fromkeys(calls, float("inf"))
    for run in range(RUNS + 1):
        for name, call in calls.items():
            start = _used()
            for _ in range(times[name]):
                call()
            spent = (_used() - start) / times[name]
            if run:
                best[name] = min(best[name], spent)
            else:
                times[name] = max(1, int(SECONDS / max(spent, 1e-5)))
    return {name: 1000 * value for name, value in best.items()}


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    print(f"{N} rows, ms | batch | vmap | loop | vmap / batch")
    for name, (nodes, row, weights) in CALLS.items():
        whole, one = built(nodes, row, weights, "N"), built(nodes, row, weights, "1")
        x = np.random.default_rng(1).standard_normal((N, *map(int, row.split(",")))).astype(np.float32)
        batch, mapped, single = session(whole), session(ob.vmap(one, {"x": 0})), session(one)
        rows = [x[n : n + 1] for n in range(N)]
        times = milliseconds({
            "batch": lambda batch=batch, x=x: batch.run(None, {"x": x}),
            "vmap": lambda mapped=mapped, x=x: mapped.run(None, {"x": x[:, None]}),
            "loop": lambda single=single, rows=rows: [single.run(None, {"x": row}) for row in rows],
        })  # fmt: skip
        print(
            f"{name} | {' | '.join(f'{value:.3f}' for value in times.values())} | {times['vmap'] / times['batch']:.2f}"
        )
    print(f"gradients of {N} rows by weights, ms | sum of a batch | per_sample | loop")
    for name in ("network of products", "network of convolutions", "attention", "LSTM"):
        nodes, row, weights = CALLS[name]
        model = built(nodes, row, weights, "N")
        plain = ob.training_graph(model, loss="mse").model
        each = session(ob.training_graph(model, loss="mse", per_sample=True).model)
        sums = session(plain)
        x = np.random.default_rng(1).standard_normal((N, *map(int, row.split(",")))).astype(np.float32)
        y = np.asarray(session(model).run(None, {"x": x})[0])
        rank, axis = y.ndim, 1 if name == "LSTM" else 0
        rows = [(x[n : n + 1], np.take(y, [n], axis)) for n in range(N)]
        times = milliseconds({
            "batch": lambda sums=sums, x=x, y=y: sums.run(None, {"x": x, "target": y}),
            "per_sample": lambda each=each, x=x, y=y: each.run(None, {"x": x, "target": y}),
            "loop": lambda sums=sums, rows=rows: [sums.run(None, {"x": a, "target": b}) for a, b in rows],
        })  # fmt: skip
        print(f"{name} (y of rank {rank}) | {' | '.join(f'{value:.3f}' for value in times.values())}")


if __name__ == "__main__":
    main()
