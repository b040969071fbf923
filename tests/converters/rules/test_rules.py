"""Every gradient rule of a standard operator against differences of the forward, static and symbolic."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support import rule_checks as check
from tests.support.adjoint import adjoint_mismatches


@dataclass(frozen=True)
class Case:
    """A model text; inputs named a, b, … are random floats of the declared shapes unless `values` gives them."""

    id: str
    text: str
    wrt: str = "a"
    values: dict[str, object] = field(default_factory=dict)
    symbolic: bool = True  # False where a symbol would leave the rank or the meaning open
    opset: int = 18
    positive: bool = False
    f32: bool = False  # the reference evaluator computes this operator in float32 whatever it is fed

    def __str__(self) -> str:
        return self.id


def unary(expression: str, **settings) -> Case:
    return Case(expression, f"g (float[3,4] a) => (float[3,4] y) {{ y = {expression} }}", **settings)


def binary(op: str, left: str, right: str, out: str, **settings) -> Case:
    shape = f"float[{out}]" if out else "float"
    text = f"g (float[{left}] a, float[{right}] b) => ({shape} y) {{ y = {op}(a, b) }}"
    return Case(f"{op} {left} {right}", text, wrt="a b", **settings)


PAIRS = [("2,3,4", "2,3,4", "2,3,4"), ("2,3,4", "4", "2,3,4"), ("3,1", "2,1,4", "2,3,4"), ("1,1", "2,3", "2,3")]
CASES = [
    *(binary(op, *shapes) for op in ("Add", "Sub", "Mul", "Sum") for shapes in PAIRS),
    *(binary("Div", *shapes, positive=True) for shapes in PAIRS),
    *(binary("Pow", *shapes, positive=True) for shapes in PAIRS),
    Case("Pow square", "g (float[3,4] a) => (float[3,4] y) <float b = {2}> { y = Pow(a, b) }"),
    Case("Pow int exponent", "g (float[3,4] a) => (float[3,4] y) <int64 b = {3}> { y = Pow(a, b) }"),
    Case("Sum of three", "g (float[2,3] a, float[3] b, float[2,1] c) => (float[2,3] y) { y = Sum(a, b, c) }", "a b c"),
    binary("PRelu", "2,3,4", "3,1", "2,3,4"),
    binary("PRelu", "2,3", "1", "2,3"),
    *(unary(f"{op}(a)") for op in ("Neg", "Abs", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Identity", "Exp")),
    *(unary(f"{op}(a)", positive=True) for op in ("Sqrt", "Log", "Reciprocal")),
    *(unary(f"{op}(a)") for op in ("Softplus", "Elu", "Softmax", "LogSoftmax")),
    unary("Erf(a)", f32=True),
    unary("LeakyRelu <alpha=0.3>(a)"),
    unary("Elu <alpha=0.7>(a)"),
    unary("Softmax <axis=0>(a)"),
    unary("LogSoftmax <axis=0>(a)"),
    Case("Clip both", "g (float[3,4] a, float b, float c) => (float[3,4] y) { y = Clip(a, b, c) }", "a b c",
         {"b": np.float32(-0.4), "c": np.float32(0.6)}),
    Case("Clip crossed", "g (float[3,4] a, float b, float c) => (float[3,4] y) { y = Clip(a, b, c) }", "b c",
         {"b": np.float32(0.6), "c": np.float32(-0.4)}),
    Case("Clip below", "g (float[3,4] a, float b) => (float[3,4] y) { y = Clip(a, b) }", "a b", {"b": np.float32(0)}),
    Case("Clip above", "g (float[3,4] a, float c) => (float[3,4] y) { y = Clip(a, , c) }", "a c", {"c": np.float32(0)}),
    Case("Where", "g (bool[3,1] k, float[3,4] a, float[4] b) => (float[3,4] y) { y = Where(k, a, b) }", "a b",
         {"k": np.array([[True], [False], [True]])}),
    # reductions
    *(Case(f"{op} {axes} keepdims={k}",
           f"g (float[2,3,4] a) => (float[{shape}] y) <int64[{len(axes)}] x = {{{','.join(map(str, axes))}}}> "
           f"{{ y = {op}<keepdims={k}>(a, x) }}")
      for op in ("ReduceSum", "ReduceMean")
      for axes, k, shape in (([1], 1, "2,1,4"), ([1], 0, "2,4"), ([0, -1], 0, "3"), ([-2], 1, "2,1,4"))),
    *(Case(f"{op} all {k}", f"g (float[2,3,4] a) => ({shape} y) {{ y = {op}<keepdims={k}>(a) }}")
      for op in ("ReduceSum", "ReduceMean") for k, shape in ((1, "float[1,1,1]"), (0, "float"))),
    Case("ReduceSum noop", "g (float[2,3] a) => (float[2,3] y) { y = ReduceSum<noop_with_empty_axes=1,keepdims=0>(a) }"),
    Case("ReduceSum axes of the run", "g (float[2,3,4] a, int64[1] x) => (float[2,1,4] y) { y = ReduceSum(a, x) }",
         values={"x": np.array([1])}, symbolic=False),
    # matrices
    *(binary("MatMul", *shapes) for shapes in (
        ("3,4", "4,2", "3,2"), ("5,3,4", "5,4,2", "5,3,2"), ("5,3,4", "4,2", "5,3,2"), ("3,4", "5,4,2", "5,3,2"),
        ("2,1,3,4", "5,4,2", "2,5,3,2"), ("4", "4,2", "2"), ("3,4", "4", "3"), ("4", "4", ""),
        ("4", "5,4,2", "5,2"), ("5,3,4", "4", "5,3"), ("1,3,4", "5,4,2", "5,3,2"))),
    *(Case(f"Gemm {ta}{tb} {c}",
           f"g (float[{'4,3' if ta else '3,4'}] a, float[{'2,4' if tb else '4,2'}] b, float[{c}] c) => (float[3,2] y) "
           f"{{ y = Gemm<transA={ta},transB={tb},alpha=0.5,beta=1.5>(a, b, c) }}", "a b c")
      for ta in (0, 1) for tb in (0, 1) for c in ("3,2", "2", "3,1", "1")),
    Case("Gemm without C", "g (float[3,4] a, float[4,2] b) => (float[3,2] y) { y = Gemm(a, b) }", "a b"),
    # shapes
    Case("Reshape", "g (float[2,3,4] a) => (float[4,6] y) <int64[2] s = {4,-1}> { y = Reshape(a, s) }"),
    Case("Reshape zero", "g (float[2,3,4] a) => (float[2,12] y) <int64[2] s = {0,-1}> { y = Reshape(a, s) }"),
    Case("Flatten", "g (float[2,3,4] a) => (float[2,12] y) { y = Flatten(a) }"),
    Case("Squeeze", "g (float[2,1,4] a) => (float[2,4] y) <int64[1] x = {1}> { y = Squeeze(a, x) }", symbolic=False),
    Case("Unsqueeze", "g (float[2,4] a) => (float[2,1,4] y) <int64[1] x = {1}> { y = Unsqueeze(a, x) }"),
    Case("Transpose", "g (float[2,3,4] a) => (float[4,2,3] y) { y = Transpose<perm=[2,0,1]>(a) }"),
    Case("Transpose reversed", "g (float[2,3,4] a) => (float[4,3,2] y) { y = Transpose(a) }"),
    Case("Expand", "g (float[3,1] a) => (float[2,3,4] y) <int64[3] s = {2,1,4}> { y = Expand(a, s) }"),
    Case("Concat", "g (float[2,1] a, float[2,3] b, float[2,2] c) => (float[2,6] y) { y = Concat<axis=-1>(a,b,c) }", "a c"),
    Case("Concat first axis", "g (float[2,3] a, float[1,3] b) => (float[3,3] y) { y = Concat<axis=0>(a,b) }", "a b"),
    Case("Concat with itself", "g (float[2,3] a) => (float[4,3] y) { y = Concat<axis=0>(a,a) }"),
    Case("Split", "g (float[6,2] a) => (float[2,2] y, float[3,2] z) <int64[3] s = {2,1,3}> { y, u, z = Split<axis=0>(a, s) }"),
    Case("Split even", "g (float[2,4] a) => (float[2,2] z) { y, z = Split<axis=1,num_outputs=2>(a) }"),
    Case("Slice", "g (float[5,6] a) => (float[3,2] y) <int64[2] s = {-1,1}, int64[2] e = {-6,4}, int64[2] x = {0,1}, "
         "int64[2] t = {-2,2}> { y = Slice(a, s, e, x, t) }"),
    Case("Slice default", "g (float[5] a) => (float[2] y) <int64[1] s = {1}, int64[1] e = {3}> { y = Slice(a, s, e) }"),
    Case("Gather", "g (float[3,4] a, int64[2,2] i) => (float[3,2,2] y) { y = Gather<axis=1>(a, i) }",
         values={"i": np.array([[0, -1], [0, 2]])}),
    Case("Pad", "g (float[3,4] a, float b) => (float[6,5] y) <int64[4] p = {1,0,2,1}> { y = Pad(a, p, b) }", "a b"),
    Case("Pad axes", "g (float[3,4] a) => (float[3,7] y) <int64[2] p = {1,2}, int64[1] x = {1}> { y = Pad(a, p, , x) }"),
    *(Case(f"Pad {mode}", f"g (float[3,4] a) => (float[6,7] y) <int64[4] p = {{1,1,2,2}}> {{ y = Pad<mode=\"{mode}\">(a, p) }}")
      for mode in ("reflect", "edge")),
    Case("Pad wrap", "g (float[3,4] a) => (float[6,7] y) <int64[4] p = {1,1,2,2}> { y = Pad<mode=\"wrap\">(a, p) }", opset=19),
    Case("Tile", "g (float[2,3] a) => (float[4,9] y) <int64[2] r = {2,3}> { y = Tile(a, r) }"),
    Case("SpaceToDepth", "g (float[1,2,4,6] a) => (float[1,8,2,3] y) { y = SpaceToDepth<blocksize=2>(a) }"),
    Case("DepthToSpace", "g (float[2,8,2,3] a) => (float[2,2,4,6] y) { y = DepthToSpace<blocksize=2>(a) }"),
    Case("DepthToSpace CRD", "g (float[2,8,2,3] a) => (float[2,2,4,6] y) { y = DepthToSpace<blocksize=2,mode=\"CRD\">(a) }"),
    # pooling
    Case("GlobalAveragePool", "g (float[2,3,4,5] a) => (float[2,3,1,1] y) { y = GlobalAveragePool(a) }"),
    Case("MaxPool 1-D", "g (float[2,3,9] a) => (float[2,3,?] y) { y = MaxPool<kernel_shape=[3],strides=[2]>(a) }"),
    Case("MaxPool 3-D", "g (float[2,2,4,5,3] a) => (float[2,2,?,?,?] y) { y = MaxPool<kernel_shape=[2,3,2]>(a) }"),
    Case("MaxPool with its indices", "g (float[1,2,4,4] a) => (float[1,2,2,2] y, int64[1,2,2,2] i) "
         "{ y, i = MaxPool<kernel_shape=[2,2],strides=[2,2]>(a) }"),
    Case("AveragePool 3-D", "g (float[2,2,4,5,3] a) => (float[2,2,?,?,?] y) "
         "{ y = AveragePool<kernel_shape=[2,3,2],pads=[1,0,0,0,1,1]>(a) }"),
    *(Case(f"MaxPool {attributes}", f"g (float[2,2,7,6] a) => (float[2,2,?,?] y) {{ y = MaxPool<{attributes}>(a) }}")
      for attributes in ("kernel_shape=[2,2],strides=[2,2]", "kernel_shape=[3,3],pads=[1,1,1,1]",
                         "kernel_shape=[3,2],strides=[2,1],ceil_mode=1", "kernel_shape=[3,2],storage_order=1", "kernel_shape=[2,2],dilations=[2,3]")),
    *(Case(f"AveragePool {attributes} opset {opset}", f"g (float[2,2,7,6] a) => (float[2,2,?,?] y) {{ y = AveragePool<{attributes}>(a) }}",
           opset=opset)
      for opset in (18, 22)
      for attributes in ("kernel_shape=[2,2],strides=[2,2]", "kernel_shape=[3,3],pads=[1,1,1,1]",
                         "kernel_shape=[3,2],strides=[2,1],pads=[0,1,2,0]",
                         "kernel_shape=[3,3],pads=[1,1,1,1],count_include_pad=1",
                         "kernel_shape=[3,2],strides=[2,2],auto_pad=\"SAME_UPPER\"")),
    Case("AveragePool 1-D", "g (float[2,3,9] a) => (float[2,3,?] y) { y = AveragePool<kernel_shape=[3],strides=[2]>(a) }"),
    Case("AveragePool dilated", "g (float[2,2,7,6] a) => (float[2,2,?,?] y) "
         "{ y = AveragePool<kernel_shape=[2,2],dilations=[2,1],pads=[1,0,0,1]>(a) }", opset=19),
    # normalisation
    Case("BatchNormalization", "g (float[2,3,4] a, float[3] b, float[3] c, float[3] d, float[3] e) => (float[2,3,4] y) "
         "{ y = BatchNormalization(a, b, c, d, e) }", "a b c d e", {"e": np.float32([0.5, 1.0, 2.0])}),
    Case("Dropout", "g (float[3,4] a) => (float[3,4] y) { y = Dropout(a) }"),
    Case("Cast", "g (float[3] a) => (float[3] y) { h = Cast<to=11>(a)  d = Mul(h, h)  y = Cast<to=1>(d) }", f32=True),
    # further families
    Case("Mean", "g (float[3,4] a, float[4] b, float[3,1] c) => (float[3,4] y) { y = Mean(a, b, c) }", "a b c"),
    *(Case(op, f"g (float[3,4] a, float[4] b) => (float[3,4] y) {{ y = {op}(a, b) }}", "a b") for op in ("Max", "Min")),
    Case("Mod", "g (float[3,4] a, float[4] b) => (float[3,4] y) { y = Mod<fmod=1>(a, b) }", "a b", positive=True),
    *(unary(f"{op}(a)") for op in ("HardSigmoid", "HardSwish")),
    *(Case(f"Gelu {form}", f"g (float[3,4] a) => (float[3,4] y) {{ y = Gelu<approximate=\"{form}\">(a) }}", opset=20, f32=True)
      for form in ("none", "tanh")),
    Case("GlobalMaxPool", "g (float[2,3,4,5] a) => (float[2,3,1,1] y) { y = GlobalMaxPool(a) }"),
    *(Case(f"{op} keepdims={k}", f"g (float[2,3,4] a) => (float[{shape}] y) <int64[1] x = {{1}}> {{ y = {op}<keepdims={k}>(a, x) }}")
      for op in ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceSumSquare")
      for k, shape in ((1, "2,1,4"), (0, "2,4"))),
    Case("CumSum", "g (float[3,4] a) => (float[3,4] y) <int64 x = {1}> { y = CumSum<exclusive=1,reverse=1>(a, x) }"),
    Case("GatherElements", "g (float[3,4] a, int64[2,4] i) => (float[2,4] y) { y = GatherElements<axis=0>(a, i) }",
         values={"i": np.array([[0, -1, 2, 2], [0, 1, 1, 2]])}),
    Case("Trilu", "g (float[3,4] a) => (float[3,4] y) <int64 k = {1}> { y = Trilu<upper=0>(a, k) }"),
    Case("OneHot", "g (int64[3] i, float[2] a) => (float[3,4] y) <int64 d = {4}> { y = OneHot(i, d, a) }",
         values={"i": np.array([0, 3, 1])}),
    Case("CastLike", "g (float[3] a, double[1] l) => (float[3] y) { h = CastLike(a, l)  d = Mul(h, h)  y = Cast<to=1>(d) }",
         values={"l": np.zeros(1)}, f32=True),
    # the driver
    Case("square by itself", "g (float[3,4] a) => (float[3,4] y) { y = Mul(a, a) }"),
    Case("used three times", "g (float[3] a) => (float[3] y) { p = Tanh(a)  q = Mul(p, a)  r = Add(q, p)  y = Sub(r, a) }"),
    Case("two outputs", "g (float[3] a) => (float[3] y, float[1] z) { y = Tanh(a)  z = ReduceSum(y) }"),
    Case("an unused branch", "g (float[3] a) => (float[3] y, int64[1] s) { s = Shape(a)  t = Exp(a)  y = Tanh(a) }"),
]  # fmt: skip


def feeds_of(case: Case, model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        given = case.values.get(value.name)
        x = rng.standard_normal(shape).astype(np.float32) if given is None else np.asarray(given)
        feeds[value.name] = np.abs(x) + np.float32(0.3) if case.positive and given is None else x
    return feeds


@pytest.mark.parametrize(
    ("case", "symbolic"),
    [(case, symbolic) for case in CASES for symbolic in (False, True) if case.symbolic or not symbolic],
    ids=lambda value: ("symbolic" if value else "static") if isinstance(value, bool) else str(value),
)
def test_rule(case: Case, symbolic: bool) -> None:
    model = check.model_of(case.text, opset=case.opset)
    feeds = feeds_of(case, model, seed=11)
    errors = check.gradient_errors(
        check.symbolic(model) if symbolic else model, feeds, case.wrt.split(), seed=5, f32=case.f32
    )
    assert not errors, errors


def test_negative_pads_cut() -> None:
    model = check.model_of("g (float[3,4] a, float b) => (float[4,3] y) <int64[4] p = {1,-1,0,0}> { y = Pad(a, p, b) }")
    feeds = {"a": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32), "b": np.float32(0.5)}
    assert not adjoint_mismatches(model, {k: np.asarray(v) for k, v in feeds.items()}, ["a", "b"])


def test_every_rule_serves_all_versions_of_its_operator() -> None:
    """A model of any opset from 18 to 26 finds the rules; versions nobody looked at would be refused."""
    for domain, op_type, _ in list(registry.RULES):
        if domain == "":
            missing = check.default_domain_versions(op_type) - set(registry.served_versions(op_type))
            assert not missing, f"{op_type}: no rule for version {missing}"


def test_every_rule_has_a_case() -> None:
    """A text model `Op (x)` or a node made as "Op", here or in the file of its family."""
    files = Path(__file__).parent.glob("test_*.py")
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    untested = {
        op
        for domain, op, _ in registry.RULES
        if domain != ob.DOMAIN and not re.search(rf"\b{op}(\"| ?[<({{])", sources)
    }
    assert not untested


def test_the_list_without_gradient_names_existing_operators() -> None:
    for domain, op_type in registry.NO_GRADIENT:
        assert onnx.defs.has(op_type, domain), op_type
        assert not registry.served_versions(op_type, domain)


def test_missing_rules_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in registry.RULES if key[1] in ("Exp", "Tanh")]:
        monkeypatch.delitem(registry.RULES, key)
    model = check.model_of(
        "g (float[3,3] a) => (float[3,3] y) { [first] b = Tanh(a)  [second] c = Exp(b)  [third] d = Tanh(b)  y = Mul(c, d) }"
    )
    with pytest.raises(
        ob.UnsupportedOpError, match="(?s)no gradient rule for 2 operator.*Exp: 'second'.*Tanh: 'first', 'third'"
    ):
        ob.backward(model, wrt=["a"])


def test_operators_off_the_path_need_no_rule() -> None:
    model = check.model_of("g (float[3] a, float[3] b) => (float[3] y) { c = Mish(b)  y = Mul(a, c) }")
    graph = ob.backward(model, wrt=["a"])
    assert [o.name for o in graph.graph.output] == ["y", "a_grad"]


def test_a_value_captured_by_a_subgraph_is_not_overlooked() -> None:
    """The body reads `a` from outside, so the Loop lies on the path although `a` is not among its inputs."""
    model = check.model_of("""g (int64 n, bool k, float[3] s, float[3] a) => (float[3] y) {
        [again] y = Loop (n, k, s) < body = b (int64 i, bool c, float[3] p) => (bool d, float[3] q)
                                   { d = Identity(c)  q = Mul(p, a) } > }""")
    session = ob.session(ob.backward(model, wrt=["a"]))
    s, a = np.float32([1, 2, 3]), np.float32([0.5, 1, 2])
    feeds = {"n": np.array(3), "k": np.array(True), "s": s, "a": a, "y_grad": np.ones(3, np.float32)}
    np.testing.assert_allclose(np.asarray(session.run(["a_grad"], feeds)[0]), 3 * s * a**2)


def test_the_gradient_of_pow_is_finite_where_the_true_one_is() -> None:
    model = check.model_of("g (float[4] a, float[4] b) => (float[4] y) { y = Pow(a, b) }")
    session = ob.session(ob.backward(model, wrt=["a", "b"]))
    feeds = {"a": [0, -2, 0, 3], "b": [2, 3, 0, 0], "y_grad": [1, 1, 1, 1]}
    _, da, db = (np.asarray(x) for x in session.run(None, {k: np.float32(v) for k, v in feeds.items()}))
    np.testing.assert_allclose(da, [0, 12, 0, 0])
    np.testing.assert_allclose(db, [0, np.nan, 0, np.log(3)], rtol=1e-6)  # a negative base has no slope in b


def test_second_rule_is_an_error() -> None:
    with pytest.raises(ob.RegistrationError, match="second gradient rule"):
        registry.gradient("Relu", versions=(14,))(lambda *_: ())
    with pytest.raises(ob.RegistrationError):
        registry.no_gradient("because", "Relu")
