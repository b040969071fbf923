"""`check_gradients` and the command `check`: right gradients pass, every kind of wrong one is found and pinned down."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop import __main__ as command
from onnx_backprop.converters import differences, registry
from onnx_backprop.converters.builder import Builder
from onnx_backprop.converters.forward import Forward

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
                return change(op, node, list(rule.function(op, node, dys)))

            monkeypatch.setitem(registry.RULES, key, registry.Rule(broken, rule.all_outputs))


def scaled(factor: float) -> Change:
    def change(op: Builder, node: Forward, grads: list[ir.Value | None]) -> list[ir.Value | None]:
        return [None if g is None else op.Mul(g, op.scalar(factor, node.input(0))) for g in grads]

    return change


# --- right gradients


def test_a_right_model() -> None:
    report = ob.check_gradients(model_of(SMALL))
    assert verdicts(report) == dict.fromkeys(("x", "weight", "bias", "gain"), "right")
    assert report.ok
    assert report.verdict == "right"
    assert report.nodes == ()
    assert report.repro is None
    assert report.forward == "float64, onnx's reference evaluator"
    for result in report.results:
        assert result.answer.error < 1e-5
        assert result.answer.expected == pytest.approx(result.answer.got, rel=1e-4)
        assert abs(result.answer.got) > 0.01
    text = str(report)
    assert text.startswith("gradients: right (compared with differences in float64")
    assert re.search(r"^weight +right +\d\.\de-\d\d +\S+ +\S+ +2 of 2$", text, re.M)


def test_every_node_on_request() -> None:
    report = ob.check_gradients(model_of(SMALL), nodes=True)
    assert {(n.op_type, n.node, n.verdict) for n in report.nodes} == {
        ("Conv", "conv", "right"),
        ("Relu", "relu", "right"),
        ("Mul", "scale", "right"),
    }
    assert re.search(r"^operator +node +worst input +verdict", str(report), re.M)


def test_wrt_and_of() -> None:
    model = model_of("""
        two (float[3] x, float[3] z) => (float[3] a, float[3] b) <float[3] w = {1.0, 2.0, 3.0}>
        { a = Mul(x, w)  p = Exp(z)  b = Mul(p, w) }
    """)
    assert set(verdicts(ob.check_gradients(model))) == {"x", "z", "w"}
    assert set(verdicts(ob.check_gradients(model, of=["a"]))) == {"x", "w"}
    assert set(verdicts(ob.check_gradients(model, wrt=["z"], of=["b"]))) == {"z"}
    with pytest.raises(ob.InvalidArgumentError, match="wrt: expected the name of"):
        ob.check_gradients(model, wrt=["v"])


def test_the_seed_makes_the_check() -> None:
    model = model_of(SMALL)
    assert ob.check_gradients(model, seed=3) == ob.check_gradients(model, seed=3)
    assert ob.check_gradients(model, seed=3) != ob.check_gradients(model, seed=4)


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_point_on_kinks_is_moved(scale: float) -> None:
    """Relu at 0, and MaxPool with equal numbers, have a gradient that no difference there shows."""
    model = model_of("""
        kinks (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y)
        { r = Relu(x)  y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) }
    """)
    x = scale * np.round(np.random.default_rng(0).standard_normal((1, 1, 4, 4)))
    report = ob.check_gradients(model, feeds={"x": x.astype(np.float32)}, nodes=True)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("y = Log(x)", 0.0, 1.0), ("s = Neg(x)  y = Sqrt(s)", 0, 0), ("o = Sub(x, one) y = Log(o)", 1.0, 2.0)],
)
def test_random_inputs_lie_where_the_model_is_defined(text: str, low: float, high: float) -> None:
    model = model_of(f"g (float[40] x) => (float[40] y) <float one = {{1.0}}> {{ {text} }}")
    if low == high:
        with pytest.raises(ob.InvalidArgumentError, match=r"random values.*infinite or NaN.*--feeds"):
            ob.check_gradients(model, wrt=["x"])
    else:
        assert ob.check_gradients(model, wrt=["x"]).ok


def test_symbolic_axes_are_as_short_as_the_model_runs_with() -> None:
    text = """
        net (float[N, 3, H, W] x, float[N, H] z) => (float[N, 2, H2, W2] y, float[N, H] q)
        { w = ConstantOfShape<value = float[1] {0.5}>(shape)
          y = Conv<strides = [2, 2]>(x, w)  q = Exp(z) }
    """
    model = model_of(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 7, 7]), "shape"))
    report = ob.check_gradients(model)
    assert verdicts(report) == {"x": "right", "z": "right"}


def test_equal_symbols_are_equal_lengths_also_with_feeds() -> None:
    model = model_of("g (float[A, 3] x, float[B, A] z) => (float[B, 3] y) { y = MatMul(z, x) }")
    assert ob.check_gradients(model).ok
    assert ob.check_gradients(model, feeds={"x": np.ones((5, 3), np.float32)}).ok


def test_integer_and_boolean_inputs_are_drawn() -> None:
    model = model_of("""
        g (float[N, 5] x, int64[K] i, bool[K, 5] c) => (float[K, 5] y)
        { p = Gather(x, i)  n = Neg(p)  y = Where(c, p, n) }
    """)
    assert verdicts(ob.check_gradients(model)) == {"x": "right"}


def test_float16() -> None:
    w = numpy_helper.from_array(np.linspace(-1, 1, 16).astype(np.float16).reshape(4, 4), "w")
    model = model_of("g (float16[3, 4] x) => (float16[3, 4] y) { a = MatMul(x, w)  y = Tanh(a) }")
    model.graph.initializer.append(w)
    report = ob.check_gradients(model)
    assert verdicts(report) == {"x": "right", "w": "right"}


def test_a_model_of_an_old_opset_and_ir_version() -> None:
    model = model_of("old (float[2, 3] x, float[3] w) => (float[2, 3] y) { s = Mul(x, w)  y = Softmax(s) }", opset=9)
    model.ir_version = 3
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w"))
    assert verdicts(ob.check_gradients(model)) == {"x": "right", "w": "right"}


def test_a_gradient_that_is_zero() -> None:
    report = ob.check_gradients(
        model_of("g (float[3, 4] x) => (float y) { s = Softmax(x)  y = ReduceSum<keepdims = 0>(s) }")
    )
    assert report.ok
    assert "hardly any influence" in str(report)


def test_large_models_are_compared_in_float32() -> None:
    model = wide_model()
    report = ob.check_gradients(model)
    assert report.forward == "float32, onnxruntime"
    assert report.ok, str(report)


def wide_model() -> ModelProto:
    model = model_of("""
        wide (float[2, 3, 96, 96] x) => (float[2, 4, 48, 48] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w)  r = Relu(c)  y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) }
    """)
    w = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


def test_many_variables_are_checked_in_groups() -> None:
    names = [f"w{n}" for n in range(20)]
    body = " ".join(f"v{n + 1} = {op}({'x' if n == 0 else f'v{n}'}, {name})" for n, (name, op) in
                    enumerate(zip(names, ["Mul", "Add"] * 10, strict=True)))  # fmt: skip
    values = ", ".join(f"float[1] {name} = {{1.5}}" for name in names)
    model = model_of(f"many (float[3] x) => (float[3] v20) <{values}> {{ {body} }}")
    report = ob.check_gradients(model)
    assert report.results[0].variables == "x … w2 (4)"
    assert len(report.results) == 6
    assert report.ok


# --- wrong gradients


@pytest.mark.parametrize("factor", [1.1, 0.99, -1.0, 0.0])
@pytest.mark.parametrize("op_type", ["Relu", "Mul", "Conv"])
def test_a_wrong_rule_is_found_and_pinned_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op_type: str, factor: float
) -> None:
    break_rule(monkeypatch, op_type, scaled(factor))
    report = ob.check_gradients(model_of(SMALL))
    assert not report.ok
    assert report.verdict == "wrong"
    assert [n.verdict for n in report.nodes] == ["wrong", "right", "right"], str(report)
    assert report.nodes[0].op_type == op_type
    assert report.nodes[0].worst.answer.directions[0] == 0
    assert report.repro is not None
    assert [node.op_type for node in report.repro.graph.node] == [op_type]
    report.save_repro(tmp_path / "repro.onnx")
    again = ob.check_gradients(tmp_path / "repro.onnx")
    assert again.verdict == "wrong"
    assert again.nodes[0].op_type == op_type


def test_a_wrong_rule_is_found_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Conv", scaled(1.1))
    report = ob.check_gradients(wide_model())
    assert (report.forward, report.verdict) == ("float32, onnxruntime", "wrong")
    assert (report.nodes[0].op_type, report.nodes[0].verdict) == ("Conv", "wrong")
    assert {node.verdict for node in report.nodes[1:]} == {"right"}


def test_a_gradient_of_one_input_only(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Mul", lambda op, _, grads: [grads[0], op.Neg(grads[1])])
    report = ob.check_gradients(model_of(SMALL))
    assert verdicts(report) == {"x": "right", "weight": "right", "bias": "right", "gain": "wrong"}
    assert report.nodes[0].worst.variables == "gain"


def test_a_wrong_gradient_beside_kinks(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(1.1))
    model = model_of("g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }")
    report = ob.check_gradients(model, feeds={"x": np.zeros((3, 4), np.float32)})
    assert report.verdict == "wrong"


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    break_rule(monkeypatch, "Relu", scaled(number))
    model = model_of("g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }")
    report = ob.check_gradients(model, feeds={"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)})
    assert report.verdict == "wrong"


def test_a_gradient_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Tanh", lambda op, _, grads: [op.Unsqueeze(grads[0], op.ints([0]))])
    report = ob.check_gradients(model_of("g (float[A, B] x) => (float[A, B] y) { y = Tanh(x) }"))
    assert report.verdict == "wrong"


def test_what_no_node_alone_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that two nodes read: each node is right, their sum is not."""
    monkeypatch.setattr(Builder, "accumulate", lambda _, values: values[0])
    model = model_of("""
        g (float[3] x) => (float[3] y)
        { a = Tanh(x)  b = Exp(a)  [left] l = Sin(b)  [right] r = Neg(b)  [join] j = Mul(l, r)  y = Sigmoid(j) }
    """)
    model.graph.node[2].op_type = "Softplus"
    report = ob.check_gradients(model)
    assert report.verdict == "wrong"
    assert {node.verdict for node in report.nodes} == {"right"}
    assert report.repro is not None
    assert {"left", "right"} <= {node.name for node in report.repro.graph.node}
    assert len(report.repro.graph.node) < 6
    assert ob.check_gradients(report.repro).verdict == "wrong"
    monkeypatch.undo()
    assert ob.check_gradients(report.repro).ok


def test_the_smallest_of_several_wrong_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(2.0))
    model = model_of("""
        g (float[2, 8] x) => (float y)
        { [big] a = Relu(x)  s = ReduceSum<keepdims = 0>(a)  t = Exp(s)  [small] y = Relu(t) }
    """)
    report = ob.check_gradients(model, feeds={"x": np.linspace(-0.2, 0.3, 16, dtype=np.float32).reshape(2, 8)})
    assert [n.node for n in report.nodes[:2]] == ["big", "small"] or [n.node for n in report.nodes[:2]] == [
        "small",
        "big",
    ]
    assert report.repro is not None
    assert [node.name for node in report.repro.graph.node] == ["small"]


# --- what cannot be told


def test_nodes_tell_where_the_whole_model_does_not() -> None:
    """float32 rounds x to even numbers beside 3e7: the model has no usable differences, each of its nodes has."""
    model = model_of("g (float[30] x) => (float[30] y) <float big = {3e7}> { a = Add(x, big)  y = Sub(a, big) }")
    report = ob.check_gradients(model, wrt=["x"])
    assert verdicts(report) == {"x": "undecided"}
    assert [node.verdict for node in report.nodes] == ["right", "right"]
    assert report.ok
    assert "Not all differences of the whole model settle" in str(report)


def in_float32(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, slope: np.ndarray) -> differences.Point:
    """The sum of a function of each element, whose gradient is claimed to be `slope`."""
    values = {"x": x.astype(np.float32)}
    y = function(values["x"])
    return differences.Point(
        lambda at: {"y": function(np.asarray(at["x"]))}, values, {"y": np.ones_like(y)}, {"x": slope.astype(np.float32)}
    )


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.5, "wrong")])
def test_a_variable_far_smaller_than_what_it_is_added_to(factor: float, verdict: str) -> None:
    """Steps of its own size would be lost in the rounding."""
    x = np.full(20, 1e-9) * np.where(np.arange(20) % 3, 1, -1)
    point = in_float32(lambda b: np.sin(b + np.float32(1)), x, factor * np.cos(np.full(20, 1.0)))
    answer = differences.judge(point, ["x"], differences.FLOAT32, np.random.default_rng(0))
    assert answer.verdict == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.5, "wrong")])
def test_positive_variables_of_very_different_sizes_stay_positive(factor: float, verdict: str) -> None:
    """As the variances of channels: a step of the size of the largest would turn the others negative."""
    x = np.float64([1e-4, 1e-2, 1, 3, 40])
    point = in_float32(lambda v: np.float32(1) / np.sqrt(v), x, -0.5 * factor * x**-1.5)
    answer = differences.judge(point, ["x"], differences.FLOAT32, np.random.default_rng(0))
    assert answer.verdict == verdict


def test_a_tolerance_finer_than_the_forward_decides_nothing() -> None:
    report = ob.check_gradients(wide_model(), tolerance=1e-10)
    assert report.verdict == "undecided"
    assert not report.ok
    assert report.repro is None
    with pytest.raises(ob.InvalidArgumentError, match="nothing is wrong"):
        report.save_repro("none.onnx")


def test_a_model_that_draws_random_numbers() -> None:
    model = model_of("g (float[30] x) => (float[30] y) { n = RandomNormalLike(x)  y = Add(x, n) }")
    with pytest.raises(ob.InvalidModelError, match="two runs .* different values of 'y'"):
        ob.check_gradients(model)


def test_a_model_without_a_gradient() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="no gradient to check"):
        ob.check_gradients(model_of("g (int64[3] x) => (float[3] y) { y = Cast<to = 1>(x) }"))


def test_missing_rules_are_named() -> None:
    with pytest.raises(ob.UnsupportedOpError, match="Det: 'y'|Loop"):
        ob.check_gradients(
            model_of(
                "g (float[3] x) => (float[3] y) {"
                "trips = Constant<value_int = 2>()  on = Constant<value = bool {1}>()"
                "y = Loop<body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w)"
                "{ d = Identity(c)  w = Tanh(v) }>(trips, on, x) }"
            )
        )


FEEDS = {
    "sets a shape": (
        "g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }",
        {},
        r"'s' sets a shape.* of Reshape 'y'.*feeds=\{'s': array\}",
    ),
    "sets a shape further on": (
        "g (float[A] x, int64 s) => (float[C] y) { z = Constant<value_ints = [0]>()  u = Unsqueeze(s, z)  y = Expand(x, u) }",
        {},
        r"'s' sets a shape.* of Expand 'y'",
    ),
    "text": ("g (float[3] x, string[1] s) => (float[3] y, string[1] t) { y = Exp(x) t = Identity(s) }", {}, "STRING"),
    "unknown": ("g (float[3] x) => (float[3] y) { y = Exp(x) }", {"z": np.ones(3)}, "got 'z'"),
    "type": ("g (float[3] x) => (float[3] y) { y = Exp(x) }", {"x": np.ones(3)}, "type float32.* float64"),
    "shape": ("g (float[N, 3] x) => (float[N, 3] y) { y = Exp(x) }", {"x": np.ones(3, np.float32)}, r"\['\?', 3\].*\[3\]"),
    "out of range": (
        "g (float[3] x, int64[2] i) => (float[2] y) { y = Gather(x, i) }",
        {"i": np.array([5, 9])},
        r"does not run on .*indices element out of data bounds.*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FEEDS)
def test_feeds_that_do_not_fit(case: str) -> None:
    text, feeds, message = FEEDS[case]
    with pytest.raises(ob.InvalidArgumentError, match=f"feeds: .*{message}"):
        ob.check_gradients(model_of(text), feeds=feeds)


def test_given_feeds_are_used() -> None:
    model = model_of("g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }")
    assert ob.check_gradients(model, feeds={"s": np.array([-1, 2]), "x": np.ones((4, 3), np.float32)}).ok


# --- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, holding small.onnx."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(SMALL), "small.onnx")
    return tmp_path


def test_command_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "small.onnx", "--save-repro", "repro.onnx"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("gradients: right")
    assert err == ""
    assert not Path("repro.onnx").exists()
    assert command.main(["check", "small.onnx", "--quiet", "--wrt", "gain", "--nodes"]) == 0
    assert capsys.readouterr().out == ""


def test_command_wrong(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(0.5))
    assert command.main(["check", "small.onnx", "--save-repro", "repro.onnx"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("gradients: wrong")
    assert re.search(r"^Relu +relu +c +wrong", out, re.M)
    assert out.endswith("written: repro.onnx\n")
    assert {path.name for path in folder.iterdir()} == {"small.onnx", "repro.onnx"}
    assert command.main(["check", "repro.onnx", "--quiet"]) == 1
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert command.main(["check", "repro.onnx", "--quiet"]) == 0


def test_command_feeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }"
    onnx.save(model_of(text), "shape.onnx")
    np.savez("values.npz", s=np.array([-1, 3]))
    assert command.main(["check", "shape.onnx", "--feeds", "values.npz", "--quiet"]) == 0
    assert command.main(["check", "shape.onnx"]) == 2
    assert "--feeds FILE.npz" in capsys.readouterr().err


BAD = {
    "no such file": ("check none.onnx", "no such file"),
    "unknown variable": ("check small.onnx --wrt gian", "Did you mean 'gain'"),
    "no such feeds": ("check small.onnx --feeds none.npz", "--feeds: none.npz cannot be read"),
    "feeds of another kind": ("check small.onnx --feeds small.onnx", "--feeds: small.onnx cannot be read"),
    "repro exists": ("check small.onnx --save-repro small.onnx", "small.onnx exists"),
    "repro nowhere": ("check small.onnx --save-repro none/r.onnx", "no folder"),
    "seed": ("check small.onnx --seed -1", "--seed"),
    "kernels": ("check small.onnx --kernels nump", "kernels"),
    "not for onnxruntime": ("check strange.onnx", "onnxruntime does not load the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    model = model_of("g (bfloat16[3] x) => (bfloat16[3] y) { y = Exp(x) }")
    onnx.save(model, "strange.onnx")
    arguments, message = BAD[case]
    assert command.main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("onnx-backprop: error: ")
    assert err.count("\n") == 1, err
    assert message in err


def test_repro_keeps_what_an_operator_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sub-graphs of an If read values from outside; they become inputs of the cut-out model."""
    break_rule(monkeypatch, "Exp", scaled(3.0))
    model = model_of("""
        g (float[3] x, bool c) => (float[3] y)
        { t = Tanh(x)
          [choice] y = If(c) <then_branch = a () => (float[3] p) { p = Exp(t) },
                              else_branch = b () => (float[3] q) { q = Exp(t) }> }
    """)
    report = ob.check_gradients(model)
    assert (report.nodes[0].op_type, report.nodes[0].verdict) == ("If", "wrong")
    assert report.repro is not None
    assert {value.name for value in report.repro.graph.input} == {"t", "c"}
    assert ob.check_gradients(report.repro).verdict == "wrong"
