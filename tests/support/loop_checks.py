"""Gradients of models in float64 against differences of onnxruntime's own forward, which runs loops as they are.

onnx's reference evaluator knows no directions of Scan and stacks no rows of a Loop without steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto, checker, parser

import onnx_backprop as ob
from tests.support.gradient_checks import session_run

STEP = 1e-5


def float64_model(text: str, opset: int = 18) -> ModelProto:
    """A graph in ONNX text whose float tensors are of float64."""
    text = text.replace("float[", "double[").replace("float {", "double {").replace("float,", "double,")
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


def loop_errors(
    model: ModelProto,
    feeds: Mapping[str, np.ndarray],
    wrt: Sequence[str],
    *,
    seed: int,
    checkpoint: int = 0,
    order: int = 1,
    kernels: str = "onnx",
) -> list[str]:
    """What is wrong with the gradients of a model, or with those of its gradient where the order is 2; [] if nothing."""
    graph = ob.backward(model, wrt=list(wrt), checkpoint=checkpoint, kernels=kernels)
    checker.check_model(graph, full_check=True)
    rng = np.random.default_rng(seed)
    forward, run = session_run(model), session_run(graph)
    names = [value.name for value in model.graph.output]
    values = dict(zip(names, forward(dict(feeds)), strict=True))
    asked = {value.name for value in graph.graph.input}
    seeds = {f"{name}_grad": rng.uniform(-1, 1, y.shape) for name, y in values.items() if f"{name}_grad" in asked}
    weights = {name: seeds.get(f"{name}_grad", np.ones_like(y)) for name, y in values.items() if y.dtype == np.float64}
    answers = dict(zip([value.name for value in graph.graph.output], run({**feeds, **seeds}), strict=True))
    errors = [f"{name} is not what it was" for name, y in values.items() if not np.array_equal(answers[name], y)]
    for name in wrt:
        got, v = answers[f"{name}_grad"], rng.uniform(-1, 1, feeds[name].shape)
        if got.shape != feeds[name].shape:
            errors.append(f"{name}: a gradient of shape {got.shape}")
            continue
        above, below = (
            dict(zip(names, forward({**feeds, name: feeds[name] + sign * STEP * v}), strict=True)) for sign in (1, -1)
        )
        want = sum(float((w * (above[y] - below[y])).sum()) for y, w in weights.items()) / (2 * STEP)
        have = float((got * v).sum())
        if not abs(have - want) <= 1e-6 * (1 + abs(want)):
            errors.append(f"d{name}: {have:.9g}, differences say {want:.9g} (seed {seed})")
    if order == 1 or errors:
        return errors
    names_of = {name: name.replace("_grad", "_first") for name in (*seeds, *(f"{name}_grad" for name in wrt))}
    renamed = ir.from_proto(graph)
    for value in (*renamed.graph.inputs, *renamed.graph.outputs):
        value.name = names_of.get(str(value.name), value.name)
    first = ir.to_proto(renamed)
    kept = [value for value in first.graph.output if value.name in names_of.values()]
    del first.graph.output[:]
    first.graph.output.extend(kept)
    given = {names_of.get(name, name): value for name, value in {**feeds, **seeds}.items()}
    more = [name for name, value in given.items() if value.dtype == np.float64]
    second_order = loop_errors(
        first, given, more, seed=seed + 1, checkpoint=checkpoint, order=order - 1, kernels=kernels
    )
    return [f"second derivative: {error}" for error in second_order]


def run(model: ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a model by their names, sequences and optionals among them, in plain onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))
