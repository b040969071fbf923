"""A fused operator against what it is written out as: onnxruntime runs both, with shapes known and unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.converters.prepare.float_types import with_float_type
from onnx_backprop.converters.prepare.fused.table import EXPANSIONS
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.functions.mat_mul_n_bits import reference_class
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.support.adjoint import forward_session, run
from tests.support.batch import check_each
from tests.support.renamed import joined
from tests.support.rule_checks import COARSE, EXACT, symbolic

T = TypeVar("T")
Feeds = Mapping[str, "np.ndarray | None"]
COARSELY = ("Erf", "LayerNormalization")  # the reference evaluator rounds them to float32
TOLERANCE = {np.float16: 4e-3, np.float32: 2e-5, np.float64: 1e-12}


def one_node(
    op_type: str,
    feeds: Feeds,
    outputs: int | Sequence[int] = 1,
    *,
    domain: str = "com.microsoft",
    opset: int = 18,
    constants: Sequence[str] = (),
    unread: int = 0,
    **attributes: object,
) -> ModelProto:
    """A model of one node; inputs that are None are left out, those in `constants` are initializers.

    outputs: how many, or which ones. unread: outputs that have a name and that nobody reads, from the first on.
    """
    wanted = range(outputs) if isinstance(outputs, int) else outputs
    names = [f"y{n}" if n in wanted or n < unread else "" for n in range(max(unread, max(wanted) + 1))]
    given = {name: array for name, array in feeds.items() if array is not None}
    inputs = [name if name in given else "" for name in feeds]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(op_type, inputs, names, name="node", domain=domain, **attributes)
    tensors = [_info(name, array) for name, array in given.items() if name not in constants]
    kept = [helper.make_tensor(n, _element(given[n]), given[n].shape, given[n].tobytes(), raw=True) for n in constants]
    graph = helper.make_graph([node], "g", tensors, [ValueInfoProto(name=f"y{n}") for n in wanted], kept)
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 3 if domain == "ai.onnx.ml" else 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def expanded(model: ModelProto) -> ModelProto:
    """The prepared model, of which nothing is left to write out but what stays onnxruntime's; our operators too."""
    prepared = prepare(model)
    fused = [node for node in all_nodes(prepared) if (node.domain, node.op_type) in EXPANSIONS]
    assert not [node for node in fused if node.op_type != "MatMulNBits" or node.metadata_props], [
        entry.value for node in prepared.graph.node for entry in node.metadata_props
    ]
    unexpanded = any(node.domain == ob.DOMAIN for node in all_nodes(prepared))
    return inline_local_functions(ob.use_kernels(prepared, "onnx")) if unexpanded else prepared


@dataclass(frozen=True)
class Fused:
    """A node in a model, what it is fed, what to differentiate by, and the tolerance of its outputs; 0 for the type's."""

    name: str
    model: ModelProto
    feeds: Mapping[str, np.ndarray]
    wrt: Sequence[str] = ()
    tolerance: float = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Written:
    """What a node puts out, what it is written out as does, each time; and the gradient, see `_gradients_of`."""

    before: list[np.ndarray]
    after: list[list[np.ndarray]]
    gradients: list[Along]


@dataclass(frozen=True)
class Along:
    """The derivative along a direction by one input: <dx, v>, what differences say, and how far they may lie apart."""

    name: str
    got: float
    expected: float
    allowed: float


def fused(
    op_type: str,
    feeds: Feeds,
    wrt: Sequence[str] = (),
    outputs: int | Sequence[int] = 1,
    *,
    tolerance: float = 0,
    constants: Sequence[str] = (),
    **settings: Any,
) -> Fused:
    """A case of `check_all_fused`; settings: of `one_node`."""
    model = one_node(op_type, feeds, outputs, constants=constants, **settings)
    shapes = ", ".join(f"{n} {'none' if a is None else f'{a.dtype.name}{a.shape}'}" for n, a in feeds.items())
    name = f"{op_type}({shapes}) {outputs} {settings}"
    given = {name: x for name, x in feeds.items() if x is not None and name not in constants}
    return Fused(name, model, given, wrt, tolerance)


def check_fused(*arguments: Any, **settings: Any) -> None:
    """`check_all_fused` of one case; arguments: of `fused`."""
    check_all_fused([fused(*arguments, **settings)])


def check_all_fused(cases: Sequence[Fused]) -> None:
    """The same outputs before and after, with shapes known and unknown; and the latter's gradient, against differences.

    Cases of one opset run side by side in one model, those with a gradient apart from those without.
    """
    alike: dict[tuple[str, bool], list[Fused]] = {}
    for case in cases:
        alike.setdefault((str(case.model.opset_import), bool(case.wrt)), []).append(case)
    for group in alike.values():
        check_each(group, _written_out, _check_written)


def _written_out(cases: Sequence[Fused]) -> list[Written]:
    model = joined([case.model for case in cases])
    feeds = _together(cases)
    before = _each(cases, run(forward_session(model), feeds))
    loose = symbolic(model)
    written = [expanded(form) for form in (model, loose)]
    after = [_each(cases, run(forward_session(form), feeds)) for form in written]
    gradients = _gradients_of(cases, loose, written[-1]) if cases[0].wrt else [[] for _ in cases]
    return [Written(*parts) for parts in zip(before, map(list, zip(*after, strict=True)), gradients, strict=True)]


def _check_written(case: Fused, answer: Written) -> None:
    for after in answer.after:
        compare(answer.before, after, case.tolerance)
    _check_along(case, answer.gradients)


def _check_along(_: Fused, gradients: Sequence[Along]) -> None:
    for one in gradients:
        assert abs(one.got - one.expected) <= one.allowed, f"{one.name}: expected {one.expected:.8g}, got {one.got:.8g}"


def _together(cases: Sequence[Fused]) -> dict[str, np.ndarray]:
    return {f"{n}/{name}": array for n, case in enumerate(cases) for name, array in case.feeds.items()}


def _each(cases: Sequence[Fused], arrays: Iterable[T]) -> list[list[T]]:
    """What belongs to the outputs of each case."""
    waiting = iter(arrays)
    return [list(islice(waiting, len(case.model.graph.output))) for case in cases]


def check_gradient(model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: Sequence[str]) -> None:
    """`check_all_gradients` of one model."""
    check_all_gradients([Fused("", model, feeds, wrt)])


def check_all_gradients(cases: Sequence[Fused]) -> None:
    """The gradients of models of one opset in their form, without their outputs."""
    check_each(cases, _gradients_in_their_form, _check_along)


def _gradients_in_their_form(cases: Sequence[Fused]) -> list[list[Along]]:
    model = joined([case.model for case in cases])
    return _gradients_of(cases, model, expanded(model))


def _gradients_of(cases: Sequence[Fused], model: ModelProto, written_out: ModelProto) -> list[list[Along]]:
    """<dy, F(x + h·v) - F(x - h·v)> / 2h = <dx, v>, F being what the models are written out as, in float64."""
    forward = ReferenceEvaluator(with_float_type(written_out, TensorProto.DOUBLE), new_ops=[reference_class()])
    coarse = {node.output[0].split("/")[0] for node in written_out.graph.node if node.op_type in COARSELY}
    feeds = _together(cases)
    exact = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in feeds.items()}

    def run_exactly(**moved: np.ndarray) -> list[dict[str, np.ndarray]]:
        """The float outputs of each case by name."""
        arrays = map(np.asarray, forward.run(None, exact | moved))
        answers = zip((v.name for v in model.graph.output), arrays, strict=True)
        return [{n: y for n, y in outputs if y.dtype.kind == "f"} for outputs in _each(cases, answers)]

    at = run_exactly()
    wrt = [f"{n}/{name}" for n, case in enumerate(cases) for name in case.wrt]
    graph = ob.backward(model, wrt=wrt, of=[name for outputs in at for name in outputs])
    derivative, session = ob.derivatives(graph)[-1], ob.session(graph)
    accepted = {i.name: i.type for i in session.get_inputs()}
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    fed = {n: x for n, x in feeds.items() if n in accepted}
    generators = [np.random.default_rng(0) for _ in cases]
    seeds = {}
    for outputs, rng in zip(at, generators, strict=True):
        for name, y in outputs.items():
            seeds[name] = rng.standard_normal(np.shape(y))
            if (seed := derivative.seeds.get(name)) is not None:
                fed[seed] = seeds[name].astype(types[accepted[seed]])
            else:
                seeds[name] = np.ones_like(seeds[name])
    answers = dict(zip([o.name for o in session.get_outputs()], run(session, fed), strict=True))
    result: list[list[Along]] = [[] for _ in cases]
    for turn in range(max(len(case.wrt) for case in cases)):
        turns = {n: f"{n}/{case.wrt[turn]}" for n, case in enumerate(cases) if turn < len(case.wrt)}
        moves = {n: generators[n].standard_normal(feeds[name].shape) for n, name in turns.items()}
        settings = {n: COARSE if str(n) in coarse else EXACT for n in turns}
        above, below = (
            run_exactly(**{name: exact[name] + sign * settings[n][0] * moves[n] for n, name in turns.items()})
            for sign in (1, -1)
        )
        for n, name in turns.items():
            (step, tolerance), v, gradient = settings[n], moves[n], answers[derivative.results[name]]
            assert gradient.shape == v.shape, (name, gradient.shape)
            moved = sum(float(np.sum(seeds[y] * (above[n][y] - below[n][y]))) for y in at[n]) / (2 * step)
            scale = float(np.linalg.norm(gradient) * np.linalg.norm(v)) + abs(moved)
            allowed = tolerance * scale + 1e-6
            result[n].append(Along(cases[n].wrt[turn], float(np.sum(gradient * v)), moved, allowed))
    return result


def compare(before: Sequence[np.ndarray], after: Sequence[np.ndarray], tolerance: float = 0) -> None:
    for theirs, ours in zip(before, after, strict=True):
        assert np.asarray(theirs).dtype == np.asarray(ours).dtype
        if np.asarray(theirs).dtype.kind != "f":
            np.testing.assert_array_equal(ours, theirs)
            continue
        close = tolerance or TOLERANCE[theirs.dtype.type]
        np.testing.assert_allclose(ours, theirs, rtol=close, atol=close, strict=True)


def _info(name: str, array: np.ndarray) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, _element(array), array.shape)


def _element(array: np.ndarray) -> int:
    return TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)


@dataclass(frozen=True, eq=False)
class Kernel:
    """An operator whose gradient is compared with differences of onnxruntime's own kernel; settings: of `one_node`.

    half: the gradient of the same numbers in float16 agrees with that, too.
    """

    op_type: str
    feeds: Feeds
    wrt: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False
    step: float = 2e-3

    def __str__(self) -> str:
        return f"{self.op_type} {self.settings}"

    def case(self, dtype: type = np.float32) -> Fused:
        """The operator of numbers in a type."""
        feeds = {n: x.astype(dtype) if x is not None and x.dtype == np.float32 else x for n, x in self.feeds.items()}
        return fused(self.op_type, feeds, self.wrt, **self.settings)


def check_kernel_gradient(
    op_type: str, feeds: Feeds, wrt: Sequence[str], *, half: bool = False, step: float = 2e-3, **settings: Any
) -> None:
    """`check_kernel_gradients` of one."""
    check_kernel_gradients([Kernel(op_type, feeds, wrt, settings, half, step)])


def check_kernel_gradients(kernels: Sequence[Kernel]) -> None:
    """<dy, F(x + h·v) - F(x - h·v)> / 2h = <dx, v>, F being onnxruntime's own kernel in float32, on two routes."""
    alike: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault(str(kernel.case().model.opset_import), []).append(kernel)
    for group in alike.values():
        check_each(group, _kernel_gradients, _check_along)


def _kernel_gradients(kernels: Sequence[Kernel], tolerance: float = 2e-3) -> list[list[Along]]:
    cases = [kernel.case() for kernel in kernels]
    model, feeds = symbolic(joined([case.model for case in cases])), _together(cases)
    forward, generators = forward_session(model), [np.random.default_rng(1) for _ in cases]

    def firsts(**moved: np.ndarray) -> list[np.ndarray]:
        return [outputs[0].astype(np.float64) for outputs in _each(cases, run(forward, feeds | moved))]

    at = firsts()
    dys = [rng.standard_normal(y.shape).astype(np.float32) for rng, y in zip(generators, at, strict=True)]
    moves = {
        f"{n}/{name}": (rng.standard_normal(x.shape) * np.sqrt(np.mean(x**2))).astype(np.float32)
        for n, (case, rng) in enumerate(zip(cases, generators, strict=True))
        for name, x in ((name, case.feeds[name]) for name in case.wrt)
    }
    moved: dict[str, float] = {}
    for turn in range(max(len(case.wrt) for case in cases)):
        turns = {n: f"{n}/{case.wrt[turn]}" for n, case in enumerate(cases) if turn < len(case.wrt)}
        above, below = (
            firsts(**{x: feeds[x] + sign * np.float32(kernels[n].step) * moves[x] for n, x in turns.items()})
            for sign in (1, -1)
        )
        moved |= {x: float(np.sum(dys[n] * (above[n] - below[n]))) / (2 * kernels[n].step) for n, x in turns.items()}
    result: list[list[Along]] = [[] for _ in cases]
    grads: dict[str, np.ndarray] = {}
    for route in ("onnx", "native"):
        grads = _gradients(cases, model, dys, route)
        for n, case in enumerate(cases):
            noise = 3e-7 * float(np.linalg.norm(at[n])) / kernels[n].step
            for name in case.wrt:
                x = f"{n}/{name}"
                along = grads[x].astype(np.float64) * moves[x]
                allowed = tolerance * (float(np.linalg.norm(along)) + abs(moved[x])) + noise
                result[n].append(Along(f"{route}, {name}", float(along.sum()), moved[x], allowed))
    halves = [n for n, kernel in enumerate(kernels) if kernel.half]
    if halves:
        coarse = [kernels[n].case(np.float16) for n in halves]
        answers = _gradients(coarse, joined([case.model for case in coarse]), [dys[n] for n in halves], "native")
        for k, n in enumerate(halves):
            for name in cases[n].wrt:
                exact, got = grads[f"{n}/{name}"], answers[f"{k}/{name}"].astype(np.float64)
                allowed = 2e-2 * (float(np.linalg.norm(exact)) + 1e-3)
                result[n].append(
                    Along(f"float16, {name}: the distance", float(np.linalg.norm(got - exact)), 0, allowed)
                )
    return result


def _gradients(cases: Sequence[Fused], model: ModelProto, dys: Sequence[np.ndarray], route: str) -> dict:
    """The gradients of the first outputs of cases in one model, by the names that their inputs have there."""
    wrt = [f"{n}/{name}" for n, case in enumerate(cases) for name in case.wrt]
    firsts = [outputs[0].name for outputs in _each(cases, model.graph.output)]
    graph = ob.backward(model, wrt=wrt, of=firsts, kernels=route)
    derivative, session = ob.derivatives(graph)[-1], ob.session(graph)
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    accepted = {i.name: i.type for i in session.get_inputs()}
    fed = {n: x for n, x in _together(cases).items() if n in accepted}
    for name, dy in zip(firsts, dys, strict=True):
        fed[derivative.seeds[name]] = dy.astype(types[accepted[derivative.seeds[name]]])
    answers = dict(zip([o.name for o in session.get_outputs()], run(session, fed), strict=True))
    return {name: answers[derivative.results[name]] for name in wrt}
