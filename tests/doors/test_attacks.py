"""`attack` beside formulas and torchattacks, `counterexample` on properties of both versions of VNN-LIB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from tests.doors.models import classifier, images, with_weights
from tests.doors.torch_twin import twin

EPSILON = 0.1


def loss(f: ob.Function, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    logits = f(x)[0].astype(np.float64)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), labels]


@pytest.mark.parametrize("method", ["fgsm", "pgd"])
@pytest.mark.parametrize("norm", [np.inf, 2])
def test_loss_norm_and_bounds(method: str, norm: float) -> None:
    f, x = ob.function(classifier()), images(20)
    labels = f(x)[0].argmax(axis=1)
    adversarial = ob.attack(f, x, labels, epsilon=EPSILON, method=method, norm=norm)
    assert (adversarial.shape, adversarial.dtype) == (x.shape, x.dtype)
    lengths = np.linalg.norm((adversarial - x).reshape(20, -1), ord=norm, axis=1)
    assert (lengths <= EPSILON * (1 + 1e-5)).all()
    assert lengths.max() > EPSILON / 2
    assert adversarial.min() >= 0
    assert adversarial.max() <= 1
    assert (loss(f, adversarial, labels) > loss(f, x, labels)).mean() >= 0.9
    other = (labels + 1) % 3
    towards = ob.attack(f, x, other, epsilon=EPSILON, method=method, norm=norm, targeted=True)
    assert (loss(f, towards, other) < loss(f, x, other)).mean() >= 0.9
    again = [ob.attack(f, x, labels, epsilon=EPSILON, random_start=True, steps=1, norm=norm, seed=s) for s in (1, 1, 2)]
    assert (again[0] == again[1]).all()
    assert (again[0] != again[2]).any()


def test_the_best_attack_on_a_linear_model() -> None:
    """Of logits x W with two classes the worst δ of a ball is ± epsilon · sign(w₁ - w₀), or along it."""
    w = np.random.default_rng(0).standard_normal((6, 2))
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        linear (double[N, 6] x) => (double[N, 2] y) { y = MatMul (x, W) }""")
    model, x = with_weights(model, W=w), np.full((2, 6), 0.5)
    towards = np.array([1, -1])[:, None] * (w[:, 1] - w[:, 0])  # of the rows, which are of the classes 0 and 1
    for norm, best in ((np.inf, np.sign(towards)), (2, towards / np.linalg.norm(towards, axis=1, keepdims=True))):
        for method in ("fgsm", "pgd"):
            adversarial = ob.attack(model, x, [0, 1], epsilon=0.1, method=method, norm=norm, random_start=False)
            np.testing.assert_allclose(adversarial, x + 0.1 * best, err_msg=f"{method} {norm}")


def test_invalid_use_is_refused() -> None:
    f, x = ob.function(classifier()), images()
    labels = np.zeros(5, int)
    for arguments, message in (
        ({"method": "cw"}, "expected method 'fgsm' or 'pgd'"),
        ({"norm": 1}, "norm inf or 2, got 'pgd' and 1"),
        ({"bounds": (0.2, 1)}, r"bounds: x has numbers outside of \(0.2, 1\)"),
        ({"y": labels[:2]}, "y: expected one class for each row"),
        ({"y": labels + 3}, "y: expected classes below 3"),
        ({"bounds": (1, 0)}, r"bounds: expected the lower and the higher one, or None, got \(1, 0\)"),
        ({"epsilon": -0.1}, "epsilon: expected a number of 0 or more, got -0.1"),
        ({"epsilon": np.nan}, "epsilon: expected a number of 0 or more, got nan"),
        ({"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"step_size": -0.05}, "step_size: expected a number above 0, got -0.05"),
        ({"step_size": 0}, "step_size: expected a number above 0, got 0"),
        ({"method": "fgsm", "steps": 3}, "steps: goes with pgd, not with fgsm. Leave it out"),
        ({"method": "fgsm", "seed": 3}, "seed: goes with pgd, not with fgsm"),
    ):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            ob.attack(f, x, **{"y": labels, "epsilon": 0.1, **arguments})
    with pytest.raises(ob.InvalidArgumentError, match="restarts: expected a whole number of 1 or more, got 0"):
        ob.counterexample(f, "property.vnnlib", restarts=0)


def test_torchattacks() -> None:
    torchattacks: Any = pytest.importorskip("torchattacks", minversion="3.5", reason="needs torchattacks: make doors")
    torch: Any = pytest.importorskip("torch")
    network, x, f = twin(classifier()), images(20), ob.function(classifier())
    labels = f(x)[0].argmax(axis=1)
    tensors = torch.from_numpy(x), torch.from_numpy(labels)
    for theirs, ours in (
        (torchattacks.FGSM(network, eps=EPSILON), {"method": "fgsm"}),
        (
            torchattacks.PGD(network, eps=EPSILON, alpha=0.02, steps=7, random_start=False),
            {"step_size": 0.02, "steps": 7},
        ),
        (
            torchattacks.PGDL2(network, eps=0.5, alpha=0.2, steps=7, random_start=False),
            {"step_size": 0.2, "steps": 7, "norm": 2, "epsilon": 0.5},
        ),
    ):
        adversarial = ob.attack(f, x, labels, **{"epsilon": EPSILON, "random_start": False, **ours})
        np.testing.assert_allclose(adversarial, theirs(*tensors).numpy(), atol=1e-5, err_msg=repr(theirs))


def test_art() -> None:
    """The Adversarial Robustness Toolbox's gradient methods on the same twin.

    In the Euclidean norm without bounds: it clips to these before it goes back into the ball, torchattacks behind that.
    """
    evasion: Any = pytest.importorskip("art.attacks.evasion", reason="needs adversarial-robustness-toolbox: make doors")
    torch: Any = pytest.importorskip("torch")
    estimators: Any = pytest.importorskip("art.estimators.classification")
    x, f, loss = images(20), ob.function(classifier()), torch.nn.CrossEntropyLoss(reduction="sum")
    labels = f(x)[0].argmax(axis=1)
    for norm, epsilon, step, bounds in ((np.inf, EPSILON, 0.02, (0, 1)), (2, 0.5, 0.2, None)):
        network = estimators.PyTorchClassifier(
            twin(classifier()), loss, (1, 6, 6), 3, clip_values=bounds, device_type="cpu"
        )
        for targeted in (False, True):
            common = {"norm": norm, "eps": epsilon, "targeted": targeted}
            fast = evasion.FastGradientMethod(network, **common)
            pgd = evasion.ProjectedGradientDescent(network, **common, eps_step=step, max_iter=7, verbose=False)
            y, shared = (labels + targeted) % 3, {"epsilon": epsilon, "norm": norm, "bounds": bounds}
            for theirs, ours in ((fast, {"method": "fgsm"}), (pgd, {"step_size": step, "steps": 7})):
                adversarial = ob.attack(f, x, y, targeted=targeted, random_start=False, **shared, **ours)
                expected = theirs.generate(x, np.eye(3, dtype="f")[y])
                np.testing.assert_allclose(adversarial, expected, atol=1e-5, err_msg=f"{theirs} {norm} {targeted}")


BOX = "".join(
    f"(declare-const X_{n} Real)(assert (>= X_{n} -1))(assert (<= X_{n} 1.0)) ; a comment ()\n" for n in (0, 1)
)
OUTPUTS = "(declare-const Y_0 Real)(declare-const Y_1 Real)\n"


def saddle(dtype: str = "float") -> ModelProto:
    """y = (x₀ x₁ + 0.1, x₀ - x₁)."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        saddle ({dtype}[1, 2] x) => ({dtype}[1, 2] y) {{
            a, b = Split <axis = 1, num_outputs = 2> (x) p = Mul (a, b) q = Add (p, shift) d = Sub (a, b)
            y = Concat <axis = 1> (q, d) }}""")
    return with_weights(model, shift=np.array([0.1], "f" if dtype == "float" else "d"))


@pytest.mark.parametrize(
    ("prop", "holds"),
    [
        ("(assert (>= Y_0 1.0))", lambda _, y: y[0] >= 1),
        ("(assert (or (and (<= Y_0 -0.8) (<= Y_1 (- 1.8))) (>= Y_0 5)))", lambda _, y: y[0] <= -0.8 and y[1] <= -1.8),
        (
            "(assert (<= (+ Y_0 (* 2.0 X_0)) -1.8))(assert (<= X_1 0.25))",
            lambda x, y: y[0] + 2 * x[0] <= -1.8 and x[1] <= 0.25,
        ),
        ("(assert (or (<= Y_0 -3) (>= (- Y_1 X_0) 0.9)))", lambda x, y: y[1] - x[0] >= 0.9),
        ("(assert (>= Y_0 1.2))", None),
        ("(assert (>= X_0 2))", None),
    ],
    ids=range(6),
)
def test_counterexamples(prop: str, holds: Any, tmp_path: Path) -> None:
    file = tmp_path / "prop.vnnlib"
    file.write_text(BOX + OUTPUTS + prop, "utf-8")
    for dtype in ("float", "double"):
        f = ob.function(saddle(dtype))
        example = ob.counterexample(f, file, restarts=5)
        if holds is None:
            assert example is None
            continue
        assert example is not None
        (y,) = f(example)
        assert holds(example[0].astype(float), y[0].astype(float)), (example, y)
        assert np.abs(example).max() <= 1
        np.testing.assert_array_equal(example, ob.counterexample(f, file, restarts=5))


def test_bounds_that_float32_has_not(tmp_path: Path) -> None:
    """One float32 lies between them; those next to it, nearer to the bounds than it, lie outside."""
    file, f = tmp_path / "prop.vnnlib", ob.function(saddle())
    file.write_text(BOX + OUTPUTS + "(assert (<= X_0 0.1))(assert (>= X_0 0.0999999925))", "utf-8")
    for seed in range(12):
        example = ob.counterexample(f, file, seed=seed)
        assert example is not None
        assert 0.0999999925 <= float(example[0, 0]) <= 0.1 < float(np.float32(0.1)), seed


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("(assert (>= Y_7 1))", ob.InvalidArgumentError, "Y_7 is none of the 2 numbers"),
        ("(assert (>= Z_0 1))", ob.InvalidArgumentError, "expected a number, X_i or Y_i, got 'Z_0'"),
        ("(assert (>= (* Y_0 Y_1) 1))", ob.UnsupportedError, "expected a linear expression"),
        ("(assert (not (>= Y_0 1)))", ob.UnsupportedError, "got 'not'"),
        ("(assert", ob.InvalidArgumentError, "is no VNN-LIB file"),
        (")", ob.InvalidArgumentError, "is no VNN-LIB file"),
        ("(assert " + "(and " * 5000 + ")" * 5001, ob.OnnxBackpropError, "VNN-LIB|too deep"),
        ("(assert (or (<= Y_0 1) (<= Y_1 1)))" * 40, ob.UnsupportedError, "the property has 1099511627776 cases"),
        ("(check-sat)", ob.UnsupportedError, "expected declare-const and assert"),
    ],
)
def test_files_that_are_refused(text: str, error: Any, message: str, tmp_path: Path) -> None:
    f, file = ob.function(saddle()), tmp_path / "prop.vnnlib"
    file.write_text(BOX + OUTPUTS + text, "utf-8")
    with pytest.raises(error, match=message):
        ob.counterexample(f, file)
    file.write_text(OUTPUTS + "(assert (>= Y_0 1))", "utf-8")
    with pytest.raises(ob.InvalidArgumentError, match="X_0 has no bounds"):
        ob.counterexample(f, file)
    with pytest.raises(ob.InvalidArgumentError, match="cannot read"):
        ob.counterexample(f, tmp_path / "none")


def test_version_2(tmp_path: Path) -> None:
    pytest.importorskip("vnnlib", reason="needs vnnlib: make doors")
    file = tmp_path / "prop.vnnlib"
    file.write_text("""(vnnlib-version <2.0>)
        (declare-network N (declare-input X Real [1,2]) (declare-output Y Real [1,2]))
        (assert (<= X[0,0] 1.0)) (assert (>= X[0,0] -1.0)) (assert (<= X[0,1] 0.5)) (assert (>= X[0,1] -1.0))
        (assert (or (>= Y[0,0] 5.0) (<= Y[0,1] -1.25)))""")
    example = ob.counterexample(saddle(), file)
    assert example is not None
    assert example[0, 0] - example[0, 1] <= -1.25
    file.write_text(file.read_text().replace("[1,2]", "[1,3]"))
    with pytest.raises(ob.InvalidArgumentError, match="has 3 inputs|cannot be read|no bounds"):
        ob.counterexample(saddle(), file)
