"""Operators differentiated through the function body that ONNX gives them.

Rules that exist for these operators are taken away first, so that it is the body that is differentiated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import inliner, parser
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support.gradient_checks import (
    LINEAR,
    SMOOTH,
    Case,
    Oracle,
    build,
    case,
    check_cases,
    check_gradient,
    positive,
    session_run,
)

PIECES = Oracle("onnxruntime", 2.0**-8, 2e-4)


def body(nodes: str, *, oracle: Oracle = SMOOTH, **given: Any) -> Case:
    return case(nodes, oracle=oracle, **given)


CASES = [
    *(body(f"y = {op}(x)", x=(3, 4)) for op in ("Mish", "Softsign", "Softplus", "HardSwish", "Softmax", "LogSoftmax")),
    *(body(f"y = {op}(x)", x=(3, 4), oracle=PIECES) for op in ("Selu", "Elu", "LeakyRelu")),
    *(body(f"y = Celu {alpha} (x)", x=(3, 4), oracle=PIECES, skips=["half"]) for alpha in ("", "<alpha = 0.5>")),
    body("y = Relu(x)", x=(3, 4), oracle=PIECES),
    # float16: the rules of Max and Min look for their output among their inputs, and onnxruntime rounds one of them only
    body("y = HardSigmoid <alpha = 0.3> (x)", x=(3, 4), oracle=PIECES, skips=["half"]),
    body("y = Selu <alpha = 1.5, gamma = 0.7> (x)", x=(3, 4), oracle=PIECES),
    body("y = ThresholdedRelu <alpha = 0.6> (x)", x=(3, 4), oracle=PIECES),
    body("y = Shrink <lambd = 0.6, bias = 0.2> (x)", x=(3, 4), oracle=PIECES),
    body("y = PRelu (x, s)", x=(3, 4), s=(4,), oracle=PIECES),
    body("y = Clip (x, low, high)", x=(3, 4), constants={"low": np.float32(-0.8), "high": np.float32(0.9)},
         oracle=PIECES, ),
    *(body(f'y = Gelu <approximate = "{form}"> (x)', x=(3, 4), since=20) for form in ("none", "tanh")),
    body("y = MeanVarianceNormalization <axes = [0, 2]> (x)", x=(2, 2, 3), skips=["half"]),  # its body mixes types
    body("y = LayerNormalization <axis = 1, epsilon = 0.1> (x, s, b)", x=(2, 3, 2), s=(3, 2), b=(3, 2)),
    body("y = GroupNormalization <num_groups = 2, epsilon = 0.1> (x, s, b)", x=(2, 4, 3), s=(4,), b=(4,), since=21),
    body("y = RMSNormalization <axis = -1, epsilon = 0.1> (x, s)", x=(2, 3, 4), s=(4,), since=23),
    *(body(f"y = {op} (x, axes)", x=positive((2, 3, 4)), constants={"axes": np.array([1])})
      for op in ("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "ReduceL1", "ReduceL2")),
    body("y = CenterCropPad <axes = [1, 0]> (x, shape)", x=(5, 4), constants={"shape": np.array([6, 3])},
         oracle=LINEAR),
    body("y = Swish <alpha = 0.7> (x)", x=(3, 4), since=24, skips=["symbolic", "unranked"]),  # onnxruntime knows no body of 25
]  # fmt: skip


def without_rules(monkeypatch: pytest.MonkeyPatch, *op_types: str) -> None:
    for key in [key for key in registry.RULES if key[1] in op_types]:
        monkeypatch.delitem(registry.RULES, key)


@pytest.mark.parametrize("variant", ["static", "symbolic", "fed", "unranked", "half"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: Case, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch, case.op)
    check_cases([case], variant)


def test_the_forward_node_stays_and_only_what_the_gradient_reads_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_rules(monkeypatch, "Swish")
    model, _, _ = build(case("y = Swish(x)", x=(3, 4)), opset=24)
    again = [n.op_type for n in ob.backward(model, wrt=["x"]).graph.node]
    assert again[0] == "Swish"
    assert again.count("Swish") == 1
    assert again.count("Sigmoid") == 1


def test_bodies_within_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celu is an Elu, which is a Where and more."""
    without_rules(monkeypatch, "Celu", "Elu")
    model, feeds, wrt = build(case("y = Celu <alpha = 0.5> (x)", x=(3, 4)), opset=18)
    assert "Elu" not in {n.op_type for n in ob.backward(model, wrt=wrt).graph.node}
    check_gradient(model, feeds, wrt, oracle=PIECES)


def test_optional_outputs_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a norm reads its mean, an output this model does not ask for."""
    without_rules(monkeypatch, "LayerNormalization")
    check_cases([body("y, , rate = LayerNormalization (x, s)  ", op="LayerNormalization", x=(2, 6), s=(6,))], "static")
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[2,6] x, float[6] s) => (float[2,6] y)
        { [norm] z, mean, rate = LayerNormalization <epsilon = 0.1> (x, s)  u = Mul(z, rate)  y = Add(u, mean) }"""
    )
    rng = np.random.default_rng(5)
    feeds = {"x": rng.standard_normal((2, 6)).astype(np.float32), "s": rng.standard_normal(6).astype(np.float32)}
    check_gradient(model, feeds, ["x", "s"], oracle=SMOOTH)


def test_one_value_as_two_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch, "PRelu")
    check_cases([body("y = PRelu(x, x)", x=(3, 4), oracle=PIECES)], "static")


def test_an_operator_in_the_body_without_a_rule_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch, "Mish", "Tanh")
    model, _, wrt = build(case("y = Mish(x)", x=(3,)), opset=18)
    with pytest.raises(ob.UnsupportedOpError, match=r"Tanh: 'mish_0/Tanh'"):
        ob.backward(model, wrt=wrt)


def test_a_body_that_onnx_cannot_write_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of MeanVarianceNormalization adds a float32 constant to x."""
    without_rules(monkeypatch, "MeanVarianceNormalization")
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (double[1,2,2,2] x) => (double[1,2,2,2] y)
        { [norm] y = MeanVarianceNormalization(x) }"""
    )
    with pytest.raises(ob.UnsupportedError, match="MeanVarianceNormalization 'norm': .*function body .*cannot be used"):
        ob.backward(model, wrt=["x"])


def test_every_operator_with_a_body_is_in_the_table() -> None:
    """Of the operators a gradient may flow through."""
    bodies = set()
    for name in {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}:
        try:
            schema = onnx.defs.get_schema(name, 26, "")
        except onnx.defs.SchemaError:
            continue
        if getattr(schema, "has_function") or getattr(schema, "has_context_dependent_function"):  # noqa: B009 - not in the stubs
            bodies.add(name)
    elsewhere = {  # tests of their own, or nothing to differentiate
        "AffineGrid", "Attention", "RotaryEmbedding", "CastLike", "NegativeLogLikelihoodLoss", "Range",
        "SoftmaxCrossEntropyLoss", "SequenceMap", "DynamicQuantizeLinear",
    }  # fmt: skip
    assert bodies - elsewhere - {name for _, name in registry.NO_GRADIENT} == {case.op for case in CASES}


NEWER = [  # operators of opsets that onnxruntime does not run yet, differences by onnx's reference evaluator
    (28, "float[2,3] a, float[2,3] b", "float[2,3] y", "y = SwiGLU(a, b)"),
    (28, "float[2,3] a, float[2,3] b", "float[2,3] y", "y = SwiGLU <alpha = 1.7> (a, b)"),
    (27, "float[2,3,5] x, float[3,1,4] w, float[3] b", "float[2,3,5] y, float[2,3,3] s",
     "y, s = CausalConvWithState(x, w, b)"),
    (27, "float[2,3,5] x, float[3,1,4] w, float[3] b, float[2,3,3] p", "float[2,3,5] y, float[2,3,3] s",
     'y, s = CausalConvWithState <activation = "silu"> (x, w, b, p)'),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "inputs", "outputs", "node"), NEWER)
def test_operators_that_onnxruntime_does_not_know(opset: int, inputs: str, outputs: str, node: str) -> None:
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    model = parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {{ {node} }}")
    rng = np.random.default_rng(4)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    forward = ReferenceEvaluator(model)
    training = ob.backward(model, wrt=list(feeds))
    dys = [rng.uniform(-1, 1, np.shape(y)).astype(np.float32) for y in forward.run(None, feeds)]
    fed = feeds | {f"{value.name}_grad": dy for value, dy in zip(model.graph.output, dys, strict=True)}
    got = [np.asarray(g) for g in ReferenceEvaluator(training).run([f"{name}_grad" for name in feeds], fed)]

    def total(name: str, value: np.ndarray) -> float:
        return sum(
            float((np.asarray(y) * dy).sum())
            for y, dy in zip(forward.run(None, feeds | {name: value}), dys, strict=True)
        )

    for name, gradient in zip(feeds, got, strict=True):
        v = rng.uniform(-1, 1, shapes[name]).astype(np.float32)
        want = (total(name, feeds[name] + v / 64) - total(name, feeds[name] - v / 64)) * 32
        assert abs(float((gradient * v).sum()) - want) < 1e-3, f"{name}, seed 4"


def test_a_body_with_a_loop() -> None:
    """onnxruntime has no LinearAttention yet: its body, written out in opset 23, stands for it."""
    text = (
        " g (float[1,4,6] q, float[1,4,6] k, float[1,4,6] v) => (float[1,4,6] y, float[1,2,3,3] s) "
        '{ y, s = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (q, k, v) }'
    )
    model = parser.parse_model('<ir_version: 10, opset_import: ["" : 27]>' + text)
    gradient = ob.backward(model, wrt=["q", "k", "v"])
    forward, backward = (
        inliner.inline_selected_functions(m, [("", "LinearAttention")], False, True) for m in (model, gradient)
    )
    for one in (forward, backward):
        next(o for o in one.opset_import if not o.domain).version = 23
    rng = np.random.default_rng(11)
    feeds = {name: rng.uniform(-1, 1, (1, 4, 6)).astype(np.float32) for name in ("q", "k", "v")}
    dy, ds = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((1, 4, 6), (1, 2, 3, 3)))
    names = [value.name for value in gradient.graph.output]
    answers = dict(zip(names, session_run(backward)(feeds | {"y_grad": dy, "s_grad": ds}), strict=True))
    for name in feeds:
        v = rng.uniform(-1, 1, (1, 4, 6)).astype(np.float32)
        above, below = (
            session_run(forward)(feeds | {name: feeds[name] + h * v}) for h in (np.float32(0.01), np.float32(-0.01))
        )
        want = sum(float((d * (a - b)).sum()) / 0.02 for d, a, b in zip((dy, ds), above, below, strict=True))
        assert abs(float((answers[f"{name}_grad"] * v).sum()) - want) < 2e-3, f"{name}, seed 11"


LOCAL = """<ir_version: 10, opset_import: ["" : 18, "local" : 1]> g (float[3] x) => (float[] y) {{ y = local.f(x) }}
<opset_import: ["" : 17], domain: "local"> f (p) => (o) {{ {body} }}"""
BRANCHES = """c = Constant <value = bool {{1}}> () o = If (c) <then_branch: graph = a () => (float v) {{ v = {0} }},
else_branch: graph = b () => (float w) {{ w = ReduceSum <keepdims = 0> (p) }}>"""


@pytest.mark.parametrize("body", ["o = Tanh(p)", "t = Tanh(p) o = ReduceSum <keepdims = 0> (t)"])
def test_a_function_of_the_model_in_another_opset(body: str) -> None:
    """The operators are the same in both, so the function is inlined as it stands."""
    model = parser.parse_model(LOCAL.format(body=body))
    x = np.float32([0.3, -0.5, 1])
    outputs = session_run(ob.backward(model, wrt=["x"]))({"x": x, "y_grad": np.ones(3, np.float32)})
    np.testing.assert_allclose(outputs[1], 1 - np.tanh(x) ** 2, rtol=1e-5)


def test_a_function_of_the_model_in_an_opset_of_other_operators() -> None:
    """onnx's checker looks at the nodes of a function, not into their sub-graphs."""
    model = parser.parse_model(LOCAL.format(body=BRANCHES.format("ReduceMean <keepdims = 0, axes = [0]> (p)")))
    with pytest.raises(
        ob.UnsupportedError, match="local::f .*opset 17 .*the model in 18, and ReduceMean is not the same"
    ):
        ob.backward(model, wrt=["x"])
