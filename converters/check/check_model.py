"""Are the gradients of a model right, as a whole? Against differences of its own forward.

Nothing here runs a model itself: the caller hands over a function that opens sessions.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnx_backprop.converters.check.differences import FLOAT32, FLOAT64, KINK, WRONG, Answer, Point, Precision, judge
from onnx_backprop.converters.check.feeds import DRAWS, Draw, Feeds, check_given, draw_feeds, required_inputs
from onnx_backprop.converters.check.report import Result, Rounding, verdict_of
from onnx_backprop.converters.parameters.choice import choose
from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.prepare.float_types import converted, half_types, with_float_type
from onnx_backprop.converters.prepare.submodel import with_outputs
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS, Draft
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.converters.reverse.path import GradientPath, find_path
from onnx_backprop.opset import reference_ops
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.functions.mat_mul_n_bits import reference_class, rounds
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_nodes

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
Open = Callable[[ModelProto], Run]
Progress = Callable[[Sequence[Any]], Iterable[Any]]

ALONE, GROUPS = 12, 6  # up to so many variables each get a verdict of their own; more are put into so many groups
# Elements of inputs and parameters up to which onnx's reference evaluator, which is slow, is used; and up to which it
# is for models of the operators that it hands to NumPy as they are.
REFERENCE_LIMIT, REFERENCE_LIMIT_FAST = 50_000, 4_000_000
# fmt: off
FAST = frozenset({
    "Abs", "Add", "BatchNormalization", "Cast", "Clip", "Concat", "Constant", "Cos", "Div", "Dropout", "Equal", "Exp",
    "Expand", "Flatten", "Gather", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Greater", "HardSigmoid", "Identity",
    "InstanceNormalization", "LRN", "LayerNormalization", "LeakyRelu", "Less", "Log", "LogSoftmax", "MatMul",
    "MatMulNBits", "Max", "Mean", "Min", "Mul", "Neg", "PRelu", "Pad", "Pow", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Shape",
    "Sigmoid", "Sin", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh",
    "Tile", "Transpose", "Unsqueeze", "Where",
})
# fmt: on
AGREEMENT = 1e-3  # between two forwards of the same model, relative to the largest output
HALF_AGREEMENT = 3e-2
HALF_TOLERANCE: dict[int, float] = {TensorProto.FLOAT16: 3e-2, TensorProto.BFLOAT16: 1e-1}
EXACT = "accuracy_level left out of MatMulNBits"
JITTER = 2.0**-6  # relative; how far a point on a kink is moved


@dataclass(frozen=True)
class Examination:
    """A model that was examined: its verdicts, and where it was examined."""

    model: ModelProto  # that has its variables as inputs and initializers
    results: tuple[Result, ...]
    forward: str
    variables: tuple[str, ...]
    outputs: tuple[str, ...]
    feeds: Feeds
    values: Feeds  # of the variables
    rounding: tuple[Rounding, ...] = ()

    @property
    def verdict(self) -> str:
        return verdict_of(self.results)


@dataclass(frozen=True)
class _Subject:
    """A model, its gradients, and what it is fed."""

    whole: ModelProto  # as it came, or prepared where it keeps variables in nodes: in Constants, in attributes
    model: ModelProto  # the forward, its outputs those that are differentiated, its variables inputs
    gradients: Run  # all values -> everything the training graph returns
    variables: dict[str, str]  # to the names of their gradients
    seeds: dict[str, str]  # outputs to the names of the inputs that take their cotangents
    written: ModelProto | None  # the training graph in standard operators, where it is to run in float64


class Examiner:
    """Checks models as wholes, each against differences of its own forward."""

    def __init__(
        self, open_session: Open, seed: int, kernels: str, tolerance: float | None, *, float64: bool = False
    ) -> None:
        self.open_session = open_session
        self.seed = seed
        self.kernels = kernels
        self.tolerance = tolerance
        self.float64 = float64

    def open(self, model: ModelProto) -> Run:
        """A function that runs a model; InvalidModelError where onnxruntime does not take it."""
        try:
            return self.open_session(model)
        except OnnxBackpropError:
            raise
        except Exception as e:
            raise InvalidModelError(f"onnxruntime does not load the model: {_first_line(e)}") from e

    def examine(
        self,
        model: ModelProto,
        wrt: Sequence[str] | None,
        of: Sequence[str] | None,
        given: Feeds,
        progress: Progress = iter,
    ) -> Examination:
        """The verdicts for the gradients of a model with respect to each variable, or each group of variables.

        Of a MatMulNBits that rounds, gradients are those of the exact product, and the model is examined with that.
        """
        rounded = any(map(rounds, all_nodes(model.graph)))
        model = copied(model) if rounded else model
        for node in filter(rounds, all_nodes(model.graph)):
            assign(node.attribute, [a for a in node.attribute if a.name != "accuracy_level"])
        subject = self._subject(model, wrt, of)
        model = subject.whole
        forward = self.open(subject.model)
        defaults = {t.name: to_array(t) for t in model.graph.initializer if t.name in subject.variables}
        feeds = self._feeds(subject, forward, check_given(model, given, defaults))
        values = {name: feeds.get(name, defaults.get(name)) for name in subject.variables}
        values = {name: np.asarray(value) for name, value in values.items()}
        results, used = self._results(subject, forward, feeds, values, progress)
        if any(result.verdict == KINK for result in results):
            values = {name: self._moved(value) for name, value in values.items()}
            results, used = self._results(subject, forward, feeds, values, progress)
        outputs = tuple(value.name for value in subject.model.graph.output)
        used += f", {EXACT}" if rounded else ""
        rounding = self._rounding(subject, feeds | values) if self.float64 else ()
        return Examination(model, results, used, tuple(subject.variables), outputs, feeds, values, rounding)

    def _subject(self, model: ModelProto, wrt: Sequence[str] | None, of: Sequence[str] | None) -> _Subject:
        draft = Draft(model, kernels=self.kernels, progress=iter)
        names = list(wrt) if wrt is not None else reached(draft.graph, of)
        arguments: dict[str, Any] = {"wrt": names, "of": of, "all_reached": wrt is not None}
        differentiation, variables = draft.differentiate(**arguments)
        inside = [x for x in differentiation.wrt if x.producer() is not None]
        if inside:
            raise InvalidArgumentError(
                f"{inside[0].name!r} is a value inside the graph, which a run of the model cannot be fed. Name "
                "inputs and initializers: their gradients pass through it",
                "wrt",
            )
        training = draft.finish()
        outputs = [str(y.name) for y in differentiation.of]
        stored = {value.name for value in (*model.graph.input, *model.graph.initializer)}
        whole = model if stored.issuperset(variables) else draft.original
        forward = _with_variables(with_outputs(whole, outputs), variables)
        written = None
        if self.float64:
            again = Draft(model, kernels=DEFAULT_KERNELS, inline=True, progress=iter)
            again.differentiate(**arguments)
            written = again.finish()
        return _Subject(whole, forward, self.open(training), variables, differentiation.seeds, written)

    def _feeds(self, subject: _Subject, forward: Run, given: Feeds) -> Feeds:
        """The caller's arrays, and the first random ones at which the model and its gradients are finite."""
        missing = [v for v in required_inputs(subject.model.graph) if v.name not in given]
        symbolic = any(not d.HasField("dim_value") for v in missing for d in v.type.tensor_type.shape.dim)
        problem = ""
        for draw in _draws(symbolic=symbolic, floats=bool(missing)):
            drawn = draw_feeds(subject.model, given, draw, np.random.default_rng(self.seed))
            feeds = given | drawn
            try:
                outputs = forward(feeds)
            except Exception as e:  # noqa: BLE001 - whatever onnxruntime raises for these inputs
                problem = problem or _first_line(e)
                continue
            wrong = [y for y, value in outputs.items() if not _is_finite(value) or not value.size]
            if not wrong:
                _require_repeatable(forward, feeds, outputs)
                wrong = [] if not missing else self._without_gradient(subject, feeds, outputs)
                if not wrong:
                    return feeds
                if len(wrong) < len(subject.variables):
                    wrong = [f"the gradient of {name}" for name in wrong]
            problem = problem or f"{', '.join(wrong)}: empty, infinite or NaN"
        what = "the values given" if not missing else "random values for its inputs"
        hint = "Give others" if not missing else f"Give values for {', '.join(repr(v.name) for v in missing)}"
        raise InvalidArgumentError(
            f"feeds: the model does not run on {what}: {problem}. {hint}: "
            "feeds={name: array}, or on the command line --feeds FILE.npz"
        )

    def _without_gradient(self, subject: _Subject, feeds: Feeds, outputs: Feeds) -> list[str]:
        """The variables whose gradients are infinite or NaN."""
        try:
            answers = subject.gradients(feeds | self._cotangents(subject, outputs)[1])
        except Exception:  # noqa: BLE001 - said later, of the values that are settled upon
            return []
        return [x for x, gradient in subject.variables.items() if not _is_finite(answers[gradient])]

    def _cotangents(self, subject: _Subject, outputs: Feeds) -> tuple[Feeds, Feeds]:
        """Dy by output, and the same by the name of the input that takes it."""
        rng = np.random.default_rng((self.seed, 1))
        dys = {
            y: rng.standard_normal(value.shape).astype(value.dtype) if y in subject.seeds else np.ones_like(value)
            for y, value in outputs.items()
        }
        return dys, {name: dys[y] for y, name in subject.seeds.items()}

    def _rounding(self, subject: _Subject, values: Feeds) -> tuple[Rounding, ...]:
        """How far the gradients are from those of the same graph in float64."""
        assert subject.written is not None
        everything = values | self._cotangents(subject, self.open(subject.model)(values))[1]
        got, exact = subject.gradients(everything), self._in_float64(subject.written, everything)
        return tuple(_rounded(name, got[grad], exact[grad]) for name, grad in subject.variables.items())

    def _in_float64(self, model: ModelProto, values: Feeds) -> Feeds:
        """The outputs of a model in float64: of onnxruntime where it has the kernels, else of onnx's evaluator."""
        fed = {name: converted(value, TensorProto.DOUBLE) for name, value in values.items()}
        try:
            return self.open_session(with_float_type(model, TensorProto.DOUBLE))(fed)
        except Exception as refused:  # noqa: BLE001 - of many kinds, for kernels that it lacks
            try:
                return _reference(model)(fed)
            except Exception as e:
                raise InvalidArgumentError(
                    f"float64: neither onnxruntime ({_first_line(refused)}) nor onnx's reference evaluator "
                    f"({_first_line(e)}) runs the gradients. Leave it out"
                ) from e

    def _held(self, subject: _Subject, forward: Run, feeds: Feeds, values: Feeds) -> tuple[_Subject, Run, Feeds]:
        """A forward in which stopped values are inputs: differences at a point move nothing behind a stop."""
        stopped = [node.output[0] for node in subject.model.graph.node if is_stop(node)]
        if not stopped:
            return subject, forward, feeds
        at = self.open(with_outputs(subject.model, stopped))(feeds | values)
        held = copied(subject.model)
        assign(held.graph.node, [node for node in held.graph.node if not is_stop(node)])
        held.graph.input.extend(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in at.items()
        )
        return replace(subject, model=held), self.open(held), feeds | at

    def _results(
        self, subject: _Subject, forward: Run, feeds: Feeds, values: Feeds, progress: Progress
    ) -> tuple[tuple[Result, ...], str]:
        subject, forward, feeds = self._held(subject, forward, feeds, values)
        everything = feeds | values
        outputs = forward(everything)
        dys, fed = self._cotangents(subject, outputs)
        try:
            answers = subject.gradients(everything | fed)
        except Exception as e:  # noqa: BLE001 - a training graph that fails where its forward runs is wrong
            names = ", ".join(subject.variables)
            return (
                Result(names, Answer(WRONG, np.inf, (0, 0)), f"the training graph fails: {_first_line(e)}"),
            ), "none"
        halves = half_types(subject.model)
        oracle, precision = self._oracle(subject.model, forward, everything, outputs, halves)
        if self.tolerance is not None:
            precision = replace(precision, tolerance=self.tolerance)
        element = TensorProto.DOUBLE if precision.name == FLOAT64.name else TensorProto.FLOAT
        gradients = {name: np.asarray(answers[grad]) for name, grad in subject.variables.items()}
        at = {name: converted(value, element) for name, value in values.items()}
        others = {name: converted(value, element) for name, value in feeds.items()}
        point = Point(lambda x: oracle(others | dict(x)), at, dys, gradients)
        rng = np.random.default_rng((self.seed, 2))
        results = [
            Result(_named(group), _shapes_fit(gradients, values, group) or judge(point, group, precision, rng))
            for group in progress(_groups(list(subject.variables)))
        ]
        limit = HALF_AGREEMENT if halves else AGREEMENT
        for y, value in outputs.items():
            gap = _gap(answers[y], value)
            if not gap <= limit:
                results.append(Result(y, Answer(WRONG, gap, (0, 0)), "the training graph computes another output"))
        return tuple(results), _describe(precision)

    def _oracle(
        self, model: ModelProto, forward: Run, everything: Feeds, outputs: Feeds, halves: set[int]
    ) -> tuple[Run, Precision]:
        """The most exact forward there is: onnx's in float64 where it agrees with onnxruntime's, else the latter."""
        limit = HALF_AGREEMENT if halves else AGREEMENT
        loosest = max((HALF_TOLERANCE[t] for t in halves), default=0.0)
        fast = all(node.op_type in FAST for node in model.graph.node) and not model.functions
        size = sum(value.size for value in everything.values()) + _parameters(model)
        if size <= (REFERENCE_LIMIT_FAST if fast else REFERENCE_LIMIT):
            exact = _reference(model)
            try:
                reference = exact({name: converted(value, TensorProto.DOUBLE) for name, value in everything.items()})
            except Exception:  # noqa: BLE001 - it lacks operators, and its own errors are of any kind
                reference = {}
            if reference and all(_gap(reference[y], value) <= limit for y, value in outputs.items()):
                return exact, replace(FLOAT64, tolerance=max(FLOAT64.tolerance, loosest))
        run = self.open(with_float_type(model, TensorProto.FLOAT)) if halves else forward
        return run, replace(FLOAT32, tolerance=max(FLOAT32.tolerance, loosest))

    def _moved(self, value: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng((self.seed, 3))
        x = value.astype(np.float64)
        size = float(np.sqrt(np.mean(x * x))) or 1.0
        return (x + JITTER * size * rng.standard_normal(x.shape)).astype(value.dtype)


def _is_finite(value: np.ndarray) -> bool:
    return bool(np.isfinite(np.asarray(value, np.float64)).all())


def reached(graph: ir.Graph, of: Sequence[str] | None) -> list[str]:
    """The default of `wrt` here: the float inputs and parameters that influence the outputs differentiably."""
    values = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values()) if is_float(v)}
    path = path_between(graph, of, list(values))
    active = {name: value for name, value in values.items() if value in path.active}
    left_out = choose(graph, [value for value in active.values() if value.is_initializer()]).left_out
    names = [name for name, value in active.items() if value not in left_out]
    if not names:
        raise InvalidArgumentError(
            "no float input or initializer influences a float output along a differentiable path, there is no "
            "gradient to check",
            "wrt",
        )
    return names


def path_between(graph: ir.Graph, of: Sequence[str] | None, wrt: Sequence[str]) -> GradientPath:
    """The path from inputs and initializers of the given names to values, None for every float output."""
    values = values_by_name(graph)
    ends = list(graph.outputs) if of is None else [values[name] for name in of if name in values]
    targets = [value for value in ends if is_float(value)]
    return find_path(graph, targets, [values[name] for name in wrt])


def _draws(*, symbolic: bool, floats: bool) -> Sequence[Draw]:
    if not floats:
        return DRAWS[:1]
    return DRAWS if symbolic else [draw for draw in DRAWS if draw.length == DRAWS[0].length]


def _with_variables(forward: ModelProto, variables: Mapping[str, str]) -> ModelProto:
    """Initializers that are variables become inputs, so that a run can change them."""
    inputs = {value.name for value in forward.graph.input}
    for tensor in forward.graph.initializer:
        if tensor.name in variables and tensor.name not in inputs:
            forward.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    forward.ir_version = max(forward.ir_version, 4)
    return forward


def _reference(model: ModelProto) -> Run:
    """A model in float64 through onnx's reference evaluator."""
    double = with_float_type(model, TensorProto.DOUBLE)
    names = [value.name for value in model.graph.output]
    evaluator: ReferenceEvaluator | None = None

    def run(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal evaluator
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            evaluator = evaluator or ReferenceEvaluator(double, new_ops=[*reference_ops(), reference_class()])
            return dict(zip(names, map(np.asarray, evaluator.run(None, dict(values))), strict=True))

    return run


def _require_repeatable(forward: Run, feeds: Feeds, outputs: Feeds) -> None:
    again = forward(feeds)
    for name, value in outputs.items():
        if not _gap(again[name], value) <= HALF_AGREEMENT:
            raise InvalidModelError(
                f"two runs of the model on the same inputs give different values of {name!r}; a model that draws "
                "random numbers, as Dropout in training mode, has no differences to compare with. Switch that off first"
            )


def _rounded(name: str, got: np.ndarray, exact: np.ndarray) -> Rounding:
    gap, size = (np.abs(np.asarray(x, np.float64)) for x in (np.asarray(got, np.float64) - exact, exact))
    largest, typical = float(size.max(initial=0)), float(np.sqrt(np.mean(size**2))) if size.size else 0.0
    error, usual = float(gap.max(initial=0)), float(np.sqrt(np.mean(gap**2))) if gap.size else 0.0
    return Rounding(name, error / largest if largest else error, usual / typical if typical else usual, largest)


def _parameters(model: ModelProto) -> int:
    return sum(int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference relative to the largest value; infinity for different shapes."""
    if a.shape != b.shape:
        return np.inf
    if not b.size:
        return 0.0
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    size = float(np.abs(y).max())
    gap = float(np.abs(x - y).max())
    return gap / size if size else gap


def _shapes_fit(gradients: Feeds, values: Feeds, group: Sequence[str]) -> Answer | None:
    if all(gradients[n].shape == values[n].shape and gradients[n].dtype == values[n].dtype for n in group):
        return None
    return Answer(WRONG, np.inf, (0, 0))


def _groups(names: list[str]) -> list[list[str]]:
    size = 1 if len(names) <= ALONE else -(-len(names) // GROUPS)
    return [names[start : start + size] for start in range(0, len(names), size)]


def _named(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} … {group[-1]} ({len(group)})"


def _describe(precision: Precision) -> str:
    where = "onnx's reference evaluator" if precision.name == FLOAT64.name else "onnxruntime"
    return f"{precision.name}, {where}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
