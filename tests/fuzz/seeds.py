"""Small models, arrays and checkpoints that mutations start from, made by code: no file needs to be kept."""

from __future__ import annotations

import io
import json
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.numpy
from onnx import ModelProto, TensorProto, helper, parser

import onnx_backprop as ob
from onnx_backprop.training.checkpoint import write_checkpoint
from onnx_backprop.training.schedules import Cosine, Warmup, described
from tests.converters.quantized.forms import FORMS
from tests.support.training_models import training

HEAD = '<ir_version: 10, opset_import: ["": {opset}{more}]>\n'
TEXTS: dict[str, tuple[int, str, str]] = {
    "mlp": (
        18,
        "",
        """g (float[N, 4] x) => (float[N, 3] y) <float[4, 5] w = {%20}, float[5] b = {%5}, float[5, 3] v = {%15}>
        { h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }""",
    ),
    "conv": (
        18,
        "",
        """g (float[1, 2, 6, 6] x) => (float[N, K] y)
        <float[4, 1, 3, 3] w = {%36}, float[4] b = {%4}, float[4] s = {%4}, float[4] m = {%4}, float[4] v = {%4}>
        { c = Conv<group = 2, pads = [1, 1, 1, 1], strides = [2, 1], dilations = [1, 2]>(x, w, b)
          n = BatchNormalization<epsilon = 0.001>(c, s, b, m, v)
          p = MaxPool<kernel_shape = [2, 2], ceil_mode = 1>(n)
          q = AveragePool<kernel_shape = [2, 2], count_include_pad = 1, auto_pad = "SAME_UPPER">(p)
          y = Flatten<axis = 1>(q) }""",
    ),
    "transposed": (
        19,
        "",
        """g (float[N, 2, 4, 4] x) => (float[N, 3, H, W] y)
        <float[2, 3, 2, 2] w = {%12,%12}, float[4] scales = {1, 1, 2, 1.5}, float[4] sizes = {%4}>
        { t = ConvTranspose<strides = [2, 2], output_padding = [1, 0], auto_pad = "NOTSET">(x, w)
          y = Resize<mode = "cubic", coordinate_transformation_mode = "half_pixel", antialias = 1>(t, , scales) }""",
    ),
    "upsample": (
        9,
        "",
        """g (float[1, 1, 3, 3] x) => (float[1, 1, 6, 6] y) <float[4] scales = {1, 1, 2, 2}, float[1, 1, 1, 1] w = {%1}>
        { z = Mul(x, w) y = Upsample<mode = "nearest">(z, scales) }""",
    ),
    "attention": (
        21,
        "",
        """g (float[B, 4, 6] x) => (float[B, 4, 6] y) <float[6, 6] w = {%36}, float[6] s = {%6}, int64[3] shape = {0, 4, 6},
        float scale = {0.5}>
        { q = MatMul(x, w) k = Transpose<perm = [0, 2, 1]>(q) d = MatMul(q, k) e = Mul(d, scale)
          p = Softmax<axis = -1>(e) o = MatMul(p, x) r = Reshape(o, shape) l = LayerNormalization<axis = -1>(r, s)
          g1 = Gelu(l) y = Einsum<equation = "bij,jk->bik">(g1, w) }""",
    ),
    "recurrent": (
        18,
        "",
        """g (float[3, 2, 4] x) => (float[3, 1, 2, 3] y, float[1, 2, 3] h)
        <float[1, 12, 4] w = {%24,%24}, float[1, 12, 3] r = {%36}, float[1, 24] b = {%24}>
        { y, h, c = LSTM<hidden_size = 3, direction = "forward", activations = ["Sigmoid", "Tanh", "Tanh"]>(x, w, r, b) }""",
    ),
    "branches": (
        18,
        "",
        """g (float[N] x, bool c) => (float[N] y) <float w = {2}, int64 n = {3}, bool t = {1}>
        { y0 = If(c) <then_branch = a () => (float[N] p) { p = Mul(x, w) }, else_branch = b () => (float[N] q)
            { q0 = Add(x, w) q = Tanh(q0) }>
          y = Loop(n, t, y0) <body = l (int64 i, bool ci, float[N] s) => (bool co, float[N] so)
            { co = Identity(ci) so = Mul(s, w) }> }""",
    ),
    "scan": (
        18,
        "",
        """g (float[3] s0, float[5, 3] xs) => (float[3] s, float[5, 3] y) <float[3] w = {%3}>
        { s, y = Scan<num_scan_inputs = 1, body = b (float[3] si, float[3] xi) => (float[3] so, float[3] yo)
            { m = Mul(xi, w) so = Add(si, m) yo = Identity(so) }>(s0, xs) }""",
    ),
    "functions": (
        18,
        ', "own": 1',
        """g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {%2}> { a = own.scaled<alpha = 0.5>(x, w) y = own.twice(a, w) }
        <opset_import: ["": 18], domain: "own"> scaled <alpha> (a, b) => (c)
        { k = Constant<value_float: float = @alpha>() d = Mul(a, b) c = Mul(d, k) }
        <opset_import: ["": 18, "own": 1], domain: "own"> twice (a, b) => (c)
        { d = own.scaled<alpha = 2.0>(a, b) c = own.scaled<alpha = 3.0>(d, b) }""",
    ),
    "shapes": (
        18,
        "",
        """g (float[N, 8] x, int64[2] ids) => (float[?, ?] y) <float[5, 4] table = {%20}, int64[2] two = {2, 4},
        int64[1] start = {0}, int64[1] end = {9223372036854775807}, int64[1] axis = {1}, int64[4] pads = {0, 1, 1, 0}>
        { e = Gather(table, ids) t = ConstantOfShape<value = float[1] {0.5}>(two) f = Add(e, t) s = Shape(x)
          p, q = Split<num_outputs = 2, axis = 1>(x) r = Slice(p, start, end, axis) u = Pad<mode = "reflect">(r, pads)
          m = ReduceMean<keepdims = 1>(u) k = Constant<value = float[2, 4] {1,2,3,4,5,6,7,8}>() v = Mul(f, k)
          w = Expand(m, two) y = Add(v, w) }""",
    ),
    "folded": (
        18,
        "",
        """g (float[2, 3] x) => (float[?, ?] y) <float[3] w = {1, 2, 3}, int64 zero = {0}, int64 three = {3},
        int64 one = {1}, int64[2] reps = {2, 1}, int64[2] lengths = {2, 3}, int64[1] last = {-1}>
        { r = Range(zero, three, one) f = Cast<to = 1>(r) a = Mul(w, f) b = Expand(a, lengths) t = Tile(x, reps)
          c = Concat<axis = 0>(b, b) d = Add(t, c) s = Shape(d) n = ReduceProd<keepdims = 0>(s)
          o = ConstantOfShape<value = float[1] {1}>(s) h = OneHot<axis = -1>(r, three, w2) q = Mul(d, o)
          i = Unsqueeze(n, last) p = Reshape(q, i) y = Reshape(p, s) w2 = Constant<value_floats = [0.0, 1.0]>() }""",
    ),
    "pointwise": (
        22,
        "",
        """g (float[N, 3] x) => (float[N, 3] y, float[N, K] top, int64[N, K] i) <float[3] w = {%3}, int64[1] k = {2}>
        { a = Mul(x, w) b = Clip(a) c = Pow(b, w) d = PRelu(c, w) e = HardSigmoid<alpha = 0.3>(d) f = Elu(e) h = Max(f, w)
          j = CumSum(h, zero) m = LogSoftmax<axis = 1>(j) top, i = TopK(m, k) n = Where(cond, m, w) y = Erf(n)
          zero = Constant<value = int64 {0}>() cond = Constant<value = bool[1] {1}>() }""",
    ),
    "quantized": (
        21,
        "",
        """g (float[N, 4] x) => (float[N, 4] y) <float s = {0.1}, int8 z = {0}, int8[4, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, z) y = MatMul(d, v) }""",
    ),
    "fused": (
        18,
        ', "com.microsoft": 1',
        """g (float[N, 4, 8] x) => (float[N, 4, 8] y) <float[8, 8] w = {%32,%32}, float[8] b = {%8}, float[8] s = {%8}>
        { f = com.microsoft.FusedMatMul<alpha = 0.5, transB = 1>(x, w) g1 = com.microsoft.BiasGelu(f, b)
          y = com.microsoft.SkipLayerNormalization<epsilon = 0.001>(g1, x, s, b) }""",
    ),
    "losses": (
        18,
        "",
        """g (float[N, 3] x, int64[N] t) => (float l) <float[3, 3] w = {%9}, float[3] weight = {%3}>
        { y = Gemm<alpha = 1.0, transB = 1>(x, w, weight) n = LogSoftmax<axis = 1>(y)
          l = NegativeLogLikelihoodLoss<reduction = "mean", ignore_index = -1>(n, t, weight) }""",
    ),
    "sequences": (
        18,
        "",
        """g (float[2, 3] x) => (float[?, ?] y) <float[2, 3] w = {%6}, int64 at = {1}>
        { a = Mul(x, w) s = SequenceConstruct(a, x) e = SequenceAt(s, at) n = NonZero(e) r = ScatterElements<axis = 0>(e, i, w)
          i = Constant<value = int64[2, 3] {0, 1, 0, 1, 0, 1}>() y = GatherElements<axis = 1>(r, i) }""",
    ),
}


def _parsed(opset: int, more: str, text: str) -> ModelProto:
    for count in range(40, 0, -1):
        text = text.replace(f"%{count}", ", ".join(str((n % 7 - 3) / 4) for n in range(count)))
    return parser.parse_model(HEAD.format(opset=opset, more=more) + text)


@cache
def models() -> dict[str, bytes]:
    """Forward models, and what conversion makes of some: gradients, training graphs, Gradient nodes."""
    parsed = {name: _parsed(*text) for name, text in TEXTS.items()}
    derived = {
        "backward-conv": ob.backward(parsed["conv"]),
        "backward-resize": ob.use_kernels(ob.backward(parsed["transposed"]), "native"),
        "training": training().model,
        "training-plain": ob.training_graph(parsed["mlp"], loss="mse").model,
        "training-info": ob.to_training_info(ob.training_graph(parsed["mlp"], loss="mse", optimizer="adam")),
        "gradient-node": _gradient_node(),
        "external": _external(),
    }
    return {name: model.SerializeToString() for name, model in (parsed | derived).items()}


def _gradient_node() -> ModelProto:
    model = _parsed(*TEXTS["mlp"])
    attributes = {"xs": ["w"], "y": "y"}
    node = helper.make_node("Gradient", ["w"], ["dw"], domain="ai.onnx.preview.training", **attributes)
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("dw", TensorProto.FLOAT, [4, 5]))
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    return model


def _external() -> ModelProto:
    """A tensor that lies beside a file which is not there."""
    model = _parsed(*TEXTS["mlp"])
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "80")):
        tensor.external_data.add(key=key, value=value)
    return model


@cache
def quantized() -> dict[str, bytes]:
    """Every form of quantised models."""
    return {name: form.model().SerializeToString() for name, form in FORMS.items()}


@cache
def archives() -> dict[str, bytes]:
    """Files of arrays."""
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "labels": np.arange(3), "one": np.float64(2)}
    result = {}
    for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
        file = io.BytesIO()
        save(file, **arrays)
        result[name] = file.getvalue()
    for name, method in (("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA)):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            array = io.BytesIO()
            np.save(array, arrays["x"])
            archive.writestr("x.npy", array.getvalue())
        result[name] = file.getvalue()
    array = io.BytesIO()
    np.save(array, arrays["x"])
    return result | {"npy": array.getvalue()}


@cache
def checkpoints() -> dict[str, bytes]:
    """A checkpoint of `training()`, twice as likely as those of nothing."""
    graph = training()
    about = {
        "steps": 3,
        "epoch": 1,
        "batch": 2,
        "learning_rate": 0.01,
        "schedule": described(Warmup(Cosine(0.1, 9), 2)),
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write_checkpoint(path, graph.initial_state(), {**about, "settings": graph.settings})
        written = path.read_bytes()
    empty = {"onnx_backprop": json.dumps({"format": 1})}
    other = safetensors.numpy.save({"w": np.zeros((2, 2), np.float32)}, metadata=empty)
    return {"own": written, "again": written, "other": other, "bare": safetensors.numpy.save({"w": np.zeros(3)})}
