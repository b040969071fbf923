"""What a page takes for granted: files in the folder where its blocks run, and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

Names = dict[str, Any]


def _filled(model: ModelProto, shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = 0.1 * rng.standard_normal(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def _image_model() -> dict[str, np.ndarray]:
    """model.onnx, input (batch, 1, 8, 8) -> an image as large, and data.npz for it."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        image (float[batch, 1, 8, 8] input) => (float[batch, 1, 8, 8] output) {
            a = Conv <pads = [1, 1, 1, 1]> (input, w1, b1) b = Relu (a)
            output = Conv <pads = [1, 1, 1, 1]> (b, w2, b2) }""")
    onnx.save(_filled(model, {"w1": (4, 1, 3, 3), "b1": (4,), "w2": (1, 4, 3, 3), "b2": (1,)}), "model.onnx")
    x = np.random.default_rng(1).random((16, 1, 8, 8), np.float32)
    data = {"input": x, "target": 2 * x}
    np.savez("data.npz", **data)
    return data


def asking_for_help() -> Names:
    """model.onnx with a node that has no rule, and a script that fails with it."""
    _image_model()
    model = onnx.load("model.onnx")
    model.graph.node[1].op_type, model.graph.node[1].domain = "Wobble", "lab"
    model.opset_import.add(domain="lab", version=1)
    onnx.save(model, "model.onnx")
    Path("fails.py").write_text("import sys, onnx\nsys.exit('Wobble' in str(onnx.load(sys.argv[1])))\n")
    return {}


def guide() -> Names:
    data = _image_model()
    return {"batches": [(data["input"][n : n + 4], data["target"][n : n + 4]) for n in range(0, 16, 4)]}


def adapters() -> Names:
    """imagenet.onnx, model.onnx with a layer called attn, bert.onnx with numbered ones."""
    classifier = """
        <ir_version: 10, opset_import: ["": 18]>
        classifier (float[batch, 4] x) => (float[batch, 3] logits) {
            a = MatMul (x, attn) b = Relu (a) logits = Gemm (b, head_w, head_b) }"""
    shapes = {"attn": (4, 8), "head_w": (8, 3), "head_b": (3,)}
    model = _filled(parser.parse_model(classifier), shapes)
    onnx.save(model, "model.onnx")
    onnx.save(model, "imagenet.onnx")
    nodes = "".join(f"h{n + 1} = MatMul (h{n}, w{n}) " for n in range(12))
    bert = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> bert (float[batch, 4] h0) => (float[batch, 4] h12) {{ {nodes} }}'
    )
    for n, node in enumerate(bert.graph.node):  # the text form has no names with dots
        node.input[1] = f"layer.{n}.weight"
    onnx.save(_filled(bert, {f"layer.{n}.weight": (4, 4) for n in range(12)}), "bert.onnx")
    x = np.random.default_rng(1).random((30, 4), np.float32)
    return {"x": x, "batches": [(x, x[:, :3].argmax(axis=1))]}


def _integers() -> None:
    """model.int8.onnx, as quantize_static writes it."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        integers (float[batch, 4] x) => (float[batch, 4] y) <float s = {0.01}, float sx = {0.02}, uint8 z = {100}> {
            q = QuantizeLinear (x, sx, z) d = DequantizeLinear (q, sx, z) w = DequantizeLinear (w_quantized, s)
            y = MatMul (d, w) }""")
    values = np.random.default_rng(0).integers(-127, 128, (4, 4)).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(values, "w_quantized"))
    onnx.save(model, "model.int8.onnx")


def _four_bits() -> None:
    """model.int4.onnx, as onnxruntime's quantiser of MatMul writes it."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
        packed (float[batch, 4] x) => (float[batch, 4] y) {
            h = com.microsoft.MatMulNBits <K = 4, N = 4, block_size = 16, accuracy_level = 4> (x, w_Q4, w_scales)
            y = Tanh (h) }""")
    packed = np.random.default_rng(0).integers(0, 256, (4, 1, 8)).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(packed, "w_Q4"))
    onnx.save(_filled(model, {"w_scales": (4, 1)}), "model.int4.onnx")


def quantized() -> Names:
    _integers()
    _four_bits()
    x = np.random.default_rng(1).random((16, 4), np.float32)
    np.savez("data.npz", x=x, target=2 * x)
    return {"batches": [(x, 2 * x)] * 3}


def distributed() -> Names:
    data = _image_model()
    return {"x": data["input"], "t": data["target"]}


def precision() -> Names:
    _image_model()
    return {"ob": ob}


def losses() -> Names:
    """net.onnx of several outputs, a classifier that ends in a softmax, a language model, and one that segments."""
    net = """
        <ir_version: 10, opset_import: ["": 18]>
        net (float[batch, 3, 8, 8] x) => (float[batch, 3, 8, 8] mask, float[batch, 3] scores, float[batch, 1, 8, 8] depth) {
            h = Conv <pads = [3, 3, 3, 3]> (x, w0) mask_logits = Conv (h, w1) mask = Sigmoid (mask_logits)
            depth = Conv (h, w2) pooled = GlobalAveragePool (h) flat = Flatten (pooled) scores = Gemm (flat, w3) }"""
    shapes = {"w0": (8, 3, 7, 7), "w1": (3, 8, 1, 1), "w2": (1, 8, 1, 1), "w3": (8, 3)}
    onnx.save(_filled(parser.parse_model(net), shapes), "net.onnx")
    classifier = """
        <ir_version: 10, opset_import: ["": 18]>
        classifier (float[batch, 4] x) => (float[batch, 3] y) { logits = Gemm (x, w) y = Softmax (logits) }"""
    onnx.save(_filled(parser.parse_model(classifier), {"w": (4, 3)}), "classifier.onnx")
    language = """
        <ir_version: 10, opset_import: ["": 18]>
        language (int64[batch, length] tokens) => (float[batch, length, 7] y) { e = Gather (table, tokens) y = MatMul (e, w) }"""
    onnx.save(_filled(parser.parse_model(language), {"table": (7, 4), "w": (4, 7)}), "language.onnx")
    segments = """
        <ir_version: 10, opset_import: ["": 18]>
        segments (float[batch, 3, 8, 8] x) => (float[batch, 4, 8, 8] y) { y = Conv (x, w) }"""
    onnx.save(_filled(parser.parse_model(segments), {"w": (4, 3, 1, 1)}), "segments.onnx")
    return {"ob": ob, "tokens": np.arange(10).reshape(2, 5) % 7}


def web() -> Names:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        classifier (float[batch, 4] x) => (float[batch, 3] y) { y = Gemm (x, w, b) }""")
    onnx.save(_filled(model, {"w": (4, 3), "b": (3,)}), "model.onnx")
    x = np.random.default_rng(1).random((30, 4), np.float32)
    np.savez("data.npz", x=x, labels=x[:, :3].argmax(axis=1))
    return {}


def metrics() -> Names:
    """model.onnx, a classifier, batches of its inputs and labels, and others that are held out."""
    web()
    x = np.random.default_rng(1).random((40, 4), np.float32)
    rows = [{"x": x[n : n + 8], "labels": x[n : n + 8, :3].argmax(axis=1)} for n in range(0, 40, 8)]
    return {"ob": ob, "batches": rows[:3], "held_out": rows[3:]}


def migrating() -> Names:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        cnn (float[batch, 1, 6, 6] input) => (float[batch, 3] output) {
            a = Conv (input, conv__weight, conv__bias) b = Relu (a) c = Flatten (b)
            output = Gemm (c, fc__weight, fc__bias) }""")
    for node in model.graph.node:  # the text form has no names with dots
        node.input[:] = [name.replace("__", ".") for name in node.input]
    shapes = {"conv.weight": (2, 1, 3, 3), "conv.bias": (2,), "fc.weight": (32, 3), "fc.bias": (3,)}
    onnx.save(_filled(model, shapes), "cnn.onnx")
    Path("artifacts").mkdir()
    x, labels = np.random.default_rng(1).random((32, 1, 6, 6), np.float32), np.arange(32) % 3
    return {"onnx": onnx, "batches": [(x, labels)] * 3, "x": x, "labels": labels}


def docstrings() -> Names:
    """Files and batches that the examples of all docstrings share."""
    model = """
        <ir_version: 10, opset_import: ["": 18]>
        model (float[batch, 4] x) => (float[batch, 4] {y}) {{
            a = MatMul (x, attn) b = Relu (a) {y} = Gemm (b, w, bias) }}"""
    shapes = {"attn": (4, 8), "w": (8, 4), "bias": (4,)}
    for file, output in (("model.onnx", "y"), ("imagenet.onnx", "logits")):
        onnx.save(_filled(parser.parse_model(model.format(y=output)), shapes), file)
    energy = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        energy (double a, double b, double temperature) => (double energy) {
            c = Sub (a, temperature) d = Mul (c, c) e = Mul (b, b) energy = Add (d, e) }""")
    onnx.save(energy, "energy.onnx")
    _integers()
    from PIL import Image  # not above: other setups do without

    for flower in ("daisy", "rose"):
        Path("flowers", flower).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(Path("flowers", flower, "1.png"))
    x = np.random.default_rng(1).random((16, 4), np.float32)
    return {"ob": ob, "np": np, "onnx": onnx, "x": x, "batches": [(x, 2 * x)] * 3, "t": np.array(2.0)}


SETUPS: dict[str, Callable[[], Names]] = {
    "docs/help.md": asking_for_help,
    "docs/adapters.md": adapters,
    "docs/devices.md": guide,
    "docs/distributed.md": distributed,
    "docs/guide.md": guide,
    "docs/losses.md": losses,
    "docs/metrics.md": metrics,
    "docs/migrating.md": migrating,
    "docs/precision.md": precision,
    "docs/quantized.md": quantized,
    "docs/web.md": web,
}
