"""q4f16: a small decoder in float16 with weights of four bits, from adapters to the exported model."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

VOCABULARY, WIDTH, INNER, TIME = 48, 32, 64, 6
NODES = """
e = Gather(table, ids) n0 = SimplifiedLayerNormalization <epsilon = 1e-5> (e, g0)
q = PACKED <K = 32, N = 32> (n0, q_w, q_s) k = PACKED <K = 32, N = 32> (n0, k_w, k_s)
v = PACKED <K = 32, N = 32> (n0, v_w, v_s)
qr = com.microsoft.RotaryEmbedding <num_heads = 2> (q, places, cos, sin)
kr = com.microsoft.RotaryEmbedding <num_heads = 2> (k, places, cos, sin)
a = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1> (qr, kr, v)
o = PACKED <K = 32, N = 32> (a, o_w, o_s)
n1, m1, i1, r1 = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (e, o, g1)
up = PACKED <K = 32, N = 64> (n1, up_w, up_s) gate = PACKED <K = 32, N = 64> (n1, gate_w, gate_s)
s = com.microsoft.QuickGelu <alpha = 1.0> (gate) h = Mul(s, up)
d = PACKED <K = 64, N = 32> (h, down_w, down_s)
n2 = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (r1, d, g2)
l = PACKED <K = 32, N = 48> (n2, head_w, head_s) logits = Reshape(l, rows)
""".replace("PACKED <", "com.microsoft.MatMulNBits <bits = 4, block_size = 32, ")
LENGTHS = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"up": (INNER, WIDTH), "gate": (INNER, WIDTH)}
LENGTHS |= {"down": (WIDTH, INNER), "head": (VOCABULARY, WIDTH)}


def decoder() -> ModelProto:
    rng = np.random.default_rng(0)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> m (int64[B, T] ids, int64[B, T] places) => '
        f"(float16[R, {VOCABULARY}] logits) {{ {NODES} }}"
    )
    tensors = {"table": rng.standard_normal((VOCABULARY, WIDTH)), "rows": np.int64([-1, VOCABULARY])}
    tensors |= {f"g{n}": np.ones(WIDTH) for n in range(3)}
    angles = np.arange(16)[:, None] / 100 ** (np.arange(8) / 8)
    tensors |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    for name, (n, k) in LENGTHS.items():
        tensors[f"{name}_w"] = rng.integers(0, 256, (n, k // 32, 16)).astype(np.uint8)
        tensors[f"{name}_s"] = rng.uniform(0.02, 0.04, (n, k // 32))
    for name, array in tensors.items():
        array = np.asarray(array)
        array = array.astype(np.float16) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_adapters_of_a_decoder_in_float16_with_four_bits() -> None:
    adapted = ob.lora(decoder(), [f"{name}_w" for name in LENGTHS], rank=4)
    graph = ob.training_graph(
        adapted.model, loss="softmax_cross_entropy", trainable=adapted.trainable, optimizer="adamw"
    )
    trainer = ob.Trainer(graph, learning_rate=1e-2)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, TIME + 1))
    feeds = {"ids": ids[:, :-1], "places": np.tile(np.arange(TIME), (2, 1))}
    labels = ids[:, 1:].reshape(-1)
    losses = [float(trainer.step({**feeds, graph.target or "": labels})) for _ in range(10)]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0], losses
    exported = adapted.merge(trainer.parameters())
    assert {t.data_type for t in exported.graph.initializer} <= {onnx.TensorProto.FLOAT16, 2, 7}
    for node in exported.graph.node:
        node.domain = "" if node.op_type == "SimplifiedLayerNormalization" else node.domain
    session = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    y = np.asarray(session.run(["logits"], feeds)[0], np.float64)
    chosen = y[np.arange(labels.size), labels] - np.log(np.exp(y).sum(1))
    assert abs(-chosen.mean() - float(trainer.step({**feeds, graph.target or "": labels}))) < 2e-2
