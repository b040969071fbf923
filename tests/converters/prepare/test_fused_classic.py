"""Linear models, support vector machines and preprocessing of ai.onnx.ml, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.adjoint import run
from tests.support.fused_checks import check_all_fused, check_fused, fused, one_node

RNG = np.random.default_rng(5)
ML = {"domain": "ai.onnx.ml"}
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
LABELS = {"ints": {"classlabels_ints": [7, -3, 12]}, "texts": {"classlabels_strings": ["dog", "cat", "bird"]}}


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return (
        RNG.standard_normal(shape).astype(dtype) if np.dtype(dtype).kind == "f" else RNG.integers(-5, 5, shape, dtype)
    )


def numbers(*shape: int) -> list[float]:
    return draw(*shape).ravel().tolist()


def labels(kind: str, count: int) -> dict[str, list]:
    """The first labels; none for 0, when onnxruntime answers 0 and 1."""
    if not count:
        return {}
    return {name: values[:count] for name, values in LABELS[kind].items()}


def test_linear_regressor() -> None:
    cases = []
    for transform, targets, intercepts, shape in product(TRANSFORMS, [1, 3], [False, True], [(5, 4), (4,)]):
        more = {"intercepts": numbers(targets)} if intercepts else {}
        settings = {"coefficients": numbers(targets, 4), "targets": targets, "post_transform": transform, **more}
        cases.append(fused("LinearRegressor", {"x": draw(*shape)}, ["x"], **ML, **settings))
    check_all_fused(cases)


def test_linear_classifier() -> None:
    cases = []
    sizes = [(3, 3), (2, 2), (1, 2), (1, 0)]
    for transform, kind, (rows, classes) in product(TRANSFORMS, ["ints", "texts"], sizes):
        settings = {"coefficients": numbers(rows, 4), "intercepts": numbers(rows), "post_transform": transform}
        settings |= labels(kind, classes)
        cases.append(fused("LinearClassifier", {"x": draw(6, 4)}, ["x"], 2, **ML, **settings))
    check_all_fused(cases)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_linear_classifier_of_other_types(dtype: type) -> None:
    settings = {"coefficients": numbers(3, 4), "intercepts": numbers(3), "classlabels_ints": [0, 1, 2]}
    check_fused("LinearClassifier", {"x": draw(6, 4, dtype=dtype)}, [], 2, **ML, **settings)
    check_fused("LinearClassifier", {"x": draw(4, dtype=dtype)}, [], 2, **ML, **settings)


def test_coefficients_can_be_trained() -> None:
    settings = {"coefficients": numbers(3, 4), "intercepts": numbers(3), "classlabels_ints": [0, 1, 2]}
    model = one_node("LinearClassifier", {"x": draw(6, 4)}, 2, **ML, **settings)
    graph = ob.backward(model, wrt=["node/coefficients", "node/intercepts"], of=["y1"])
    feeds = {"x": draw(6, 4), "y1_grad": draw(6, 3)}
    outputs = dict(zip([o.name for o in graph.graph.output], run(ob.session(graph), feeds), strict=True))
    expected = feeds["y1_grad"].T @ feeds["x"]
    np.testing.assert_allclose(outputs["node/coefficients_grad"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs["node/intercepts_grad"], feeds["y1_grad"].sum(0), rtol=1e-5, atol=1e-5)


def test_scores_about_zero_take_no_part_in_softmax_zero() -> None:
    settings = {"coefficients": np.eye(3).ravel().tolist(), "targets": 3, "post_transform": "SOFTMAX_ZERO"}
    x = np.float32([[0, 1, 2], [0, 0, -1], [1e-8, 3, -1]])
    check_fused("LinearRegressor", {"x": x}, **ML, **settings)


KERNELS = [("LINEAR", 0), ("POLY", 2), ("POLY", 3), ("RBF", 0), ("SIGMOID", 0)]


def test_svm_regressor() -> None:
    cases = []
    for (kernel, degree), one_class in product(KERNELS, [0, 1]):
        settings = {"kernel_type": kernel, "kernel_params": [0.4, 0.3, float(degree)], "n_supports": 3}
        settings |= {"coefficients": numbers(3), "support_vectors": numbers(3, 4), "rho": numbers(1)}
        settings |= {"one_class": one_class, "tolerance": 1e-4}
        cases.append(fused("SVMRegressor", {"x": draw(5, 4)}, [] if one_class else ["x"], **ML, **settings))
    check_all_fused(cases)


def test_linear_svm_regressor() -> None:
    settings = {"kernel_params": [0.0, 0.0, 0.0], "n_supports": 0, "coefficients": numbers(4), "rho": numbers(1)}
    check_fused("SVMRegressor", {"x": draw(5, 4)}, ["x"], **ML, **settings)


def test_svm_classifier() -> None:
    cases = []
    sizes = [("ints", [2, 3, 1]), ("ints", [2, 3]), ("texts", [2, 3])]
    for transform, (kernel, degree), (kind, counts) in product(TRANSFORMS, KERNELS, sizes):
        settings = {"kernel_type": kernel, "kernel_params": [0.4, 0.3, float(degree)], "vectors_per_class": counts}
        settings |= {"coefficients": numbers(len(counts) - 1, sum(counts)), "support_vectors": numbers(sum(counts), 4)}
        settings |= {"rho": numbers(len(counts) * (len(counts) - 1) // 2), "post_transform": transform}
        settings |= labels(kind, len(counts))
        cases.append(fused("SVMClassifier", {"x": draw(7, 4)}, ["x"], 2, **ML, **settings, tolerance=1e-4))
    check_all_fused(cases)


def test_probabilities_of_an_svm_classifier() -> None:
    """SVC(probability=True): of pairs that agree, that contradict each other, and that are certain."""
    cases = []
    spreads = [("RBF", 1.0), ("LINEAR", 1.0), ("LINEAR", 30.0)]
    for counts, (kernel, spread) in product([[2, 3], [2, 3, 1], [1, 2, 1, 3]], spreads):
        classes = len(counts)
        pairs = classes * (classes - 1) // 2
        settings = {"kernel_type": kernel, "kernel_params": [0.4, 0.3, 0.0], "vectors_per_class": counts}
        settings |= {"coefficients": numbers(classes - 1, sum(counts)), "support_vectors": numbers(sum(counts), 4)}
        settings |= {"rho": numbers(pairs), "prob_a": [-1.0 - n / 4 for n in range(pairs)], "prob_b": numbers(pairs)}
        settings |= {"classlabels_ints": [7 - n for n in range(classes)]}
        feeds = {"x": spread * draw(9, 4)}
        wrt = ["x"] if spread == 1 else []
        cases.append(fused("SVMClassifier", feeds, wrt, 2, **ML, **settings, tolerance=1e-4))
    check_all_fused(cases)


def test_linear_svm_classifier() -> None:
    cases = []
    types = [np.float32, np.float64, np.int64]
    for dtype, transform, classes, sign in product(types, TRANSFORMS, [1, 2, 3], [-1, 1]):
        coefficients = [sign * abs(n) for n in numbers(classes, 4)]
        settings = {"kernel_params": [0.0, 0.0, 0.0], "coefficients": coefficients, "rho": [0.2]}
        settings |= {"post_transform": transform, **labels("ints", classes)}
        cases.append(fused("SVMClassifier", {"x": draw(12, 4, dtype=dtype)}, [], 2, **ML, **settings))
    check_all_fused(cases)


DTYPES = [np.float32, np.float64, np.int64, np.int32]


def floats(feeds) -> list[str]:
    return ["x"] if feeds["x"].dtype == np.float32 else []


def test_normalizer() -> None:
    cases = []
    for norm, dtype in product(["MAX", "L1", "L2"], DTYPES):
        feeds = {"x": draw(5, 4, dtype=dtype)}
        x = feeds["x"].copy()
        x[2] = 0
        cases.append(fused("Normalizer", feeds, floats(feeds), **ML, norm=norm))
        cases += [fused("Normalizer", {"x": a}, **ML, norm=norm) for a in (x, x[0])]
    check_all_fused(cases)


def test_scaler() -> None:
    cases = []
    for count, dtype, shape in product([1, 4], DTYPES, [(5, 4), (4,)]):
        feeds = {"x": draw(*shape, dtype=dtype)}
        cases.append(fused("Scaler", feeds, floats(feeds), **ML, offset=numbers(count), scale=numbers(count)))
    check_all_fused(cases)


def test_imputer() -> None:
    cases = []
    for replaced, count in product([-1.0, float("nan")], [1, 4]):
        x = draw(5, 4)
        x[1, 2] = x[3, 0] = replaced
        settings = {"imputed_value_floats": numbers(count), "replaced_value_float": replaced}
        cases.append(fused("Imputer", {"x": x}, **ML, **settings))
        cases.append(fused("Imputer", {"x": draw(5, 4)}, ["x"], **ML, **settings))
        ints = {"imputed_value_int64s": list(range(count)), "replaced_value_int64": -1}
        cases.append(fused("Imputer", {"x": draw(5, 4, dtype=np.int64)}, **ML, **ints))
    check_all_fused(cases)


def test_array_feature_extractor() -> None:
    cases = []
    for shape, indices, rows in product([(5, 4), (4,), (2, 3, 4)], [[0], [3, 0, 0]], [False, True]):
        feeds = {"x": draw(*shape), "indices": np.int64([indices] if rows else indices)}
        cases.append(fused("ArrayFeatureExtractor", feeds, ["x"], **ML))
    check_all_fused(cases)


REFUSED = [
    ("LinearRegressor", {"coefficients": [1.0] * 4, "post_transform": "PROBIT"}, "PROBIT is not handled"),
    (
        "SVMClassifier",
        {"prob_a": [1.0], "prob_b": [1.0], "classlabels_ints": [0, 1], "rho": [0.0], "coefficients": [1.0] * 8},
        "the attribute 'prob_b' is not handled",
    ),
]


@pytest.mark.parametrize(("op_type", "attributes", "sentence"), REFUSED)
def test_invalid_use_is_refused(op_type: str, attributes, sentence: str) -> None:
    model = one_node(op_type, {"x": draw(5, 4)}, 1 if op_type == "LinearRegressor" else 2, **ML, **attributes)
    with pytest.raises(UnsupportedError, match=sentence):
        ob.backward(model, wrt=["x"], of=[model.graph.output[-1].name])


TREE = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, -1.0],
    "n_targets": 1,
}


def test_a_tree_says_that_its_derivative_is_zero() -> None:
    model = one_node("TreeEnsembleRegressor", {"x": draw(5, 4)}, **ML, **TREE)
    model.graph.output[0].type.tensor_type.elem_type = 1
    explanation = ob.explain_gradients(model)
    assert "piecewise constant" in str(explanation)
    assert not explanation.variables[0].reached
