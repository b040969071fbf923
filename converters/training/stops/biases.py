"""The second bias of a recurrent layer of TensorFlow, whose layers have one: B = (Wb, Rb), and dRb = 0.

tf2onnx writes zeros there, and calls the tensor B__1 or B0__1. Trained, they would double each step: dRb = dWb. A GRU
with linear_before_reset = 1, Keras' default, has two biases in Keras too, which begin as zeros: both are trained.
"""

import re
from collections.abc import Collection

import onnx_ir as ir

from onnx_backprop.converters.parameters.layout import shown
from onnx_backprop.converters.prepare.exporters.detached import STOP
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import is_standard

_NAME = re.compile(r"B\d*__\d+")


def stop_second_biases(graph: ir.Graph) -> list[ir.Value]:
    """Let no gradient pass to second biases that are zeros, in place; the tensors that have them."""
    stopped: list[ir.Value] = []
    for node in list(graph):
        b = node.inputs[3] if is_standard(node, "GRU", "LSTM", "RNN") and len(node.inputs) > 3 else None
        array = constant_value(b) if b is not None and _NAME.fullmatch(str(b.name)) else None
        if b is None or array is None or array.ndim != 2 or array[:, array.shape[1] // 2 :].any():
            continue
        if node.attributes.get_int("linear_before_reset", 0):
            continue
        half = array.shape[1] // 2
        op = Builder(used_names(graph))
        op.prefix = f"{b.name}/second"
        second = op.Identity(op.Slice(b, [half], [2 * half], [1]))
        op.nodes[-1].metadata_props[STOP] = "second bias"
        both = op.Concat(op.Slice(b, [0], [half], [1]), second, axis=1)
        both.type, both.shape = b.type, b.shape
        node.replace_input_with(3, both)
        graph.insert_before(node, op.nodes)
        stopped.append(b)
    return stopped


def warn_of_second_biases(stopped: Collection[ir.Value], trained: Collection[str]) -> None:
    """Say which of the tensors that are trained have a second bias without a gradient."""
    names = dict.fromkeys(shown(value) for value in stopped if value.name in trained)
    if names:
        warn(
            f"the second biases in {', '.join(names)} are zeros, as tf2onnx writes them for layers with one bias: they "
            "get no gradient. If they are to be trained, start them with other numbers"
        )
