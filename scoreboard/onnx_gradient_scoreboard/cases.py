"""Cases: one operator each, out of ONNX's own node tests. What is asked is data; nothing here knows a producer.

A node test is taken where it has float inputs and float outputs, or numbers of a type that its schema lets be floats.
Inputs are those that the schema calls differentiable; where a schema has no opinion, all floats. The values are ONNX's,
moved by a hundredth so that no maximum is a tie and no kink is met. A test of one version of an operator is one of
every other version whose node means the same: where onnx's checker accepts it and onnxruntime gives ONNX's outputs.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, defs, helper
from onnx.defs import OpSchema

if TYPE_CHECKING:
    import onnxruntime
    from onnx.backend.test.case.test_case import TestCase

OPSETS = range(13, 24)
STATISTICS = {"BatchNormalization": {3, 4}}  # inputs that renew themselves from batches: nobody's weights
LARGEST = 4000  # float elements of a case's inputs
FLOAT = "tensor(float)"
Arrays = dict[str, np.ndarray]
Category = OpSchema.DifferentiationCategory


@dataclass(frozen=True)
class Case:
    """A model whose tensors are all graph inputs, and what it is asked.

    inputs: what gradients by inputs are asked for; weights: by weights. What is neither becomes an initializer.
    opsets: those at which the model means the same. tolerance: of the largest entry, with its source.
    differentiable: what the schema says; where it says no, a refusal is an answer as right as the true derivative.
    """

    name: str
    operator: str
    model: ModelProto
    feeds: Arrays
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: tuple[int, ...]
    tolerance: float
    tolerance_from: str
    differentiable: bool = True

    def attributes(self) -> str:
        """Of the one node, as text; of a network, its operators."""
        nodes = self.model.graph.node
        if len(nodes) > 1:
            return ", ".join(sorted({node.op_type for node in nodes}))
        values = {a.name: helper.get_attribute_value(a) for a in nodes[0].attribute if a.type not in (4, 5, 10)}
        return ", ".join(f"{k}={v.decode() if isinstance(v, bytes) else v}" for k, v in values.items())


def at(model: ModelProto, opset: int) -> ModelProto:
    """The same graph, stamped with another opset of ONNX."""
    result = ModelProto()
    result.CopyFrom(model)
    del result.opset_import[:]
    result.opset_import.append(helper.make_opsetid("", opset))
    result.ir_version = helper.find_min_ir_version_for(list(result.opset_import))
    return result


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """onnxruntime on one core, without a word; a producer that does without it need not have it."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def operators() -> dict[str, Case]:
    """All cases of one operator by name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of ONNX's cases
        return accepted(load_model_tests(kind="node"))


def accepted(tests: Iterable[TestCase]) -> dict[str, Case]:
    """Those of ONNX's node tests that are cases; of several that differ in a type or in numbers alone, the first."""
    cases: dict[str, Case] = {}
    for case in _accepted(tests):
        fixed = [repr(a) for n, a in case.feeds.items() if n not in case.inputs]
        shapes = [case.feeds[n].shape for n in case.inputs]
        cases.setdefault(f"{case.operator} {case.attributes()} {shapes} {fixed} {_presence(case)}", case)
    return {case.name: case for case in cases.values()}


def _presence(case: Case) -> str:
    """Which of the optional inputs and outputs the node has: "+" or "-" for each."""
    node = case.model.graph.node[0]
    return "".join("-+"[bool(name)] for name in [*node.input, *node.output])


def _accepted(tests: Iterable[TestCase]) -> Iterator[Case]:
    for test in tests:
        graph = test.model.graph
        node = graph.node[0]
        if len(graph.node) > 1 or node.domain or not defs.has(node.op_type, OPSETS[-1], ""):
            continue
        given, expected = test.data_sets[0]
        if len(given) != len(graph.input) or not all(
            isinstance(a, np.ndarray | np.generic) for a in [*given, *expected]
        ):
            continue
        schema = defs.get_schema(node.op_type, OPSETS[-1], "")
        model, feeds, results = _in_floats(test.model, schema, given, expected)
        case = _case(test, schema, model, feeds)
        if case is None:
            continue
        opsets = tuple(_opsets(model, feeds, results, test.rtol))
        if opsets:
            model = at(model, opsets[-1])
            yield replace(case, opsets=opsets, model=model, feeds=moved(case, session(model)))


def _in_floats(
    model: ModelProto, schema: OpSchema, given: list[np.ndarray], expected: list[np.ndarray]
) -> tuple[ModelProto, Arrays, list[np.ndarray]]:
    """Numbers whose type the schema lets be float become so: ONNX tests Einsum in double, CumSum in integers."""
    result = ModelProto()
    result.CopyFrom(model)
    node, graph = result.graph.node[0], result.graph
    may = {c.type_param_str for c in schema.type_constraints if FLOAT in c.allowed_type_strs}
    kinds = {name: _formal(schema.inputs, i) for i, name in enumerate(node.input)}
    kinds |= {name: _formal(schema.outputs, i) for i, name in enumerate(node.output)}
    types = {kinds[v.name].type_str for v in graph.input if v.name in kinds}
    floats = {t for t in types if t in may and t not in _keep(schema)}
    arrays = []
    for value, array in zip([*graph.input, *graph.output], [*given, *expected], strict=True):
        if value.name in kinds and kinds[value.name].type_str in floats and array.dtype.kind in "iuf":
            array = array.astype(np.float32)
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        arrays.append(np.asarray(array))
    return result, dict(zip((v.name for v in graph.input), arrays, strict=False)), arrays[len(given) :]


def _keep(schema: OpSchema) -> set[str]:
    """Types of inputs that no gradient flows through: the cases keep the numbers that ONNX gives them."""
    return {i.type_str for i in schema.inputs} - {
        i.type_str for i in schema.inputs if i.differentiation_category != Category.NonDifferentiable
    }


def _formal(parameters: list, index: int) -> OpSchema.FormalParameter:
    return parameters[min(index, len(parameters) - 1)]


def _case(test: TestCase, schema: OpSchema, model: ModelProto, feeds: Arrays) -> Case | None:
    node, graph = model.graph.node[0], model.graph
    kept = {node.input[i] for i in STATISTICS.get(node.op_type, ())}
    floats = [n for n, a in feeds.items() if a.dtype == np.float32 and a.size and n in set(node.input) - kept]
    categories = {name: _formal(schema.inputs, i).differentiation_category for i, name in enumerate(node.input)}
    tagged = [n for n in floats if categories[n] == Category.Differentiable]
    inputs = tagged or [n for n in floats if categories[n] == Category.Unknown] or floats[:1]
    results = {v.name for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    last = {n: _formal(schema.outputs, i).differentiation_category for i, n in enumerate(node.output)}
    outputs = [n for n in node.output if n in results and last[n] != Category.NonDifferentiable]
    differentiable = bool(outputs) and categories.get(inputs[0] if inputs else "") != Category.NonDifferentiable
    outputs = outputs or [n for n in node.output if n in results]
    size = sum(feeds[n].size for n in inputs)
    if (
        not inputs
        or next(filter(None, node.output)) not in outputs
        or size > LARGEST
        or not all(np.isfinite(feeds[n]).all() for n in floats)
    ):
        return None
    name = test.name.removeprefix("test_")
    tolerance = max(test.rtol, 1e-3)
    weights = tuple(inputs[1:])
    source = "ONNX's own for this case, against the forward"
    return Case(name, node.op_type, model, feeds, tuple(inputs), weights, tuple(outputs), (), tolerance, source,
                differentiable)  # fmt: skip


def _opsets(model: ModelProto, feeds: Arrays, results: list[np.ndarray], tolerance: float) -> Iterator[int]:
    """Opsets at which the node passes onnx's checker and onnxruntime computes what ONNX expects."""
    node = model.graph.node[0]
    answers: dict[int, bool] = {}
    for opset in reversed(OPSETS):
        if not defs.has(node.op_type, opset, ""):
            continue
        version = defs.get_schema(node.op_type, opset, "").since_version
        if version not in answers:
            answers[version] = _runs(at(model, opset), feeds, results, tolerance)
    for opset in OPSETS:
        if defs.has(node.op_type, opset, "") and answers[defs.get_schema(node.op_type, opset, "").since_version]:
            yield opset


def _runs(model: ModelProto, feeds: Arrays, results: list[np.ndarray], tolerance: float) -> bool:
    try:
        onnx.checker.check_model(model)
        outputs = session(model).run(None, feeds)
    except Exception:  # noqa: BLE001 - whatever it says, it is no case at this opset
        return False
    return all(
        np.shape(a) == b.shape and np.allclose(a, b, rtol=tolerance, atol=1e-5 * _largest(b))
        for a, b in zip(outputs, results, strict=True)
        if b.dtype.kind == "f"
    )


def _largest(array: np.ndarray) -> float:
    """Of the finite entries, 1 at least."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=1))


def moved(case: Case, forward: onnxruntime.InferenceSession) -> Arrays:
    """Feeds whose differentiated floats lie off ties and kinks, and where the operator is defined."""
    for sign in (-1, 1):  # towards 0, where asin is defined; away from it, where acosh is
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        feeds = dict(case.feeds)
        for name in case.inputs:
            array = feeds[name]
            step = 0.01 * rng.uniform(0.3, 1, array.shape) * np.where(array < 0, -sign, sign)
            feeds[name] = np.asarray(array + step * np.maximum(np.abs(array), 0.1), np.float32)
        try:
            if all(np.isfinite(a).all() for a in forward.run(list(case.outputs), feeds)):
                return feeds
        except Exception:  # noqa: BLE001 - numbers that the operator refuses
            continue
    return case.feeds
