"""A fused operator against what it is written out as: onnxruntime runs both, with shapes known and unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.converters.prepare.float_types import with_float_type
from onnx_backprop.converters.prepare.fused.table import EXPANSIONS
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.support.adjoint import forward_session, run
from tests.support.rule_checks import COARSE, EXACT, symbolic

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
    """The prepared model, of which nothing is left to write out."""
    prepared = prepare(model)
    left = [node.op_type for node in all_nodes(prepared) if (node.domain, node.op_type) in EXPANSIONS]
    assert not left, [entry.value for node in prepared.graph.node for entry in node.metadata_props]
    return prepared


def check_fused(
    op_type: str,
    feeds: Feeds,
    wrt: Sequence[str] = (),
    outputs: int | Sequence[int] = 1,
    *,
    tolerance: float = 0,
    constants: Sequence[str] = (),
    **settings: Any,
) -> None:
    """The same outputs before and after, with shapes known and unknown; and the latter's gradient, against differences."""
    model = one_node(op_type, feeds, outputs, constants=constants, **settings)
    given = {name: x for name, x in feeds.items() if x is not None and name not in constants}
    before = run(forward_session(model), given)
    for form in (model, symbolic(model)):
        compare(before, run(forward_session(expanded(form)), given), tolerance)
    if wrt:
        check_gradient(symbolic(model), given, wrt)


def check_gradient(model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: Sequence[str]) -> None:
    """<dy, F(x + h·v) - F(x - h·v)> / 2h = <dx, v>, F being what the model is written out as, in float64."""
    written_out = expanded(model)
    forward = ReferenceEvaluator(with_float_type(written_out, TensorProto.DOUBLE))
    coarse = any(node.op_type in COARSELY for node in written_out.graph.node)
    step, tolerance = COARSE if coarse else EXACT
    outputs = [value.name for value in model.graph.output]
    exact = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in feeds.items()}
    rng = np.random.default_rng(0)
    of = [n for n, y in zip(outputs, forward.run(None, exact), strict=True) if np.asarray(y).dtype.kind == "f"]
    graph = ob.backward(model, wrt=list(wrt), of=of)
    session = ob.session(graph)
    seeds = {n: rng.standard_normal(np.shape(y)) for n, y in zip(of, forward.run(of, exact), strict=True)}
    accepted = {i.name: i.type for i in session.get_inputs()}
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    fed = {n: x for n, x in feeds.items() if n in accepted}
    for name in of:
        if f"{name}_grad" in accepted:
            fed[f"{name}_grad"] = seeds[name].astype(types[accepted[f"{name}_grad"]])
        else:
            seeds[name] = np.ones_like(seeds[name])
    answers = dict(zip([o.name for o in session.get_outputs()], run(session, fed), strict=True))
    for name in wrt:
        gradient, v = answers[f"{name}_grad"], rng.standard_normal(feeds[name].shape)
        assert gradient.shape == v.shape, (name, gradient.shape)
        above, below = (forward.run(of, exact | {name: exact[name] + s * step * v}) for s in (1, -1))
        moved = sum(float(np.sum(seeds[y] * np.subtract(a, b))) for y, a, b in zip(of, above, below, strict=True)) / (
            2 * step
        )
        got, scale = float(np.sum(gradient * v)), float(np.linalg.norm(gradient) * np.linalg.norm(v)) + abs(moved)
        assert abs(got - moved) <= tolerance * scale + 1e-6, f"{name}: expected {moved:.8g}, got {got:.8g}"


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


def check_kernel_gradient(
    op_type: str,
    feeds: Feeds,
    wrt: Sequence[str],
    *,
    routes: Sequence[str] = ("onnx", "native"),
    step: float = 2e-3,
    tolerance: float = 2e-3,
    constants: Sequence[str] = (),
    half: bool = False,
    **settings: Any,
) -> None:
    """<dy, F(x + h·v) - F(x - h·v)> / 2h = <dx, v>, F being onnxruntime's own kernel in float32, on each route.

    half: that the gradient of the same numbers in float16 agrees with that, too.
    """
    given = {name: x for name, x in feeds.items() if x is not None and name not in constants}
    model = symbolic(one_node(op_type, feeds, constants=constants, **settings))
    kernel, rng = forward_session(model), np.random.default_rng(1)
    y = run(kernel, given)[0]
    dy = rng.standard_normal(y.shape).astype(np.float32)
    moves = {n: (rng.standard_normal(given[n].shape) * np.sqrt(np.mean(given[n] ** 2))).astype(np.float32) for n in wrt}
    noise = 3e-7 * float(np.linalg.norm(y)) / step
    found: dict[str, np.ndarray] = {}
    for route in routes:
        found = _gradients(model, given | {"y0_grad": dy}, wrt, route)
        for name, v in moves.items():
            above, below = (run(kernel, given | {name: given[name] + s * np.float32(step) * v})[0] for s in (1, -1))
            moved = float(np.sum(dy.astype(np.float64) * (above.astype(np.float64) - below))) / (2 * step)
            got = float(np.sum(found[name].astype(np.float64) * v))
            scale = float(np.linalg.norm(found[name] * v)) + abs(moved)
            assert abs(got - moved) <= tolerance * scale + noise, (
                f"{route}, {name}: expected {moved:.6g}, got {got:.6g}"
            )
    if half:
        coarse = {n: x.astype(np.float16) if x is not None and x.dtype == np.float32 else x for n, x in feeds.items()}
        model = one_node(op_type, coarse, constants=constants, **settings)
        fed = {n: x for n, x in coarse.items() if x is not None and n not in constants}
        for name, got in _gradients(model, fed | {"y0_grad": dy.astype(np.float16)}, wrt, "native").items():
            scale = np.linalg.norm(found[name]) + 1e-3
            assert np.linalg.norm(got.astype(np.float64) - found[name]) <= 2e-2 * scale, f"float16, {name}"


def _gradients(model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: Sequence[str], route: str) -> dict:
    graph = ob.backward(model, wrt=list(wrt), of=["y0"], kernels=route)
    session = ob.session(graph)
    accepted = {i.name for i in session.get_inputs()}
    fed = {n: x for n, x in feeds.items() if n in accepted}
    answers = dict(zip([o.name for o in session.get_outputs()], run(session, fed), strict=True))
    return {name: answers[f"{name}_grad"] for name in wrt}
