"""`attribute`: which parts of an input a score comes from, by the gradients of a file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.products import vjp
from onnx_backprop.doors.function import Arguments, Function, function
from onnx_backprop.opset.core.errors import InvalidArgumentError, require_numbers

METHODS = ("saliency", "integrated", "gradcam", "smoothgrad", "shap")
_PATHS = ("integrated", "shap")
_OPTIONS = {  # the default of each, and the methods that read it
    "baselines": (0.0, _PATHS),
    "steps": (50, _PATHS),
    "samples": (25, ("smoothgrad",)),
    "noise": (0.1, ("smoothgrad",)),
    "seed": (0, ("smoothgrad",)),
}
Array = np.ndarray[Any, Any]


def attribute(
    model: ModelProto | ir.Model | str | Path | Function,
    x: Array | Mapping[str, Array],
    *,
    method: str = "saliency",
    target: int | Sequence[int] | None = None,
    layer: str | None = None,
    baselines: Array | float = 0.0,
    steps: int = 50,
    samples: int = 25,
    noise: float = 0.1,
    seed: int = 0,
    **arguments: Unpack[Arguments],
) -> Array:
    """The attribution of a score s: an array of the shape of x, or a map of a layer.

        heat = ob.attribute("imagenet.onnx", x, method="integrated", target=2, of=["logits"])

    Methods, for each row separately:
        "saliency": |∂s/∂x|.
        "integrated": (x - b) ∫₀¹ ∂s/∂x(b + α (x - b)) dα by Gauss-Legendre quadrature with `steps` points; the sum is
            s(x) - s(b), up to the error of the quadrature.
        "shap": its mean over `baselines`, an array of samples: expected gradients, the SHAP values of a linear s.
        "smoothgrad": the mean of ∂s/∂x(x + ε) over `samples` draws of ε ~ N(0, noise²), seeded by `seed`.
        "gradcam": relu(Σ_c a_c · mean(∂s/∂a_c)) over the channels of `layer`, a value (rows, channels, …) inside the
            graph or an output of it: (rows, 1, …).

    Args:
        model, arguments: as of `ob.function`, or its result, for many calls; `of` names one output, (rows, classes) or
            one number for each row.
        x: the input, or arrays by the inputs' names; `wrt` then names the one to explain.
        target: the class of the score, one or one for each row. Default: the class with the highest score at x.
        baselines: b, a number or an array like x or a row of it; for "shap" with an axis of samples in front.

    Raises: InvalidArgumentError for other methods, a missing layer, outputs of other shapes, options that the method
    does not read, and numbers out of range; what `ob.function` does.
    """
    if method not in METHODS:
        raise InvalidArgumentError(f"expected one of {', '.join(METHODS)}, got {method!r}", "method")
    if (layer is None) == (method == "gradcam"):
        raise InvalidArgumentError(f"layer: the name of a value goes with gradcam, got {layer!r} with {method}")
    options = {"baselines": baselines, "steps": steps, "samples": samples, "noise": noise, "seed": seed}
    check_effects(method, options, _OPTIONS)
    require_numbers(1, whole=True, steps=steps, samples=samples)
    require_numbers(0, noise=noise)
    require_numbers(0, whole=True, seed=seed)
    f = as_function(model, arguments)
    arrays = arguments_of(f, x)
    explained = f.inputs.index(f.variables[0])
    value = np.asarray(arrays[explained], f.types[f.inputs[explained]])
    starts = _starts(baselines, value, several=method == "shap") if method in _PATHS else []
    u = _score(f, f(*arrays), target)
    if layer is not None:
        return _gradcam(f, layer, arrays, u)

    def gradient(at: Array) -> Array:
        return f.vjp(*arrays[:explained], at, *arrays[explained + 1 :], u)[0]

    if method == "saliency":
        return np.abs(gradient(value))
    if method == "smoothgrad":
        rng = np.random.default_rng(seed)
        draws = (rng.normal(0, noise, value.shape).astype(value.dtype) for _ in range(samples))
        return _mean(gradient(value + draw) for draw in draws).astype(value.dtype)
    return _mean(_integrated(gradient, value, start, steps) for start in starts).astype(value.dtype)


def check_effects(method: str, options: Mapping[str, Any], known: Mapping[str, tuple[Any, Sequence[str]]]) -> None:
    """InvalidArgumentError for an option that is not its default and that the method does not read."""
    for name, value in options.items():
        default, methods = known[name]
        if method not in methods and (np.ndim(value) or value != default):
            raise InvalidArgumentError(f"goes with {' and '.join(methods)}, not with {method}. Leave it out", name)


def as_function(model: ModelProto | ir.Model | str | Path | Function, arguments: Arguments) -> Function:
    """A function of a model, or the one that it is."""
    if not isinstance(model, Function):
        return function(model, **arguments)
    if arguments:
        raise InvalidArgumentError(f"{', '.join(arguments)}: go to ob.function, whose result is the model here")
    return model


def arguments_of(f: Function, x: Array | Mapping[str, Array]) -> list[Array]:
    """The arguments of a function of one variable and one target. Raises: InvalidArgumentError."""
    named = x if isinstance(x, Mapping) else {f.inputs[0]: x}
    if len(f.variables) != 1 or len(f.outputs) != 1 or not f.targets:
        raise InvalidArgumentError(
            f"expected one float output and one float input, got {', '.join(f.outputs)} and {', '.join(f.variables)}. "
            "Name one of each in the lists `of` and `wrt`"
        )
    if set(named) != set(f.inputs):
        raise InvalidArgumentError(f"x: expected arrays of {', '.join(f.inputs)}, got {', '.join(named)}")
    return [named[name] for name in f.inputs]


def _starts(baselines: Array | float, value: Array, *, several: bool) -> list[Array]:
    """The starts of the paths to x, each of its shape."""
    starts = np.asarray(baselines, value.dtype)
    if several and not (starts.ndim and len(starts)):
        raise InvalidArgumentError("baselines: shap wants an array of several, one along the first axis")
    try:
        return [np.broadcast_to(b, value.shape) for b in (starts if several else [starts])]
    except ValueError as e:
        shape = starts.shape[1:] if several else starts.shape
        raise InvalidArgumentError(f"expected a shape like that of x, {value.shape}, got {shape}", "baselines") from e


def _score(f: Function, results: Sequence[Array], target: int | Sequence[int] | None) -> Array:
    """The seed that picks the score of each row."""
    (y,) = results
    if y.ndim < 2 or y.size == len(y):
        if target is not None:
            raise InvalidArgumentError(f"target: {f.outputs[0]!r} has no classes, its shape is {y.shape}")
        return np.ones_like(y)
    if y.ndim != 2:
        raise InvalidArgumentError(
            f"expected an output (rows, classes), {f.outputs[0]!r} has the shape {y.shape}", "of"
        )
    wanted = y.argmax(1) if target is None else np.asarray(target)
    if wanted.shape not in ((), y.shape[:1]) or wanted.dtype.kind not in "iu":
        got = f"{wanted.dtype} of the shape {wanted.shape}"
        raise InvalidArgumentError(f"expected a class, or one for each of {len(y)} rows, got {got}", "target")
    classes = np.broadcast_to(wanted, len(y))
    if not ((classes >= 0) & (classes < y.shape[1])).all():
        raise InvalidArgumentError(f"expected classes below {y.shape[1]}, got {target!r}", "target")
    return np.eye(y.shape[1], dtype=y.dtype)[classes]


def _integrated(gradient: Callable[[Array], Array], x: Array, start: Array, steps: int) -> Array:
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = np.zeros(x.shape)
    for node, weight in zip(nodes, weights, strict=True):
        total += weight / 2 * gradient((start + (node + 1) / 2 * (x - start)).astype(x.dtype))
    return (x - start) * total


def _gradcam(f: Function, layer: str, arrays: Sequence[Array], u: Array) -> Array:
    (values,) = f.showing([layer])(*arrays)
    if values.ndim < 3:
        raise InvalidArgumentError(f"layer: expected (rows, channels, …), {layer!r} has the shape {values.shape}")
    (gradient,) = f.derived(vjp, [layer], f.outputs)(*arrays, u)
    weights = gradient.mean(axis=tuple(range(2, values.ndim)), keepdims=True)
    return np.maximum((weights * values).sum(axis=1, keepdims=True), 0)


def _mean(arrays: Any) -> Array:
    return np.mean([np.asarray(array, np.float64) for array in arrays], axis=0)
