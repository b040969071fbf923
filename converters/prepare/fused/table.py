"""Which function writes which operator out, and what is said of those that none does."""

from importlib import import_module
from typing import Any

from onnx import NodeProto

from onnx_backprop.converters.prepare.fused.composer import Composer, Expansion, Table


class _Family:
    """The functions of a module of this folder, which is imported when one of them is first called."""

    def __init__(self, module: str) -> None:
        self._module = f"{__package__}.{module}"

    def __getattr__(self, name: str) -> Expansion:
        def expansion(composer: Composer) -> Any:
            return getattr(import_module(self._module), name)(composer)

        return expansion


activations, attention, classic, group_query = map(_Family, ("activations", "attention", "classic", "group_query"))
matmul, moe, normalization = map(_Family, ("matmul", "moe", "normalization"))
quantized, recurrent = map(_Family, ("quantized", "recurrent"))

MICROSOFT, CLASSIC = "com.microsoft", "ai.onnx.ml"

_MICROSOFT: dict[str, Expansion] = {
    "Attention": attention.attention,
    "BiasAdd": activations.bias_add,
    "BiasDropout": activations.bias_dropout,
    "BiasGelu": activations.bias_gelu,
    "BiasSoftmax": activations.bias_softmax,
    "BiasSplitGelu": activations.bias_split_gelu,
    "CausalConvWithState": recurrent.causal_conv_with_state,
    "DequantizeLinear": quantized.dequantize_linear,
    "EmbedLayerNormalization": normalization.embed_layer_normalization,
    "FastGelu": activations.fast_gelu,
    "FusedConv": matmul.fused_conv,
    "FusedGemm": matmul.fused_gemm,
    "FusedMatMul": matmul.fused_mat_mul,
    "GatedAdd": recurrent.gated_add,
    "GatedRMSNorm": recurrent.gated_rms_norm,
    "GatherBlockQuantized": quantized.gather_block_quantized,
    "Gelu": activations.gelu,
    "GemmFastGelu": activations.gemm_fast_gelu,
    "GroupQueryAttention": group_query.group_query_attention,
    "LayerNormalization": normalization.layer_normalization,
    "LinearAttention": recurrent.linear_attention,
    "LinearAttentionGate": recurrent.linear_attention_gate,
    "MRotaryEmbedding": recurrent.m_rotary_embedding,
    "MatMulBnb4": quantized.mat_mul_bnb4,
    "MatMulNBits": quantized.mat_mul_n_bits,
    "MoE": moe.moe,
    "MultiHeadAttention": attention.multi_head_attention,
    "QMoE": moe.q_moe,
    "QuantizeLinear": quantized.quantize_linear,
    "QuickGelu": activations.quick_gelu,
    "RotaryEmbedding": attention.rotary_embedding,
    "SimplifiedLayerNormalization": normalization.simplified_layer_normalization,
    "SkipLayerNormalization": normalization.skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": normalization.skip_simplified_layer_normalization,
    "TransposeMatMul": matmul.fused_mat_mul,
}
_CLASSIC: dict[str, Expansion] = {
    "ArrayFeatureExtractor": classic.array_feature_extractor,
    "Imputer": classic.imputer,
    "LinearClassifier": classic.linear_classifier,
    "LinearRegressor": classic.linear_regressor,
    "Normalizer": classic.normalizer,
    "SVMClassifier": classic.svm_classifier,
    "SVMRegressor": classic.svm_regressor,
    "Scaler": classic.scaler,
}
EXPANSIONS: dict[tuple[str, str], Expansion] = {(MICROSOFT, name): f for name, f in _MICROSOFT.items()}
LOSSES: Table = {("", n): activations.class_loss for n in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")}
EXPANSIONS |= LOSSES
EXPANSIONS |= {(CLASSIC, name): f for name, f in _CLASSIC.items()}
REGISTERED: set[tuple[str, str]] = set()  # those that `register_expansion` has added, which no runtime need know

_LAYOUT = (
    "an inference-time layout. Optimise with ORT_ENABLE_EXTENDED or ORT_ENABLE_BASIC, or differentiate the model from "
    "before it was optimised"
)
_ROUNDS = "it computes in integers. ob.dequantize(model) makes the float model that it stands for"
_ORDERED = "it computes in integers. Differentiate the model from before it was quantised"
_CACHE = "it reads and writes a cache of keys in place. Export with MultiHeadAttention or standard operators"
_PACKED_TIME = "it works on packed batches. Export with LinearAttention and CausalConvWithState"
_DOMAINS = {"com.microsoft.nchwc": _LAYOUT, "com.ms.internal.nhwc": _LAYOUT}
_REFUSED = {
    "DecoderMaskedMultiHeadAttention": _CACHE,
    "DecoderMaskedSelfAttention": _CACHE,
    "DynamicQuantizeLSTM": _ROUNDS,
    "DynamicQuantizeMatMul": _ROUNDS,
    "GatedDeltaNet": _PACKED_TIME,
    "MatMulIntegerToFloat": _ROUNDS,
    "NhwcConv": _LAYOUT,
    "NhwcFusedConv": _LAYOUT,
    "NhwcMaxPool": _LAYOUT,
    "PagedAttention": _CACHE,
    "SparseAttention": _CACHE,
    "VarlenCausalConvWithState": _PACKED_TIME,
}


def reason_against(node: NodeProto) -> str:
    """Why an operator is not handled in any form, "" where nothing is said against it."""
    if node.domain == MICROSOFT and node.op_type.startswith(("QLinear", "QAttention", "QGemm", "QEmbed")):
        return _ROUNDS
    if node.domain == MICROSOFT and node.op_type.startswith("QOrdered"):
        return _ORDERED
    return _DOMAINS.get(node.domain, "") or (_REFUSED.get(node.op_type, "") if node.domain == MICROSOFT else "")
