"""`attack` and `counterexample`: inputs near others that a classifier gets wrong, or that break a VNN-LIB property."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.doors.attribution import arguments_of, as_function, check_effects
from onnx_backprop.doors.function import Arguments, Function
from onnx_backprop.doors.vnnlib import Case, read
from onnx_backprop.opset.core.errors import InvalidArgumentError, require_numbers

Array = np.ndarray[Any, Any]
_PGD = ("pgd",)
_OPTIONS = {"steps": (10, _PGD), "step_size": (None, _PGD), "seed": (0, _PGD)}  # the default of each, and what reads it


def attack(
    model: ModelProto | ir.Model | str | Path | Function,
    x: Array | Mapping[str, Array],
    y: Array,
    *,
    epsilon: float,
    method: str = "pgd",
    norm: float = np.inf,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    targeted: bool = False,
    steps: int = 10,
    step_size: float | None = None,
    random_start: bool | None = None,
    seed: int = 0,
    **arguments: Unpack[Arguments],
) -> Array:
    """x + δ with |δ| <= epsilon for each row and a larger cross entropy with the classes y than x.

        adversarial = ob.attack("imagenet.onnx", x, labels, epsilon=8 / 255, of=["logits"])

    With the gradient g of the loss, "fgsm" takes one step of epsilon · sign(g). "pgd" takes `steps` steps of
    step_size · sign(g) and projects each back into the ball and the bounds. norm=2: g / |g| instead of sign(g).

    Args:
        model, x, arguments: as of `ob.attribute`; the output is (rows, classes), of logits.
        bounds: the range of the numbers of x + δ; None for none.
        targeted: y are other classes, to be made more likely.
        step_size: default: 2.5 · epsilon / steps.
        random_start: start at a random point of the ball, seeded by `seed`. Default: for pgd.

    Raises: InvalidArgumentError for other methods, norms and shapes, options that the method does not read, and numbers
    out of range; what `ob.function` does.
    """
    if method not in ("fgsm", "pgd") or norm not in (np.inf, 2):
        raise InvalidArgumentError(f"expected method 'fgsm' or 'pgd' and norm inf or 2, got {method!r} and {norm!r}")
    drawn = {} if random_start else {"seed": seed}
    check_effects(method, {"steps": steps, "step_size": step_size, **drawn}, _OPTIONS)
    require_numbers(1, whole=True, steps=steps)
    require_numbers(0, epsilon=epsilon)
    require_numbers(0, whole=True, seed=seed)
    if step_size is not None and not 0 < step_size < np.inf:
        raise InvalidArgumentError(f"expected a number above 0, got {step_size!r}", "step_size")
    if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
        raise InvalidArgumentError(f"expected the lower and the higher one, or None, got {bounds!r}", "bounds")
    f = as_function(model, arguments)
    arrays = arguments_of(f, x)
    place = f.inputs.index(f.variables[0])
    start = np.asarray(arrays[place], f.types[f.inputs[place]])
    if bounds is not None and not ((bounds[0] <= start) & (start <= bounds[1])).all():
        raise InvalidArgumentError(f"x has numbers outside of {bounds}: scale it, or give the model's own", "bounds")
    low, high = bounds or (-np.inf, np.inf)
    labels, sign = np.asarray(y), -1 if targeted else 1
    count, size = (1, epsilon) if method == "fgsm" else (steps, step_size or 2.5 * epsilon / steps)
    at = start
    if random_start if random_start is not None else method == "pgd":
        at = np.clip(start + _random(np.random.default_rng(seed), start.shape, epsilon, norm), low, high)
    for _ in range(count):
        now = [*arrays[:place], at.astype(start.dtype), *arrays[place + 1 :]]
        g = sign * f.vjp(*now, _cross_entropy_gradient(f(*now)[0], labels))[0]
        step = np.sign(g) if norm == np.inf else g / np.maximum(_lengths(g), np.finfo(g.dtype).tiny)
        at = np.clip(start + _into_ball(at + size * step - start, epsilon, norm), low, high)
    return at.astype(start.dtype)


def counterexample(
    model: ModelProto | ir.Model | str | Path | Function,
    prop: str | Path,
    *,
    restarts: int = 20,
    steps: int = 100,
    seed: int = 0,
    **arguments: Unpack[Arguments],
) -> Array | None:
    """An input x for which a VNN-LIB property's assertions hold, searched by PGD from random points, or None.

    The property describes what must not happen, as in the competition: a result refutes it, None proves nothing.
    Assertions are bounds of X and linear inequalities of X and Y, joined by `and` and `or`. VNN-LIB 2 needs `pip
    install vnnlib`.

    Args:
        model, arguments: as of `ob.attribute`; one input and one output, whose unknown lengths are 1.
        prop: the file. restarts, steps: for each case of the disjunction. seed: of the points.

    Returns: x, after running the model on it; the inequalities of its output hold exactly.
    """
    require_numbers(1, whole=True, restarts=restarts, steps=steps)
    require_numbers(0, whole=True, seed=seed)
    f = as_function(model, arguments)
    if len(f.inputs) != 1 or len(f.outputs) != 1 or (declared := f.shapes[f.inputs[0]]) is None:
        raise InvalidArgumentError(f"expected one input and one output, got {f}. Name the output in `of`")
    shape = tuple(n or 1 for n in declared)
    (result,) = f.lengths(shape)
    rng = np.random.default_rng(seed)
    for case in read(Path(prop), prod(shape), prod(result)):
        for _ in range(restarts):
            x = _search(f, case, shape, steps, rng)
            if x is not None:
                return x
    return None


def _search(f: Function, case: Case, shape: tuple[int, ...], steps: int, rng: np.random.Generator) -> Array | None:
    dtype = f.types[f.inputs[0]]
    low, high = _inside(case.low, dtype, up=True), _inside(case.high, dtype, up=False)
    if (low > high).any():
        return None
    x = rng.uniform(low, high).astype(dtype)
    for step in range(steps + 1):
        x = np.clip(x, low, high)
        (y,) = f(x.reshape(shape))
        excess = case.of_x @ x.astype(np.float64) + case.of_y @ y.ravel().astype(np.float64) - case.limit
        if (excess <= 0).all():
            return x.reshape(shape)
        worst = int(np.nanargmax(excess)) if not np.isnan(excess).all() else 0
        (g,) = f.vjp(x.reshape(shape), case.of_y[worst].reshape(y.shape))
        x = (x - (high - low) * 0.25 * (1 - step / (steps + 1)) * np.sign(g.ravel() + case.of_x[worst])).astype(dtype)
    return None


def _inside(bound: Array, dtype: np.dtype[Any], *, up: bool) -> Array:
    """A bound in the model's type, rounded into the box."""
    rounded = bound.astype(dtype)
    outside = rounded.astype(np.float64) < bound if up else rounded.astype(np.float64) > bound
    return np.where(outside, np.nextafter(rounded, dtype.type(np.inf if up else -np.inf)), rounded)


def _cross_entropy_gradient(logits: Array, labels: Array) -> Array:
    """softmax(z) - onehot(y), the gradient of the sum over rows."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"y: expected one class for each row of an output (rows, classes), got {labels.dtype} of the shape "
            f"{labels.shape} and the output {logits.shape}"
        )
    if not ((labels >= 0) & (labels < logits.shape[1])).all():
        raise InvalidArgumentError(f"y: expected classes below {logits.shape[1]}, got {labels.min()} to {labels.max()}")
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True) - np.eye(logits.shape[1], dtype=logits.dtype)[labels]


def _lengths(d: Array) -> Array:
    """|d|₂ of each row."""
    return np.sqrt((d.astype(np.float64) ** 2).sum(axis=tuple(range(1, d.ndim)), keepdims=True))


def _into_ball(d: Array, epsilon: float, norm: float) -> Array:
    if norm == np.inf:
        return np.clip(d, -epsilon, epsilon)
    return d * np.minimum(1, epsilon / np.maximum(_lengths(d), np.finfo(np.float64).tiny))


def _random(rng: np.random.Generator, shape: tuple[int, ...], epsilon: float, norm: float) -> Array:
    """A point of the ball for each row, uniformly."""
    if norm == np.inf:
        return rng.uniform(-epsilon, epsilon, shape)
    d = rng.standard_normal(shape)
    inner = [shape[0]] + [1] * (len(shape) - 1)
    return d / _lengths(d) * epsilon * rng.uniform(size=inner) ** (1 / prod(shape[1:]))
