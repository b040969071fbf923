"""LoRA beside MatMulNBits: the base stays packed, in the graph, in sessions of every route and in their memory."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

import onnx_backprop as ob
from onnx_backprop.ort_ops.native_graph import lower

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def stacked(width: int, layers: int, level: int = 4) -> ModelProto:
    """Layers (width, width) of 4 bits in blocks of 32, each behind a Tanh; named as no exporter names them."""
    rng, nodes, tensors, x = np.random.default_rng(0), [], [], "x"
    blocks = width // 32
    for n in range(layers):
        values = {
            f"{n}.q": rng.integers(0, 256, (width, blocks, 16)).astype(np.uint8),
            f"{n}.s": rng.uniform(0.005, 0.01, (width, blocks)).astype(np.float32),
            f"{n}.z": rng.integers(0, 256, (width, -(-blocks // 2))).astype(np.uint8),
        }
        tensors += [numpy_helper.from_array(value, name) for name, value in values.items()]
        nodes.append(
            helper.make_node(
                "MatMulNBits", [x, *values], [f"{n}.h"], domain="com.microsoft", name=f"layer{n}", K=width, N=width,
                bits=4, block_size=32, accuracy_level=level,
            )
        )  # fmt: skip
        nodes.append(helper.make_node("Tanh", [f"{n}.h"], [x := f"{n}.y"]))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name in ("x", x)]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def training(model: ModelProto) -> ob.TrainingGraph:
    adapted = ob.lora(model, [f"{n}.q" for n in range(len(model.graph.node) // 2)], rank=4, alpha=8)
    return ob.training_graph(adapted.model, loss="mse", optimizer="adamw", trainable=adapted.trainable)


@pytest.mark.parametrize("route", ["onnx", "native", "numpy", "numba"])
def test_no_session_holds_the_weights_in_floats(route: str, tmp_path: Path) -> None:
    """Neither the model that a route runs nor what onnxruntime makes of it before the first run."""
    width, graph = 128, training(stacked(128, 2))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ob.session(graph.model, kernels=route, session_options=options)
    seen = onnx.load(tmp_path / "optimised.onnx")
    packed = [t for t in seen.graph.initializer if t.data_type == TensorProto.UINT8 and prod(t.dims) == width**2 // 2]
    assert len(packed) == 2  # once each
    for tensor in seen.graph.initializer:
        assert tensor.data_type not in FLOATS or prod(tensor.dims) < width**2 // 4, (tensor.name, tensor.dims)
    assert [node.op_type for node in seen.graph.node].count("MatMulNBits") == 2


def test_no_value_of_the_native_graph_has_the_size_of_a_weight() -> None:
    width = 128
    native = lower(training(stacked(width, 2)).model, "native").model
    inferred = shape_inference.infer_shapes(native, data_prop=True).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    sizes = {v.name: prod(d.dim_value or 1 for d in v.type.tensor_type.shape.dim) for v in values}
    assert sum(size == width for size in sizes.values()) > 4  # rows of activations are known by their width
    assert not [name for name, size in sizes.items() if size >= width**2]
    assert [node.op_type for node in native.graph.node].count("OnnxBackprop_MatMulNBitsBackwardData") == 1


MEASURED = """
import ctypes
import numpy as np
import onnx_backprop as ob
from tests.converters.finetune.test_packed_base import stacked, training

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def trained(width, layers):
    graph = training(stacked(width, layers))
    before = resident()
    trainer = ob.Trainer(graph, learning_rate=1e-3)
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((32, width)).astype(np.float32) for name in ("x", "target")}
    losses = [trainer.step(batch) for _ in range(3)]
    assert losses[-1] < losses[0]
    return resident() - before

trained(64, 2)
print(trained(2048, 6))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read as Linux tells it")
def test_a_trainer_takes_less_than_one_copy_in_floats() -> None:
    """Six matrices of 2,048 x 2,048 are 101 MB in floats, 13 MB packed, 3 MB of scales."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", MEASURED], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 6 * 4 * 2048**2, done.stdout


def test_the_check_examines_the_exact_product_and_says_so() -> None:
    """Differences of the rounded forward are those of its steps."""
    report = ob.check_gradients(stacked(64, 2), wrt=["x"])
    assert report.verdict == "right"
    assert "float64" in str(report)
    assert "accuracy_level left out of MatMulNBits" in str(report)
    assert "accuracy_level" not in str(ob.check_gradients(stacked(64, 1, level=0), wrt=["x"]))


def test_ten_losses_are_those_of_the_float_model() -> None:
    """accuracy_level 0 rounds nothing: the dequantised file with the same adapters trains in the same way."""
    model = stacked(64, 2, level=0)
    floats = ob.dequantize(model)
    weights = [t.name for t in floats.graph.initializer if tuple(t.dims) == (64, 64)]
    assert len(weights) == 2
    rng = np.random.default_rng(1)
    batches = [{n: rng.standard_normal((16, 64)).astype(np.float32) for n in ("x", "target")} for _ in range(10)]
    losses = []
    for base, names in ((model, ["0.q", "1.q"]), (floats, sorted(weights))):
        adapted = ob.lora(base, names, rank=4, alpha=8, seed=3)
        graph = ob.training_graph(adapted.model, loss="mse", optimizer="adamw", trainable=adapted.trainable)
        trainer = ob.Trainer(graph, learning_rate=1e-2)
        losses.append([trainer.step(batch) for batch in batches])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] != losses[0][0]
