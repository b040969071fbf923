"""Gradient rules against central differences of the forward model, for tables of small cases.

A case is a few nodes from its inputs to `y`. It is checked in several forms: with its shapes known, with every
dimension a symbol, with its integer constants fed at run time, with ranks unknown, and in float16. The differences are
taken of the original forward model, in float64 through onnx's reference evaluator (which must agree with onnxruntime
at the point itself), or of onnxruntime's own forward where the operator is linear or linear in pieces, so that a wide
step makes no error.
"""

from __future__ import annotations

import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, parser, shape_inference
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from tests.declarations.registry import DECLARED
from tests.support.batch import check_each
from tests.support.renamed import joined, renamed

FIRST_OPSET, LAST_OPSET = 18, 26  # the opsets models have when rules run; onnxruntime ends at 26
VARIANTS = ("static", "symbolic", "fed", "unranked", "half")
NAMES: dict[str, str] = dict(zip(VARIANTS[1:], ("unnamed", "odd", "numbers", "ours"), strict=True))  # of `renamed`
BASIS_LIMIT, RANDOM_DIRECTIONS = 48, 12
SEED = 20240613
IR_VERSION = 10

Feeds = dict[str, np.ndarray]
Run = Callable[[Feeds], list[np.ndarray]]


@dataclass(frozen=True)
class Oracle:
    """Whose forward is differenced, and how wide the step is."""

    runtime: str
    step: float
    tolerance: float


FLOAT64 = Oracle("reference", 1e-6, 3e-5)
LINEAR = Oracle("onnxruntime", 1.0, 3e-5)
PIECEWISE = Oracle("onnxruntime", 2.0**-7, 1e-4)
SMOOTH = Oracle("onnxruntime", 2.0**-6, 4e-4)  # where the reference evaluator computes in less than float64
HALF_TOLERANCE = 1e-2
INLINED_ULPS = 16  # of the largest y: the cases sum over at most that many products
# their gradients are operators of our domain; the others' are ONNX's
OURS = {name for declaration in DECLARED.values() for name in declaration.gradient_of}


@dataclass(frozen=True, repr=False)
class Case:
    """Nodes in ONNX text from inputs and constants to y, and what each variant is expected to do.

    op: the operator the case is about. constants are initializers, except in the variant "fed". `refuses` names the
    variants that must raise UnsupportedError, `skips` those that onnxruntime itself cannot run. since and until are the
    first and the last opset that the case is checked in.
    """

    op: str
    nodes: str
    inputs: Feeds
    constants: Feeds
    wrt: tuple[str, ...]
    since: int
    oracle: Oracle
    refuses: tuple[str, ...]
    skips: tuple[str, ...]
    note: str
    until: int

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, array.shape)) or "0d" for array in self.inputs.values())
        text = re.sub(r"\s+|^y=", "", self.nodes)
        values = "".join(f"_{name}{array.tolist()}" for name, array in self.constants.items())
        name = f"{text}-{shapes}{values}-d{''.join(self.wrt)}-{self.note}@{self.since}"
        return name.replace("[", "(").replace("]", ")").replace(" ", "")


def spread(shape: Sequence[int], seed: int = SEED) -> np.ndarray:
    """Distinct float32 numbers around 0 in random order, none of them 0, all exact in float16."""
    count = int(np.prod(shape, dtype=int))
    return np.asarray(positive(shape, seed) - np.float32((count // 2) * _gap(count)))


def positive(shape: Sequence[int], seed: int = SEED) -> np.ndarray:
    """Distinct float32 numbers between 0 and 8 in random order, all exact in float16."""
    count = int(np.prod(shape, dtype=int))
    order = np.random.default_rng(seed).permutation(count)
    return ((2 * order + 1) * _gap(count) / 2).astype(np.float32).reshape(shape)


def _gap(count: int) -> float:
    return float(2.0 ** -np.floor(np.log2(max(count, 4) / 4)))


def case(
    nodes: str,
    *,
    op: str = "",
    constants: Mapping[str, Any] | None = None,
    wrt: Sequence[str] | None = None,
    since: int = FIRST_OPSET,
    oracle: Oracle = FLOAT64,
    refuses: Sequence[str] = (),
    skips: Sequence[str] = (),
    note: str = "",
    until: int = LAST_OPSET,
    **inputs: Any,
) -> Case:
    """A case from shapes (tuples, filled by `spread`) or arrays.

    Default for op: what makes y. Default for wrt: every float input.
    """
    feeds = {
        name: spread(value, zlib.crc32(f"{nodes}{name}".encode())) if isinstance(value, tuple) else np.asarray(value)
        for name, value in inputs.items()
    }
    arrays = {name: np.asarray(value) for name, value in (constants or {}).items()}
    floats = [name for name, value in feeds.items() if value.dtype == np.float32]
    about = op or re.findall(r"\by\b[^=]*=\s*(\w+)", nodes)[-1]
    return Case(
        about, nodes, feeds, arrays, tuple(wrt or floats), since, oracle, tuple(refuses), tuple(skips), note, until
    )


def build(case: Case, *, opset: int, variant: str = "static") -> tuple[ModelProto, Feeds, list[str]]:
    """The forward model of a case, what it is fed, and the names to differentiate by."""
    feeds, constants, wrt, nodes = dict(case.inputs), dict(case.constants), list(case.wrt), case.nodes
    if variant == "fed":
        feeds, constants = feeds | constants, {}
    if variant == "unranked":
        for name in case.wrt:
            nodes = f"{name} = Reshape <allowzero = 1> ({name}_given, {name}_shape) {nodes}"
            array = feeds.pop(name)
            feeds |= {f"{name}_given": array, f"{name}_shape": np.array(array.shape, np.int64)}
        wrt = [f"{name}_given" for name in wrt]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            array.shape if variant in ("static", "half") else [f"{name}_{axis}" for axis in range(array.ndim)],
        )
        for name, array in feeds.items()
    ]
    model = parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["" : {opset}]> g () => (float[] y) {{ {nodes} }}'
    )
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    for n, node in enumerate(model.graph.node):
        node.name = f"{node.op_type.lower()}_{n}"
    if variant == "half":
        model = retyped(model, TensorProto.FLOAT16)
        feeds = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in feeds.items()}
    declare_output(model, feeds)
    return model, feeds, wrt


def declare_output(model: ModelProto, feeds: Feeds) -> None:
    """Give y the shape that inference finds, or as many symbols as it has axes."""
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph.output[0]
    if not inferred.type.tensor_type.HasField("shape"):
        rank = session_run(model)(feeds)[0].ndim
        for axis in range(rank):
            inferred.type.tensor_type.shape.dim.add().dim_param = f"y_{axis}"
        if rank == 0:
            inferred.type.tensor_type.shape.SetInParent()
    model.graph.output[0].CopyFrom(inferred)


def retyped(model: ModelProto, element: int) -> ModelProto:
    """The model with every float16 and float32 tensor in another float type."""
    floats = (TensorProto.FLOAT16, TensorProto.FLOAT)
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in floats:
            value.type.tensor_type.elem_type = element
    constants = [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    for tensor in [*graph.initializer, *constants]:
        if tensor.data_type in floats:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(element))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return result


def session_run(model: ModelProto) -> Run:
    """One run of a model in a stock onnxruntime session.

    It is fed copies: onnxruntime writes the running statistics of a BatchNormalization in training into the arrays it
    was given as the old ones, unless they are graph outputs.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    accepted = {value.name for value in session.get_inputs()}
    return lambda feeds: cast(
        "list[np.ndarray]", session.run(None, {k: v.copy() for k, v in feeds.items() if k in accepted})
    )


def float64_run(model: ModelProto) -> Run:
    """The model in float64 through onnx's reference evaluator."""
    evaluator = ReferenceEvaluator(retyped(model, TensorProto.DOUBLE))
    return lambda feeds: [np.asarray(value) for value in evaluator.run(None, feeds)]


@dataclass(frozen=True)
class Problem:
    """A model with what it is fed, the names to differentiate by, and the forward to take differences of."""

    name: str
    model: ModelProto
    feeds: Feeds
    wrt: Sequence[str]
    oracle: Oracle = FLOAT64
    forward: ModelProto | None = None  # the float32 model where `model` is in a half type
    seed: int = SEED

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Gradients:
    """y of a problem, in float32 too, a random dy (1 where y has one element) and the gradients of <dy, y>."""

    y: np.ndarray
    single: np.ndarray
    dy: np.ndarray
    found: Feeds


def gradients(problems: Sequence[Problem], style: str = "") -> list[Gradients]:
    """What `backward` gives of all problems side by side in one model, whose names may be in a style of `renamed`.

    Checks what every training graph must satisfy: the checker and strict inference accept it, y is what the forward
    model says, and a gradient has its variable's type and shape.
    """
    model = joined([p.model for p in problems])
    feeds = {f"{n}/{name}": array for n, p in enumerate(problems) for name, array in p.feeds.items()}
    wrt = [[f"{n}/{name}" for name in p.wrt] for n, p in enumerate(problems)]
    if style:
        model, names = renamed(model, style)
        feeds, wrt = {names[k]: v for k, v in feeds.items()}, [[names[name] for name in group] for group in wrt]
    training = ob.backward(model, wrt=[name for group in wrt for name in group])
    checker.check_model(training, full_check=True)
    shape_inference.infer_shapes(training, check_type=True, strict_mode=True, data_prop=True)
    if not any(node.op_type in OURS for node in model.graph.node):
        assert {f.name for f in training.functions} <= {"BiasAddBackward"}, "else standard operators only"
    values, derivative = session_run(model)(feeds), ob.derivatives(training)[-1]
    outputs = [output.name for output in model.graph.output]
    seeds, fed = [], dict(feeds)
    for problem, output, y in zip(problems, outputs, values, strict=True):
        dy = np.random.default_rng(problem.seed).uniform(0.5, 1.5, y.shape) * np.random.default_rng(
            problem.seed + 1
        ).choice([-1, 1], y.shape)
        if output not in derivative.seeds:
            assert y.size == 1, "only a one-element output is seeded"
            dy = np.ones_like(y)
        else:
            fed[derivative.seeds[output]] = dy.astype(y.dtype)
        seeds.append(dy.astype(y.dtype))
    answers = dict(zip([v.name for v in training.graph.output], session_run(training)(fed), strict=True))
    singles = values
    if problems[0].forward is not None:
        single = joined([cast("ModelProto", p.forward) for p in problems])
        singles = session_run(single)(
            _as(np.float32, {f"{n}/{k}": v for n, p in enumerate(problems) for k, v in p.feeds.items()})
        )
    result = []
    for problem, output, y, single, dy, group in zip(problems, outputs, values, singles, seeds, wrt, strict=True):
        if not np.array_equal(answers[output], y):
            half = y.dtype.itemsize == 2  # onnxruntime rounds between two nodes, or not, as others read the value
            assert half or inlined(problem.model), "onnxruntime runs the same kernel in both graphs"
            np.testing.assert_allclose(answers[output], y, rtol=0, atol=INLINED_ULPS * np.spacing(np.abs(y).max()))
        grads = {}
        for name, full in zip(problem.wrt, group, strict=True):
            got, want = answers[derivative.results[full]], problem.feeds[name]
            assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: {got.dtype}{got.shape}"
            grads[name] = got
        result.append(Gradients(y, single, dy, grads))
    return result


def inlined(model: ModelProto) -> bool:
    """Whether onnxruntime has no kernel for some operator and computes its function body instead.

    What it fuses of that body depends on the rest of the graph, so that sums are rounded elsewhere.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/model.onnx"
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        resolved = onnx.load(options.optimized_model_filepath)
    return any(name.startswith("_inlfunc_") for node in resolved.graph.node for name in node.output)


def check_gradient(
    model: ModelProto,
    feeds: Feeds,
    wrt: Sequence[str],
    *,
    seed: int = SEED,
    oracle: Oracle = FLOAT64,
    forward: ModelProto | None = None,
) -> None:
    """One problem."""
    problem = Problem("", model, feeds, wrt, oracle, forward, seed)
    (answer,) = gradients([problem])
    compare(problem, answer)


def compare(problem: Problem, answer: Gradients) -> None:
    """<gradient, v> == <dy, (F(x + hv) - F(x - hv)) / 2h> for every unit vector v, or random ones for large x."""
    oracle = problem.oracle
    tolerance = oracle.tolerance if problem.forward is None else HALF_TOLERANCE
    f, at = _forward(problem.forward or problem.model, problem.feeds, oracle, answer.single)
    for name in problem.wrt:
        for v in directions(problem.feeds[name].shape, problem.seed):
            above, below = (
                f(at | {name: np.asarray(at[name] + (sign * oracle.step * v).astype(at[name].dtype))})[0]
                for sign in (1, -1)
            )
            want = float(((above.astype(np.float64) - below) * answer.dy).sum()) / (2 * oracle.step)
            have = float((answer.found[name].astype(np.float64) * v).sum())
            scale = max(1.0, float(np.abs(v).sum()), abs(want))
            assert abs(have - want) <= tolerance * scale, (
                f"d{name} along {np.argwhere(v)[:3].tolist()}…: {have:.7g}, differences say {want:.7g} "
                f"(seed {problem.seed})\n{onnx.printer.to_text(problem.model)}"
            )


def _forward(model: ModelProto, feeds: Feeds, oracle: Oracle, y: np.ndarray | None = None) -> tuple[Run, Feeds]:
    """The forward to take differences of, and the point in its float type. y: what onnxruntime makes of it in float32."""
    single, double = _as(np.float32, feeds), _as(np.float64, feeds)
    if oracle.runtime == "onnxruntime":
        return session_run(model), double if TensorProto.DOUBLE in {
            v.type.tensor_type.elem_type for v in model.graph.input
        } else single
    reference = float64_run(model)
    np.testing.assert_allclose(
        reference(double)[0],
        session_run(model)(single)[0] if y is None else y,
        rtol=1e-4,
        atol=1e-4,
        err_msg="onnx's reference evaluator and onnxruntime disagree about the forward; take another oracle",
    )
    return reference, double


def _as(dtype: type[np.floating], feeds: Feeds) -> Feeds:
    return {k: v.astype(dtype) if np.issubdtype(v.dtype, np.floating) else v for k, v in feeds.items()}


def directions(shape: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Every unit vector of a small array; random vectors for a large one."""
    count = int(np.prod(shape, dtype=int))
    if count <= BASIS_LIMIT:
        return list(np.eye(count).reshape(count, *shape))
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape) for _ in range(RANDOM_DIRECTIONS)]


def check_cases(cases: Sequence[Case], variant: str, opset: int | None = None) -> None:
    """Cases in one form: right, or refused where a case says so. Those of one opset are differentiated in one model.

    Shapes are known at the first opset a case has, unknown at the last, so that both ends are covered. Each form has
    names of its own kind.
    """
    style, early = NAMES.get(variant, ""), variant in ("static", "half")
    alike: dict[tuple[int, bool], list[Problem]] = {}
    for case in cases:
        if variant in case.skips or (variant == "fed" and not case.constants):
            continue
        version = opset or (case.since if early else case.until)
        model, feeds, wrt = build(case, opset=version, variant=variant)
        if variant in case.refuses:
            if style:
                model, names = renamed(model, style)
                wrt = [names[name] for name in wrt]
            with pytest.raises(ob.UnsupportedError, match=case.op):
                ob.backward(model, wrt=wrt)
            continue
        forward = build(case, opset=version)[0] if variant == "half" else None
        ours = any(node.op_type in OURS for node in model.graph.node)
        alike.setdefault((version, ours), []).append(Problem(str(case), model, feeds, wrt, case.oracle, forward))
    for problems in alike.values():
        check_each(problems, partial(gradients, style=style), compare)
