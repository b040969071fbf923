"""`explain_gradients` and the command `explain`: which rule serves each node, where a path stops, and why."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.command import main as command
from onnx_backprop.converters.reverse import registry


def model_of(text: str, *, opset: int = 22) -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def statuses(explanation: ob.GradientExplanation) -> dict[str, tuple[str, str]]:
    """(operator, status) by node."""
    return {node.node: (node.op, node.status) for node in explanation.nodes}


NET = """
    net (float[N, 1, 4, 4] x, int64[N] label) => (float[N, 2, 4, 4] y, int64[N, 4, 4] best, float[N, 2, 4, 4] z)
    <float[2, 1, 1, 1] weight = {0.5, -1.5}, float[2] bias = {0.25, 1.0}, float[7] unused = {0, 0, 0, 0, 0, 0, 0}>
    { [conv] c = Conv(x, weight, bias)  [relu] y = Relu(c)  [argmax] best = ArgMax<axis = 1, keepdims = 0>(y)
      [floor] f = Floor(c)  [exp] e = Exp(f)  [side] z = Neg(y) }
"""


def test_rules_stops_and_what_lies_aside() -> None:
    explanation = ob.explain_gradients(model_of(NET), of=["y"])
    assert statuses(explanation) == {
        "conv": ("Conv-22", "served"),
        "relu": ("Relu-14", "served"),
        "argmax": ("ArgMax-13", "stops"),
        "floor": ("Floor-13", "stops"),
        "side": ("Neg-13", "aside"),
    }
    nodes = {node.node: node for node in explanation.nodes}
    assert re.fullmatch(r"rules\.conv\.\w+", nodes["conv"].by)
    assert nodes["relu"].by == "rules.activation.relu"
    assert "integer" in nodes["argmax"].why
    assert "zero almost everywhere" in nodes["floor"].why
    variables = {v.name: (v.reached, v.why) for v in explanation.variables}
    assert {name for name, (reached, _) in variables.items() if reached} == {"x", "weight", "bias"}
    assert variables["unused"] == (False, "no output asked for depends on it")
    assert explanation.ok
    assert ob.explain_gradients(model_of(NET), wrt=["weight"], of=["y"]).ok


def test_the_rule_is_that_of_the_version() -> None:
    for node in ob.explain_gradients(model_of(NET), of=["y"]).nodes:
        if node.status == "served":
            name, _, version = node.op.rpartition("-")
            rule = registry.RULES["", name, int(version)].function
            assert node.by == f"rules.{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


def test_only_what_depends_on_wrt() -> None:
    model = model_of(
        "g (float[2] a, float[2] b) => (float[2] y) { [one] c = Exp(a)  [two] d = Sin(b)  [three] y = Mul(c, d) }"
    )
    model.graph.node[1].op_type = "Tanh"
    assert set(statuses(ob.explain_gradients(model, wrt=["a"]))) == {"one", "three"}
    assert set(statuses(ob.explain_gradients(model))) == {"one", "two", "three"}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("[cast] i = Cast<to = 7>(x)  n = Cast<to = 1>(i)  y = Mul(n, w)", "Cast 'cast' stops it .*INT64"),
        ("[shape] s = Shape(x)  n = Cast<to = 1>(s)  y = Mul(n, w)", "Shape 'shape' stops it .*shape of its input"),
        ("[greater] b = Greater(x, w)  n = Cast<to = 1>(b)  y = Mul(n, w)", "Greater 'greater' stops it .*boolean"),
        ("[sign] n = Sign(x)  y = Mul(n, w)", "Sign 'sign' stops it .*zero almost everywhere"),
        ("e = Exp(x)  [sign] n = Sign(e)  y = Mul(n, w)", "Sign 'sign' stops it"),
    ],
)
def test_why_a_variable_is_not_reached(nodes: str, why: str) -> None:
    model = model_of(f"g (float[1] x, float[1] w) => (float[1] y) {{ {nodes} }}")
    explanation = ob.explain_gradients(model)
    x, w = explanation.variables
    assert (x.name, x.reached, w.name, w.reached) == ("x", False, "w", True)
    assert re.search(why, x.why), x.why
    with pytest.raises(ob.InvalidArgumentError, match=why):
        ob.backward(model, wrt=["x"], strict=True)


def test_an_input_that_gets_no_gradient() -> None:
    model = model_of("g (float[1, 1, 4, 4] x, float[4] s) => (float[A, B, C, D] y) { [up] y = Resize(x, , s) }")
    variables = {v.name: v for v in ob.explain_gradients(model).variables}
    assert variables["x"].reached
    assert not variables["s"].reached
    assert "no gradient flows to that input" in variables["s"].why


def refusal(model: ModelProto, x: str, y: str) -> str:
    """What `backward` says against d y / d x; "" when it does not mind."""
    try:
        ob.backward(model, wrt=[x], of=[y])
    except ob.UnsupportedError as e:
        return str(e)
    return ""


def test_no_rule_and_refused() -> None:
    model = model_of("""
        g (float[1, 1, 4, 4] x, float[4] w) => (float[1, 1, 2, 2] y, float[4] z)
        { rois = Constant<value = float[1, 5] {0, 0, 0, 3, 2}>()
          [pool] y = MaxRoiPool<pooled_shape = [2, 2]>(x, rois)
          half = Constant<value = float {0.5}>()  train = Constant<value = bool {1}>()
          [drop] z = Dropout(w, half, train) }
    """)
    explanation = ob.explain_gradients(model)
    nodes = {node.node: node for node in explanation.nodes}
    for name, x, y, status in (("pool", "x", "y", "no rule"), ("drop", "w", "z", "refused")):
        message = refusal(model, x, y)
        assert nodes[name].status == (status if message else "served")
        assert nodes[name].why.split(" ")[0] in message
    assert nodes["pool"].op == "MaxRoiPool-22"
    assert explanation.ok == all(node.status == "served" for node in explanation.nodes)


def test_a_refused_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule refuses when it is tried is the reason; nothing of a try reaches the model."""
    key = ("", "Relu", 14)

    def relu(op: object, node: object, dy: object) -> object:
        raise node.refuse("slope", 3, "2")  # type: ignore[attr-defined]

    monkeypatch.setitem(registry.RULES, key, registry.Rule(relu))
    model = model_of(NET)
    before = model.SerializeToString()
    explanation = ob.explain_gradients(model, wrt=["weight"], of=["y"])
    (node,) = [node for node in explanation.nodes if node.node == "relu"]
    assert (node.status, node.why) == ("refused", "the gradient handles slope 2; got 3")
    assert not explanation.ok
    assert model.SerializeToString() == before
    monkeypatch.delitem(registry.RULES, key)
    (node,) = [n for n in ob.explain_gradients(model, wrt=["weight"], of=["y"]).nodes if n.node == "relu"]
    assert node.status in ("no rule", "served")  # served through the body that onnx defines
    if node.status == "served":
        assert node.by.startswith("its function body: ")


def test_branches_and_bodies() -> None:
    model = model_of("""
        g (float[3] x, bool c) => (float[3] y)
        { [choice] y = If(c) <then_branch = a () => (float[3] p) { p = Exp(x) },
                              else_branch = b () => (float[3] q) { q = Relu(x) }> }
    """)
    (node,) = ob.explain_gradients(model).nodes
    assert (node.op, node.status) == ("If-21", "served")
    assert node.by.startswith("its branches: ")
    assert "rules.activation.relu" in node.by


def test_integer_variables_and_outputs() -> None:
    explanation = ob.explain_gradients(model_of(NET), wrt=["label", "x"])
    label, x = explanation.variables
    assert (label.reached, x.reached) == (False, True)
    assert "INT64" in label.why
    with pytest.raises(ob.InvalidArgumentError, match="of: 'best' has type INT64"):
        ob.explain_gradients(model_of(NET), of=["best"])
    with pytest.raises(ob.InvalidArgumentError, match="wrt: .*got 'wieght'. Did you mean 'weight'"):
        ob.explain_gradients(model_of(NET), wrt=["wieght"])


def test_it_agrees_with_backward_on_what_is_reached() -> None:
    model = model_of(NET)
    explanation = ob.explain_gradients(model, of=["y", "z"])
    reached = [v.name for v in explanation.variables if v.reached]
    graph = ob.backward(model, wrt=reached, of=["y", "z"])
    assert [o.name for o in graph.graph.output][3:] == [f"{name}_grad" for name in reached]
    assert statuses(explanation)["side"] == ("Neg-13", "served")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_backprop.command.main.fitting", nullcontext)  # a row a line
    path = str(tmp_path / "net.onnx")
    onnx.save(model_of(NET), path)
    assert command.main(["explain", path, "--wrt", "weight", "--of", "y"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["variable  gradient", "weight    yes"]
    assert any(re.match(r"Conv-22 +conv +served +rules\.conv\.\w+$", line) for line in lines), lines
    assert any(re.match(r"Floor-13 +floor +stops +.*zero almost everywhere", line) for line in lines), lines
    assert re.match(r"converts, 1 of 1 variables reached; nodes: \d+ served", lines[-1])
    assert command.main(["explain", path]) == 0
    capsys.readouterr()
    with pytest.warns(ob.OnnxBackpropWarning):  # which the command prints
        ob.backward(model_of(NET), wrt=["unused"])
    assert command.main(["explain", path, "--of", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("onnx-backprop: error: --of: ")
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


AGREEING = {  # nodes, wrt: whether backward does it, explain says the same
    "group 3": ("y = Conv<group=3>(image, kernel)", ["image"]),
    "an exponent": ("y = Pow(x, e)", None),
    "an exponent by name": ("y = Pow(x, e)", ["e"]),
    "an unused tensor": ("y = Mul(x, w)", None),
    "an unused tensor by name": ("y = Mul(x, w)", ["e"]),
    "the scales of a Resize": ('y = Resize(x, "", w)', ["w"]),
    "rounding": ("q, s, z = DynamicQuantizeLinear(x) i = Cast<to=1>(q) d = Mul(i, s) y = Mul(d, w)", ["x"]),
    "rounding behind all weights": ("q, s, z = DynamicQuantizeLinear(x) i = Cast<to=1>(q) y = Mul(i, w)", None),
    "a loop before all weights": (
        "a = Loop(n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t)"
        " { d = Identity(c) t = Mul(s, s) }> y = Mul(a, w)",
        None,
    ),
    "a loop": (
        "a = Loop(n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t)"
        " { d = Identity(c) t = Mul(s, s) }> y = Mul(a, w)",
        ["x"],
    ),
}


@pytest.mark.parametrize("case", AGREEING)
def test_it_agrees_with_the_conversion(case: str) -> None:
    nodes, wrt = AGREEING[case]
    model = model_of(
        "g (float[2] x, float[1,2,4,4] image, int64 n, bool go) => (float[A] y) "
        f"<float e = {{2.0}}, float[2] w = {{0.25, 0.5}}> {{ {nodes} }}"
    )
    kernel = np.ones((3, 2, 3, 3), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(kernel, "kernel"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
            ob.backward(model, wrt=wrt)
        converts = True
    except ob.OnnxBackpropError:
        converts = False
    assert ob.explain_gradients(model, wrt=wrt).ok == converts


def test_what_is_no_parameter_is_told() -> None:
    model = model_of(
        "g (float[2] x) => (float[2] y) <float e = {2.0}, float[2] w = {0.25, 0.5}> { a = Mul(x, w) y = Pow(a, e) }"
    )
    variables = {v.name: (v.reached, v.why) for v in ob.explain_gradients(model).variables}
    assert variables["e"] == (False, "exponent of Pow, which wrt can name")
    assert variables["w"] == (True, "")
