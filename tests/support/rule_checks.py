"""A gradient rule against differences of the forward.

The forward runs in float64 in onnx's reference evaluator (after agreeing with onnxruntime in float32), the gradient
in an onnxruntime session. For a random cotangent dy and random directions v,
<dy, F(x + h·v) - F(x - h·v)> / 2h must be <F'ᵀ(dy), v>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, checker, parser, shape_inference
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from tests.support.adjoint import forward_session, run

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


def gradient_errors(
    model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: Sequence[str], *, seed: int = 0, f32: bool = False
) -> list[str]:
    """One line per input whose gradient disagrees; [] when the rule is right."""
    step, tolerance = COARSE if f32 else EXACT
    graph = ob.backward(model, wrt=list(wrt))
    checker.check_model(graph, full_check=True)
    shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
    reference = ReferenceEvaluator(model)
    names = [o.name for o in model.graph.output]
    f64 = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}

    def forward(point: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(y) for y in reference.run(None, dict(point))]

    exact = forward(f64)
    for name, ours, theirs in zip(names, exact, run(forward_session(model), dict(feeds)), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5, err_msg=f"forward of {name}")

    rng = np.random.default_rng(seed)
    session = ob.session(graph)
    accepted = [i.name for i in session.get_inputs()]
    cotangents = {n: rng.standard_normal(y.shape) for n, y in zip(names, exact, strict=True)}
    for name, y in zip(names, exact, strict=True):
        if f"{name}_grad" not in accepted:  # seeded with 1, or not a float
            cotangents[name] = np.ones(y.shape) if y.dtype.kind == "f" else np.zeros(y.shape)
    fed = dict(feeds) | {f"{n}_grad": dy.astype(np.float32) for n, dy in cotangents.items() if f"{n}_grad" in accepted}
    answers = dict(zip([o.name for o in session.get_outputs()], run(session, fed), strict=True))

    errors: list[str] = []
    for name in wrt:
        got = answers[f"{name}_grad"]
        assert got.shape == feeds[name].shape, f"{name}: gradient of shape {got.shape}"
        for n in range(DIRECTIONS):
            v = rng.standard_normal(feeds[name].shape)
            above, below = (forward(f64 | {name: f64[name] + s * step * v}) for s in (1, -1))
            expected = sum(
                float(np.sum(cotangents[y] * (a - b))) / (2 * step)
                for y, a, b in zip(names, above, below, strict=True)
                if np.asarray(a).dtype.kind == "f"
            )
            answer = float(np.sum(got.astype(np.float64) * v))
            scale = float(np.linalg.norm(got) * np.linalg.norm(v)) + abs(expected) + 1e-6
            if not abs(answer - expected) <= tolerance * scale:
                errors.append(f"{name}, direction {n}, seed {seed}: expected {expected:.8g}, got {answer:.8g}")
    return errors


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
