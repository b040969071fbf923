"""Is this the derivative? A gradient against central differences of the forward, along random directions.

For a direction v and a step h, the residual

    r(h) = (L(x + h·v) - L(x - h·v) - <g, (x + h·v) - (x - h·v)>) / 2h

tends to 0 with h when g is the gradient of L at x, and to another number when it is not. It is an even function of h,
so that two steps h and h/q give the better estimate (q²·r(h/q) - r(h)) / (q² - 1) (Richardson). Rounding in L spoils
short steps, curvature and kinks (Relu, MaxPool) long ones. So several steps are tried, and a direction says

    "right" when three steps in a row agree that r is 0,
    "wrong" when four in a row agree on another number,

and nothing when they do neither.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

Arrays = Mapping[str, np.ndarray]
Outputs = Callable[[Arrays], Mapping[str, np.ndarray]]

RIGHT, WRONG, UNDECIDED, KINK = "right", "wrong", "undecided", "kink"


@dataclass(frozen=True)
class Precision:
    """What a forward of a certain exactness allows.

    name: the exactness. steps: lengths of h relative to x, falling by a constant factor. tolerance: of the residual,
    relative to the size of the directional derivative. zero: a derivative below this fraction of Σ|dy·y| per relative
    change of x counts as that large, since rounding hides what is smaller. blind: whether short steps get lost in the
    rounding of the forward, so that outputs stay as they are though they have a derivative.
    """

    name: str
    steps: tuple[float, ...]
    tolerance: float
    zero: float
    blind: bool = False


FLOAT64 = Precision("float64", tuple(2.0**-n for n in range(8, 30, 3)), 5e-4, 1e-6)
FLOAT32 = Precision("float32", tuple(2.0**-n for n in range(3, 22, 2)), 1e-2, 1e-3, blind=True)
ENOUGH, MOST = 2, 5  # directions: that settle it when they agree, and that are tried when they do not
SEEN, STRETCH, LONGEST = 1e-4, 16.0, 8  # the least change of a float32 output; how steps are lengthened to reach it
PLATEAU, FLAT = 4, 0.25  # steps over which a residual other than 0 must stay the same, and how nearly


@dataclass(frozen=True)
class Point:
    """Where a gradient is checked: L(x) = Σ_y <dy, y(x)> and the gradients that are claimed for it."""

    forward: Outputs
    values: Arrays  # the variables
    cotangents: Arrays  # dy, by output
    gradients: Arrays  # by variable


@dataclass(frozen=True)
class Answer:
    """The verdict for some variables together.

    error: the residual relative to the size of the derivative, the median over the directions. directions: (that say
    right, that were tried). expected, got: the derivative along the last direction, as differences and gradient say.
    faint: the derivative is zero, or so small beside L that the check sees little of it.
    """

    verdict: str
    error: float
    directions: tuple[int, int]
    expected: float = math.nan
    got: float = math.nan
    faint: bool = False


@dataclass(frozen=True)
class _Residual:
    verdict: str
    error: float
    expected: float
    got: float
    faint: bool = False


def judge(point: Point, names: list[str], precision: Precision, rng: np.random.Generator) -> Answer:
    """The verdict of the majority of random directions in the space of the named variables.

    Two that agree settle it; else up to five are tried. Directions whose differences do not settle count for nothing;
    if more than half are such the answer is "undecided", or "kink" where the slopes to both sides of x differ. So is a
    derivative that differences contradict and that the rounding of the largest one explains, as that of a bias in front
    of a BatchNormalization in training mode, which is zero.
    """
    lost = _lost(point)
    results: list[_Residual] = []
    verdicts: list[str] = []
    y0 = {name: np.asarray(value, np.float64) for name, value in point.forward(point.values).items()}
    while len(results) < MOST:
        result = _decided(point, _direction(point, names, rng), y0, precision)
        if result.verdict == WRONG and max(abs(result.expected), abs(result.got)) <= lost:
            result = replace(result, verdict=UNDECIDED)
        results.append(result)
        verdicts = [result.verdict for result in results]
        if len(results) >= ENOUGH and len(set(verdicts)) == 1:
            break
    counts = {verdict: verdicts.count(verdict) for verdict in (RIGHT, WRONG, KINK, UNDECIDED)}
    decided = counts[RIGHT] + counts[WRONG]
    verdict = RIGHT if counts[RIGHT] > counts[WRONG] else WRONG
    if 2 * decided <= len(results) or counts[RIGHT] == counts[WRONG]:
        verdict = KINK if counts[KINK] else UNDECIDED
    chosen = [r for r in results if r.verdict == verdict] or results
    error = float(np.median([r.error for r in chosen]))
    last, faint = chosen[-1], all(r.faint for r in results)
    return Answer(verdict, error, (counts[RIGHT], len(results)), last.expected, last.got, faint)


def _lost(point: Point) -> float:
    """A few units in the last place of the largest derivative along a direction of one variable."""
    sizes = [0.0]
    for name, gradient in point.gradients.items():
        g, x = (np.asarray(values, np.float64) for values in (gradient, point.values[name]))
        if np.isfinite(g).all():
            sizes.append(8 * float(ml_dtypes.finfo(gradient.dtype).eps * np.linalg.norm(g)) * (_rms(x) or 1.0))
    return max(sizes)


def _direction(point: Point, names: list[str], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal numbers of the size of each variable, less for those that would drown the contribution of others.

    A variable that is positive everywhere, such as variances, changes in proportion, and stays positive.
    """
    result: dict[str, np.ndarray] = {}
    for name in names:
        x = np.asarray(point.values[name], np.float64)
        result[name] = rng.standard_normal(x.shape) * (x if x.size and x.min() > 0 else _rms(x) or 1.0)
    sizes = {n: float(np.linalg.norm(np.asarray(point.gradients[n], np.float64) * _rms(v))) for n, v in result.items()}
    positive = [size for size in sizes.values() if 0 < size < math.inf]
    if len(positive) > 1:
        middle = float(np.exp(np.mean(np.log(positive))))
        result = {n: v * min(1.0, max(middle / sizes[n], 2.0**-6)) if sizes[n] else v for n, v in result.items()}
    return result


def _decided(point: Point, v: dict[str, np.ndarray], y0: Arrays, precision: Precision) -> _Residual:
    """The residual along v; along a longer one first where steps of its own size are lost in rounding.

    The longer one may reach behind a kink, as of a Relu that is off, and then tells nothing about this side of it.
    """
    longer = _visible(point, v, y0, precision.steps[0]) if precision.blind else v
    result = _along(point, longer, y0, precision)
    return result if longer is v or result.verdict in (RIGHT, WRONG) else _along(point, v, y0, precision)


def _visible(point: Point, v: dict[str, np.ndarray], y0: Arrays, h: float) -> dict[str, np.ndarray]:
    """The direction, longer where a step of its own size is lost in the rounding of the outputs.

    So is that of a bias of 1e-6 before outputs of size 1. A step that leaves the finite numbers is taken back.
    """
    for _ in range(LONGEST):
        y = point.forward(_shifted(point.values, v, h))
        if any(_moves(y[name], y0[name]) for name in point.cotangents):
            break
        longer = {name: STRETCH * d for name, d in v.items()}
        y = point.forward(_shifted(point.values, longer, h))
        if not all(np.isfinite(np.asarray(y[name], np.float64)).all() for name in point.cotangents):
            break
        v = longer
    return v


def _moves(y: np.ndarray, y0: np.ndarray) -> bool:
    return bool(y.size) and float(np.abs(np.asarray(y, np.float64) - y0).max()) > SEEN * float(np.abs(y0).max())


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def _along(point: Point, v: Mapping[str, np.ndarray], y0: Mapping[str, np.ndarray], precision: Precision) -> _Residual:
    gradients = {name: np.asarray(point.gradients[name], np.float64) for name in v}
    if not all(np.isfinite(g).all() for g in gradients.values()):
        return _not_finite(point, v, y0, precision)
    spread = math.sqrt(sum(float(np.sum((gradients[n] * d) ** 2)) for n, d in v.items()))
    visible = precision.zero * sum(float(np.sum(np.abs(dy * y0[y]))) for y, dy in point.cotangents.items())
    sides: list[tuple[float, float]] = []  # residuals of the steps to the right and to the left
    got = size = math.nan
    most = 0
    # a gradient in float16 is often subnormal; a few units of the last place in every element are no fault
    smallest = {n: ml_dtypes.finfo(point.gradients[n].dtype).smallest_subnormal for n in v}
    rounding = 8 * sum(float(np.abs(d).sum() * float(smallest[n])) for n, d in v.items())
    for h in precision.steps:
        right, left, got, changed = _one_step(point, v, gradients, y0, h)
        most = max(most, changed)
        if precision.blind and 2 * changed < most:
            break
        sides.append((right, left))
        estimate, doubt = _limit([(right + left) / 2 for right, left in sides], precision)
        size = max(spread, abs(got), abs(got + estimate) if math.isfinite(estimate) else 0.0, visible)
        allowed = precision.tolerance * size + rounding
        if abs(estimate) <= allowed and doubt <= allowed:
            faint = size <= visible
            return _Residual(RIGHT, abs(estimate) / size if size else 0.0, got + estimate, got, faint)
    plateau = _plateau([(right + left) / 2 for right, left in sides])
    if plateau is None or not abs(plateau[0]) > precision.tolerance * size + rounding:
        estimate, _ = _limit([(right + left) / 2 for right, left in sides], precision)
        return _Residual(UNDECIDED, abs(estimate) / size if size else math.inf, got + estimate, got)
    estimate, first = plateau
    gaps = [abs(right - left) for right, left in sides[first : first + PLATEAU]]
    # of a smooth L the slopes to both sides of x approach each other with h, of one that has a kink at x they do not
    kinked = min(gaps) > 0.1 * abs(estimate) and min(gaps) > 0.5 * max(gaps)
    return _Residual(KINK if kinked else WRONG, abs(estimate) / size, got + estimate, got)


def _limit(residuals: list[float], precision: Precision) -> tuple[float, float]:
    """What the last three residuals tend to, and how far that may be from the truth; NaN where they say nothing."""
    if len(residuals) < 3:
        return math.nan, math.nan
    q2 = (precision.steps[0] / precision.steps[1]) ** 2
    a, b, c = residuals[-3:]
    earlier, estimate = (q2 * b - a) / (q2 - 1), (q2 * c - b) / (q2 - 1)
    return estimate, max(abs(estimate - earlier), abs(estimate - c))


def _plateau(residuals: list[float]) -> tuple[float, int] | None:
    """The number on which `PLATEAU` residuals in a row agree best, and the first of them."""
    best: tuple[float, float, int] | None = None
    for start in range(len(residuals) - PLATEAU + 1):
        some = residuals[start : start + PLATEAU]
        spread, middle = max(some) - min(some), sorted(some)[PLATEAU // 2]
        if math.isfinite(spread) and spread <= FLAT * abs(middle) and (best is None or spread < best[0]):
            best = spread, middle, start
    return None if best is None else best[1:]


def _one_step(
    point: Point, v: Mapping[str, np.ndarray], gradients: Arrays, y0: Arrays, h: float
) -> tuple[float, float, float, int]:
    """(L(x + h·v) - L(x)) / h less what the gradient says of it, the same to the left, <g, v>, and how much moves."""
    slopes: list[float] = []
    claims: list[float] = []
    changed = 0
    for signed in (h, -h):
        x = _shifted(point.values, v, signed)
        y = point.forward(x)
        slopes.append(sum(_total(dy, y[name], y0[name]) for name, dy in point.cotangents.items()) / signed)
        changed += sum(int(np.count_nonzero(y[name] != y0[name])) for name in point.cotangents)
        claims.append(sum(_total(gradients[name], x[name], point.values[name]) for name in v) / signed)
    return slopes[0] - claims[0], slopes[1] - claims[1], sum(claims) / 2, changed


def _not_finite(point: Point, v: Mapping[str, np.ndarray], y0: Arrays, precision: Precision) -> _Residual:
    """Infinity or NaN in a gradient is wrong where the differences settle on a number."""
    zero = {name: np.zeros(d.shape) for name, d in v.items()}
    residuals: list[float] = []
    for h in precision.steps:
        right, left, *_ = _one_step(point, v, zero, y0, h)
        residuals.append((right + left) / 2)
    plateau = _plateau(residuals)
    if plateau is None:
        return _Residual(UNDECIDED, math.inf, math.nan, math.nan)
    return _Residual(WRONG, math.inf, plateau[0], math.nan)


def _shifted(values: Arrays, v: Mapping[str, np.ndarray], h: float) -> dict[str, np.ndarray]:
    shifted = {
        name: np.asarray(np.asarray(values[name], np.float64) + h * d, values[name].dtype) for name, d in v.items()
    }  # arrays, also of 0 axes
    return dict(values) | shifted


def _total(weights: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> float:
    return float(np.sum(weights * (np.asarray(upper, np.float64) - np.asarray(lower, np.float64))))
