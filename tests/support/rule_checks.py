"""Models in ONNX text for tests of gradient rules, and the versions of operators that rules must serve."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import ModelProto, parser

DIRECTIONS = 3
# (step, tolerance): what float64 allows, and what is left where the reference evaluator itself works in float32
EXACT, COARSE = (1e-5, 2e-4), (3e-3, 2e-3)


def model_of(text: str, *, opset: int = 18) -> ModelProto:
    """`g (inputs) => (outputs) { nodes }` as a model."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')


def symbolic(model: ModelProto) -> ModelProto:
    """The same model with every dimension of its inputs a symbol of its own, outputs without shapes."""
    result = ModelProto()
    result.CopyFrom(model)
    for value in result.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    for value in result.graph.output:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    return result


def default_domain_versions(op_type: str, opsets: Sequence[int] = range(18, 27)) -> set[int]:
    """The versions of an operator that models of these opsets can hold."""
    result: set[int] = set()
    for opset in opsets:
        try:
            schema = onnx.defs.get_schema(op_type, opset, "")
        except onnx.defs.SchemaError:
            continue
        result.add(schema.since_version)
    return result
