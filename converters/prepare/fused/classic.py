"""Linear models, support vector machines and preprocessing of ai.onnx.ml, as onnxruntime computes them: in float32.

Coefficients and intercepts become initializers `<node>/coefficients` …, which can be trained. Where the binary case of
onnxruntime differs from the text of ONNX, onnxruntime is followed.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
from onnx import TensorProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer
from onnx_backprop.converters.prepare.fused.pairwise import pairwise_probabilities


def linear_regressor(op: Composer) -> str:
    """y = x·wᵀ + b, transformed where there are several targets."""
    targets = op.attribute("targets", 1)
    scores = _linear(op, targets, np.array(op.attribute("intercepts", []), np.float32))
    return _transformed(op, scores, targets)


def linear_classifier(op: Composer) -> list[str | None]:
    """The class of the highest of the scores x·wᵀ + b, and the scores.

    Of one score s: whether s > 0; and of two labels (1 - s, s), or (σ(-s), σ(s)) with LOGISTIC, else s.
    """
    intercepts = np.array(op.attribute("intercepts", []), np.float32)
    op.attribute("multi_class")
    if not intercepts.size:
        raise op.refuse("intercepts are needed, onnxruntime counts the classes by them. Give zeros")
    scores, labels = _linear(op, intercepts.size, intercepts), _labels(op)
    if intercepts.size > 1:
        label = op.ArgMax(scores, axis=1, keepdims=0)
        return [_label(op, labels, label), _transformed(op, scores, intercepts.size)]
    positive = op.Cast(op.Squeeze(op.Greater(scores, 0.0), [1]), to=TensorProto.INT64)
    if len(labels) == 2:
        return [_label(op, labels, positive), _binary(op, scores, 1.0)]
    _transformed(op, scores, 1)
    return [_label(op, np.array(["0", "1"], object) if labels.dtype == object else np.array([0, 1]), positive), scores]


def svm_regressor(op: Composer) -> str:
    """y = Σ coefficient · kernel(x, support vector) + ρ; of a one-class machine its sign. No transform is applied."""
    count, one_class = op.attribute("n_supports", 0), op.attribute("one_class", 0)
    coefficients, rho = (np.array(op.attribute(name), np.float32) for name in ("coefficients", "rho"))
    op.attribute("post_transform")
    if count:
        x = _kernel(op, _rows(op, np.size(op.attribute("support_vectors")) // count), count)
    else:
        x = _rows(op, coefficients.size)
        _ignore_kernel(op)
    shape = (1, count or coefficients.size)
    w = op.parameter("coefficients", coefficients.reshape(shape))
    y = op.Gemm(x, w, op.parameter("rho", rho[:1]), transB=1)
    return op.Where(op.Greater(y, 0.0), op.number(1.0, y), op.number(-1.0, y)) if one_class else y


def svm_classifier(op: Composer) -> list[str | None]:
    """A score for each pair of classes, i being voted for where it is above 0, else j; or one for each class.

    Without support vectors the scores are x·wᵀ + ρ₀. Of two classes with them there are (σ(-s), σ(s)) with LOGISTIC,
    (-s, s) without a transform, else (1 - s, s).
    """
    labels, counts = _labels(op), list(op.attribute("vectors_per_class", []))
    probable = bool(op.attribute("prob_a"))
    if not sum(counts):
        return _linear_machine(op, labels)
    kernels = _kernel(op, _rows(op, np.size(op.attribute("support_vectors")) // sum(counts)), sum(counts))
    scores = _pair_scores(op, kernels, counts)
    votes = _votes(op, scores, len(labels))
    label = _label(op, labels, op.ArgMax(votes, axis=1, keepdims=0))
    if probable:
        return [label, _transformed(op, pairwise_probabilities(op, scores, len(labels)), len(labels))]
    if len(labels) > 2:
        return [label, _transformed(op, scores, len(labels) * (len(labels) - 1) // 2)]
    return [label, _binary(op, scores, 0.0 if op.attribute("post_transform", "NONE") == "NONE" else 1.0)]


def normalizer(op: Composer) -> str:
    """y = x / max(x), x / Σ|x| or x / √Σx² along the last axis; x where that is 0."""
    x, norm = op.as_float32(op.input(0)), op.attribute("norm", "MAX")
    if norm == "L2":
        squares = op.ReduceSumSquare(x, [-1])
        size = op.Sqrt(op.Where(op.Equal(squares, 0.0), op.number(1.0, x), squares))
        return op.Div(x, size)
    size = op.ReduceMax(x, [-1]) if norm == "MAX" else op.ReduceL1(x, [-1])
    return op.Div(x, op.Where(op.Equal(size, 0.0), op.number(1.0, x), size))


def scaler(op: Composer) -> str:
    """y = (x - offset) · scale, both with one number or one for each feature."""
    x, offset, scale = op.as_float32(op.input(0)), op.attribute("offset"), op.attribute("scale")
    if np.size(scale) > 1 and (op.known.rank(x) or 2) > 2:
        raise op.refuse("with one number for each feature, x of one or two axes is handled. Reshape it")
    return op.Mul(op.Sub(x, np.float32(offset)), np.float32(scale))


def imputer(op: Composer) -> str:
    """y = x, but the imputed value where x is the replaced one, which may be NaN."""
    x, floats = op.input(0), op.attribute("imputed_value_floats")
    ints, whole = op.attribute("imputed_value_int64s"), op.attribute("replaced_value_int64", 0)
    replaced = op.attribute("replaced_value_float", 0.0)
    if (op.known.rank(x) or 2) > 2 and max(np.size(floats or 0), np.size(ints or 0)) > 1:
        raise op.refuse("with one number for each feature, x of one or two axes is handled. Reshape it")
    if op.known.element(x) == TensorProto.INT64:
        return op.Where(op.Equal(x, whole), np.int64(ints).reshape(-1), x)
    missing = op.IsNaN(x) if np.isnan(replaced) else op.Equal(x, replaced)
    return op.Where(missing, np.float32(floats).reshape(-1), x)


def array_feature_extractor(op: Composer) -> str:
    """y = x[…, indices]; of a vector as one row."""
    x = op.input(0)
    rank = op.rank(x, "by ArrayFeatureExtractor")
    y = op.Gather(x, op.Reshape(op.input(1), [-1]), axis=-1)
    return op.Unsqueeze(y, [0]) if rank == 1 else y


def _rows(op: Composer, features: int) -> str:
    """x in float32 as (N, F); a vector is one row."""
    x = op.as_float32(op.input(0))
    return x if op.known.rank(x) == 2 else op.Reshape(x, [-1, features])


def _linear(op: Composer, targets: int, intercepts: np.ndarray) -> str:
    coefficients = np.array(op.attribute("coefficients"), np.float32)
    features = coefficients.size // targets
    w = op.parameter("coefficients", coefficients[: targets * features].reshape(targets, features))
    b = op.parameter("intercepts", intercepts[:targets]) if intercepts.size else None
    return op.Gemm(_rows(op, features), w, b, transB=1)


def _transformed(op: Composer, scores: str, count: int) -> str:
    """The scores after `post_transform`, which onnxruntime applies where there are several."""
    name = op.attribute("post_transform", "NONE")
    if name == "PROBIT":
        raise op.refuse("the post_transform PROBIT is not handled; NONE, LOGISTIC, SOFTMAX and SOFTMAX_ZERO are")
    if count == 1 or name == "NONE":
        return scores
    if name == "SOFTMAX_ZERO":
        return _softmax_zero(op, scores)
    return op.Sigmoid(scores) if name == "LOGISTIC" else op.Softmax(scores, axis=-1)


def _softmax_zero(op: Composer, scores: str) -> str:
    """e / Σe of the scores beyond ±1e-7, e = exp(s - max); the others take no part and stay close to 0."""
    top, zero = op.ReduceMax(scores, [-1]), op.number(0.0, scores)
    counts = op.Greater(op.Abs(scores), 1e-7)
    powers = op.Where(counts, op.Exp(op.Sub(scores, top)), zero)
    rest = op.Where(counts, zero, op.Mul(scores, op.Exp(op.Neg(top))))
    return op.Div(op.Add(powers, rest), op.ReduceSum(powers, [-1]))


def _binary(op: Composer, score: str, total: float) -> str:
    """(total - s, s), or (σ(-s), σ(s)) with LOGISTIC."""
    _transformed(op, score, 1)
    if op.attribute("post_transform", "NONE") == "LOGISTIC":
        return op.Concat(op.Sigmoid(op.Neg(score)), op.Sigmoid(score), axis=1)
    return op.Concat(op.Sub(op.number(total, score), score) if total else op.Neg(score), score, axis=1)


def _labels(op: Composer) -> np.ndarray:
    texts, numbers = op.attribute("classlabels_strings"), op.attribute("classlabels_ints")
    return np.array([t.decode() for t in texts], object) if texts else np.array(numbers or [], np.int64)


def _label(op: Composer, labels: np.ndarray, index: str) -> str | None:
    """labels[index]; None where nobody asks for labels."""
    if not op.wants(0):
        return None
    if labels.dtype == object:
        texts = [t.encode() for t in labels]
        words = op.Constant(value=helper.make_tensor("", TensorProto.STRING, [len(texts)], texts))
    else:
        words = op.constant(labels)
    return op.Gather(words, index)


def _kernel(op: Composer, x: str, count: int) -> str:
    """kernel(x, v) for each support vector v: (N, `count`).

    LINEAR x·v, POLY (γ·x·v + c)^d, RBF exp(-γ·|x - v|²), SIGMOID tanh(γ·x·v + c).
    """
    vectors = np.array(op.attribute("support_vectors"), np.float32).reshape(count, -1)
    gamma, offset, degree = op.attribute("kernel_params") or (0.0, 0.0, 0.0)
    kind = op.attribute("kernel_type", "LINEAR")
    if kind == "RBF":
        difference = op.Sub(op.Unsqueeze(x, [1]), vectors)
        return op.Exp(op.Mul(op.ReduceSumSquare(difference, [2], keepdims=0), -gamma))
    product = op.MatMul(x, vectors.T)
    if kind == "LINEAR":
        return product
    shifted = op.Add(op.Mul(product, gamma), offset)
    return op.Pow(shifted, degree) if kind == "POLY" else op.Tanh(shifted)


def _ignore_kernel(op: Composer) -> None:
    for name in ("support_vectors", "kernel_type", "kernel_params"):
        op.attribute(name)


def _pair_scores(op: Composer, kernels: str, counts: Sequence[int]) -> str:
    """For classes i < j: Σ over i's vectors of row j - 1 of the coefficients, Σ over j's of row i, and ρ."""
    classes, total = len(counts), sum(counts)
    coefficients = np.array(op.attribute("coefficients"), np.float32)[: (classes - 1) * total].reshape(
        classes - 1, total
    )
    bounds = [slice(*b) for b in pairwise(np.cumsum([0, *counts]))]
    pairs = list(combinations(range(classes), 2))
    weights = np.zeros((len(pairs), total), np.float32)
    for n, (i, j) in enumerate(pairs):
        weights[n, bounds[i]] = coefficients[j - 1, bounds[i]]
        weights[n, bounds[j]] = coefficients[i, bounds[j]]
    rho = np.array(op.attribute("rho"), np.float32)[: len(pairs)]
    return op.Gemm(kernels, op.parameter("coefficients", weights), op.parameter("rho", rho), transB=1)


def _votes(op: Composer, scores: str, classes: int) -> str:
    """How many of the pairs each class wins."""
    pairs = list(combinations(range(classes), 2))
    for_first, for_second = (np.zeros((len(pairs), classes), np.float32) for _ in range(2))
    for n, (i, j) in enumerate(pairs):
        for_first[n, i] = for_second[n, j] = 1
    first = op.Cast(op.Greater(scores, 0.0), to=TensorProto.FLOAT)
    return op.Add(op.MatMul(first, for_first), op.MatMul(op.Sub(op.number(1.0, first), first), for_second))


def _linear_machine(op: Composer, labels: np.ndarray) -> list[str | None]:
    """Of two classes the second is taken where the higher score exceeds 0, or 1/2 if no coefficient is negative."""
    coefficients = np.array(op.attribute("coefficients"), np.float32)
    classes = len(labels)
    _ignore_kernel(op)
    features = coefficients.size // classes
    w = op.parameter("coefficients", coefficients[: classes * features].reshape(classes, features))
    rho = op.parameter("rho", np.array(op.attribute("rho"), np.float32)[:1])
    scores = op.Gemm(_rows(op, features), w, rho, transB=1)
    index = op.ArgMax(scores, axis=1, keepdims=0)
    if classes == 2:
        highest = op.ReduceMax(scores, [1], keepdims=0)
        positive = bool((coefficients >= 0).all())
        second = op.GreaterOrEqual(highest, 0.5) if positive else op.Greater(highest, 0.0)
        index = op.Where(second, op.constant(np.array(1)), index)
    return [_label(op, labels, index), _transformed(op, scores, classes)]
