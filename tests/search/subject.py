"""A model under the oracles: its forward, its gradient, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.opset.graphs.walk import all_nodes, attributes_of
from tests.search.dress import copy, floats_of, in_float64
from tests.search.generate import Feeds, exact, stock

Named = dict[str, np.ndarray]


class SkippedError(Exception):
    """The model says nothing here: no smooth point, no float64, no row of its own."""


def opened(model: ModelProto, kernels: str | None = None) -> Callable[[Feeds], Named]:
    """A session that gives outputs by name and takes what it accepts of the feeds.

    Without onnxruntime's optimizations where these fail, as of an If of a constant condition that they take apart.
    """
    session = stock(model) if kernels is None else ob.session(model, kernels=kernels, session_options=exact())
    accepted = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
    names = [v.name for v in session.get_outputs()]

    def run(feeds: Feeds) -> Named:
        fed = {k: v.copy() for k, v in feeds.items() if k in accepted}
        return dict(zip(names, map(np.asarray, session.run(names, fed)), strict=True))

    return run


@dataclass
class Subject:
    """A model, what it is fed, and what its derivatives are of; `wide`: the same in float64."""

    model: ModelProto
    feeds: Feeds
    without: tuple[str, ...] = ()  # what only nodes without a derivative lead from

    def __post_init__(self) -> None:
        self.wrt, self.of = floats_of(self.model)
        self.wrt = [n for n in self.wrt if n not in self.without]
        self.rng = np.random.default_rng(7)
        values = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}
        self.point = {n: self.feeds[n] if n in self.feeds else values[n] for n in self.wrt}

    @cached_property
    def exact(self) -> Subject:
        """The same in float64, where onnxruntime has kernels for all of it."""
        model, feeds = in_float64(self.model, self.feeds)
        wide = Subject(model, feeds, self.without)
        try:
            return wide if wide.values and wide.is_wide else self
        except Exception:  # noqa: BLE001 - of many classes
            return self

    @cached_property
    def is_wide(self) -> bool:
        """Whether it computes in float64 alone, Casts inside included.

        onnxruntime has float32 means in LayerNormalizations below opset 17, and computes Shrink in float32.
        """
        early = self.model.opset_import[0].version < 17
        for node in all_nodes(self.model):
            mean = node.op_type == "LayerNormalization" and any(node.output[1:])
            if node.op_type == "Shrink" or (early and mean):
                return False
        kinds = {v.dtype for v in (*self.point.values(), *(self.values[n] for n in self.of))}
        return kinds == {np.dtype(np.float64)} and in_float64(self.model, {})[0] == self.model

    @cached_property
    def rounding(self) -> float:
        """By how much two ways to one answer may differ, relative to the largest number."""
        return 1e-8 if self.is_wide else 2e-3

    @cached_property
    def fed(self) -> ModelProto:
        """The model with its initializers as inputs, too, so that runs may move them."""
        model = copy(self.model)
        there = {v.name for v in model.graph.input}
        for t in model.graph.initializer:
            if t.name in self.wrt and t.name not in there:
                model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
        return model

    @cached_property
    def forward(self) -> Callable[[Feeds], Named]:
        if any(attributes_of(node).get("training_mode") for node in all_nodes(self.fed)):
            return lambda feeds: opened(self.fed)(feeds)  # onnxruntime writes new statistics over those of later runs
        return opened(self.fed)

    @cached_property
    def values(self) -> Named:
        return self.forward(self.feeds | self.point)

    def random(self, like: Named) -> Named:
        return {n: self.rng.uniform(-1, 1, v.shape).astype(v.dtype) for n, v in like.items()}

    @cached_property
    def seeds(self) -> Named:
        """What multiplies each float output: 1 where it has one element, which `backward` seeds itself."""
        rng = np.random.default_rng(11)
        values = {n: self.values[n] for n in self.of}
        random = {n: rng.uniform(0.5, 1.5, v.shape).astype(v.dtype) for n, v in values.items()}
        return {n: np.ones_like(v) if v.size == 1 else v for n, v in random.items()}

    @cached_property
    def converted(self) -> ModelProto:
        return ob.backward(self.model, wrt=self.wrt, of=self.of)

    def seeded(self, derived: ModelProto, seeds: Named | None = None) -> Feeds:
        names = ob.derivatives(derived)[-1].seeds
        return self.feeds | {names[n]: v for n, v in (self.seeds if seeds is None else seeds).items() if n in names}

    def gradients(self, derived: ModelProto, kernels: str | None = None, feeds: Feeds | None = None) -> Named:
        answers = opened(derived, kernels)(feeds or self.seeded(derived))
        results = ob.derivatives(derived)[-1].results
        return {n: answers[results[n]] for n in results}

    @cached_property
    def gradient(self) -> Named:
        """By which every other answer is judged: of `backward`, in stock onnxruntime."""
        result = self.gradients(self.converted)
        for n, v in result.items():
            if (v.shape, v.dtype) != (self.point[n].shape, self.point[n].dtype):
                raise AssertionError(f"gradient of the shape {v.shape} and type {v.dtype}")
        return result

    def keeps_shapes(self, along: Named, by: float) -> bool:
        """Whether outputs have the same shapes there: Unique has one more number where two equal ones part."""
        there = self.forward(self.moved(along, by))
        return all(there[n].shape == self.values[n].shape for n in self.of)

    def moved(self, along: Named, by: float) -> Feeds:
        return self.feeds | self.point | {n: np.asarray(self.point[n] + by * v) for n, v in along.items()}


def one_number(s: Subject) -> ModelProto:
    """s = Σ over outputs of Σ c·y², c fixed."""
    model = copy(s.model)
    parts = []
    for k, n in enumerate(s.of):
        c = numpy_helper.from_array(s.seeds[n], f"c {k}")
        model.graph.initializer.append(c)
        model.graph.node.append(helper.make_node("Mul", [n, n], [f"sq {k}"], name=f"sq {k}"))
        model.graph.node.append(helper.make_node("Mul", [f"sq {k}", c.name], [f"m {k}"], name=f"m {k}"))
        model.graph.node.append(helper.make_node("ReduceSum", [f"m {k}"], [f"p {k}"], keepdims=0, name=f"p {k}"))
        kind = helper.np_dtype_to_tensor_dtype(s.values[n].dtype)
        target = helper.np_dtype_to_tensor_dtype(s.values[s.of[0]].dtype)
        if kind != target:
            model.graph.node.append(helper.make_node("Cast", [f"p {k}"], [f"t {k}"], to=target, name=f"t {k}"))
        parts.append(f"t {k}" if kind != target else f"p {k}")
    model.graph.node.append(helper.make_node("Sum", parts, ["s of all"], name="s of all"))
    kind = helper.np_dtype_to_tensor_dtype(s.values[s.of[0]].dtype)
    model.graph.output.append(helper.make_tensor_value_info("s of all", kind, []))
    try:
        stock(model)
    except Exception as error:
        raise SkippedError("onnxruntime infers another shape of an output than it gives") from error
    return model


def dot(a: Named, b: Named) -> float:
    return float(sum((a[n].astype(np.float64) * b[n]).sum() for n in b))


def size(a: Named, b: Named) -> float:
    return float(sum(np.abs(a[n].astype(np.float64) * b[n]).sum() for n in b))


def differs(got: Named, want: Named, tolerance: float, what: str) -> str | None:
    """Where two answers differ by more than a share of the largest number of all, NaN in both being equal."""
    if set(got) != set(want):
        return f"{what}: other names"
    finite = [np.abs(v[np.isfinite(v)]).max(initial=0) for v in want.values() if v.dtype.kind == "f"]
    scale = max(1e-3, *finite) if finite else 1.0
    for n, v in want.items():
        if got[n].size == v.size == 0:
            continue  # of a loop without steps onnxruntime takes symbols for 0
        if got[n].shape != v.shape:
            return f"{what}: shapes {got[n].shape} and {v.shape}"
        if not np.allclose(got[n], v, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"{what}: off by {np.abs(got[n].astype(float) - v).max():.2g} of {scale:.2g}"
    return None
