"""`variables`: what a model has for a training, without copies of the numbers of the model that came."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.training.passes import variables
from onnx_backprop.opset.core import mapped
from onnx_backprop.opset.core.mapped import is_mapped, to_array


def network(width: int, layers: int) -> ModelProto:
    """y = x W0 W1 …"""
    block = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32) / 45
    tensors = [numpy_helper.from_array(block * np.float32(1 + n), f"w{n}") for n in range(layers)]
    nodes = [helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"h{n + 1}"]) for n in range(layers)]
    values = [helper.make_tensor_value_info(f"h{n}", TensorProto.FLOAT, ["b", width]) for n in (0, layers)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_weights_refer_to_those_of_the_model_as_long_as_these_are_kept() -> None:
    model = network(256, 3)
    before, locations = model.SerializeToString(deterministic=True), set(mapped._files)
    result = variables(model)
    assert result.parameters == ("w0", "w1", "w2")
    assert all(map(is_mapped, result.model.graph.initializer))
    for came, tensor in zip(model.graph.initializer, result.model.graph.initializer, strict=True):
        np.testing.assert_array_equal(to_array(tensor), numpy_helper.to_array(came))
    assert model.SerializeToString(deterministic=True) == before
    assert len(set(mapped._files) - locations) == 3
    del result
    gc.collect()
    assert set(mapped._files) == locations


PROGRAM = """
import sys, onnx_ir as ir
from tests.converters.training.test_passes import network, peak, variables
def model_of(width, layers):
    return network(width, layers) if sys.argv[1] == "ModelProto" else ir.from_proto(network(width, layers))
variables(model_of(256, 2))  # what comes with it
model = model_of(2048, 6)
before = peak()
result = variables(model)
print(before, peak())
"""


def peak() -> float:
    """MiB that this process has had at most."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["ModelProto", "onnx_ir.Model"])
def test_a_conversion_copies_no_weights(kind: str) -> None:
    """96 MiB of them, of which three copies were made, and one more of an onnx_ir.Model; building them takes two."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert after - before < 0.5 * 96, done.stdout
