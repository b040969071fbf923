"""What tests of `check_gradients` share: models, and gradient rules made wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward

SMALL = """
    small (float[N, 1, 4, 4] x) => (float[N, 2, 4, 4] y)
    <float[2, 1, 1, 1] weight = {0.5, -1.5}, float[2] bias = {0.25, 1.0}, float[2, 1, 1] gain = {2.0, 3.0}>
    { [conv] c = Conv(x, weight, bias)  [relu] r = Relu(c)  [scale] y = Mul(r, gain) }
"""


def model_of(text: str, *, opset: int = 18, ir_version: int = 10) -> ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {text}')


def verdicts(report: ob.GradientReport) -> dict[str, str]:
    return {result.variables: result.verdict for result in report.results}


Change = Callable[[Builder, Forward, list[ir.Value | None]], Sequence[ir.Value | None]]


def break_rule(monkeypatch: pytest.MonkeyPatch, op_type: str, change: Change) -> None:
    """Every version of an operator's rule gives what `change` makes of its gradients."""
    for key, rule in list(registry.RULES.items()):
        if key[:2] == ("", op_type):

            def broken(op: Builder, node: Forward, dys: object, rule: registry.Rule = rule) -> object:
                grads = rule.function(op, node, dys)
                return change(op, node, [grads] if isinstance(grads, ir.Value) else list(grads))

            monkeypatch.setitem(registry.RULES, key, replace(rule, function=broken))


def scaled(factor: float) -> Change:
    def change(op: Builder, node: Forward, grads: list[ir.Value | None]) -> list[ir.Value | None]:
        return [None if g is None else op.Mul(g, op.scalar(factor, node.input(0))) for g in grads]

    return change


def wide_model() -> ModelProto:
    model = model_of("""
        wide (float[2, 3, 96, 96] x) => (float[2, 4, 48, 48] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w)  r = Relu(c)  y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) }
    """)
    w = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model
