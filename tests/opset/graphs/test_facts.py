"""Each entry of the table of facts, shown in onnxruntime, in onnx's inference, or by what is refused without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser, shape_inference

import onnx_backprop as ob
from onnx_backprop.converters.check.feeds import DRAWS as WAYS
from onnx_backprop.converters.check.feeds import draw_feeds
from onnx_backprop.converters.recompute.program import GraphProgram
from onnx_backprop.converters.recompute.sizes import Sizes
from onnx_backprop.opset.functions.long_vectors import infer_shapes
from onnx_backprop.opset.graphs import facts
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.ort_ops.rewrites.in_place import _shared

# A call of each operator on x, float [2, 4, 4, 4]; tensors that are named in capitals are constants.
CALLS = {
    **{op: f"{op}(x)" for op in ("Flatten", "Identity", "GlobalMaxPool", "GlobalAveragePool", "Relu", "Transpose")},
    **{op: f"{op}(x)" for op in (*facts.UNARY, "HardSigmoid", "Sigmoid", "Softmax", "Softplus", "Dropout", "Elu")},
    **{op: f"{op}(x)" for op in ("LeakyRelu", "HardSwish", "Trilu")},
    **{op: f"{op}(x, x2)" for op in ("Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sub", "Sum")},
    **{op: f"{op}<keepdims=1>(x)" for op in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")},
    **{op: f"{op}<kernel_shape=[2,2]>(x)" for op in ("MaxPool", "AveragePool")},
    "Cast": "Cast<to=11>(x)",
    "CastLike": "CastLike(x, DOUBLE)",
    "Clip": "Clip(x, LOW)",
    "Concat": "Concat<axis=1>(x, x2)",
    "DepthToSpace": "DepthToSpace<blocksize=2>(x)",
    "Expand": "Expand(x, FIVE)",
    "Gather": "Gather<axis=1>(x, ONES)",
    "GatherElements": "GatherElements<axis=1>(x, PLACES)",
    "GatherND": "GatherND(x, PAIR)",
    "Pad": "Pad(x, PADS)",
    "ReduceSumSquare": "ReduceSumSquare(x)",
    "Reshape": "Reshape(x, FLAT)",
    "Resize": "Resize<coordinate_transformation_mode=\"asymmetric\">(x, , SCALES)",
    "ScatterND": "ScatterND(x, PAIR, UPDATE)",
    "Slice": "Slice(x, ONES, TWOS)",
    "SpaceToDepth": "SpaceToDepth<blocksize=2>(x)",
    "Split": "Split<num_outputs=2, axis=1>(x)",
    "Squeeze": "Squeeze(x1)",
    "Tile": "Tile(x, FOUR)",
    "Unsqueeze": "Unsqueeze(x, ONES)",
    "Where": "Where(TRUE, x, x2)",
}  # fmt: skip
CONSTANTS = {
    "DOUBLE": np.zeros(1), "LOW": np.float32(0), "FIVE": np.array([3, 1, 4, 4, 4]), "ONES": np.array([1]),
    "PLACES": np.zeros((2, 4, 4, 4), np.int64), "PAIR": np.array([[0, 1]]), "PADS": np.array([0] * 4 + [1] * 4),
    "FLAT": np.array([4, -1]), "SCALES": np.float32([1, 1, 2, 2]), "UPDATE": np.ones((1, 4, 4), np.float32),
    "TWOS": np.array([2]), "ZERO": np.array([0]), "FOUR": np.array([1, 2, 1, 1]), "TRUE": np.ones((2, 4, 4, 4), bool) & (np.arange(4) > 1),
}  # fmt: skip


def model_of(body: str, inputs: str = "float[2,4,4,4] x", opset: int = 20) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => (y) {{ {body} }}'
    model = parser.parse_model(text)
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items() if k in read
    )
    return model


def run(op_type: str, x: np.ndarray, **more: np.ndarray) -> np.ndarray:
    """The first output of the operator's call."""
    call = CALLS[op_type]
    inputs = {"x": x, "x2": more.get("x2", x[::-1].copy()), "x1": x[:1]}
    used = {
        name: array
        for name, array in inputs.items()
        if name in call.replace(",", " ").replace(")", " ").replace("(", " ").split()
    }
    declared = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in used.items())
    outputs = "y, z" if op_type == "Split" else "y"
    session = onnxruntime.InferenceSession(model_of(f"{outputs} = {call}", declared).SerializeToString())
    return np.asarray(session.run(["y"], used)[0])


def drawn(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 4, 4, 4)).astype(np.float32)


@pytest.mark.parametrize("op_type", facts.VIEW)
def test_a_view_has_the_elements_in_their_order(op_type: str) -> None:
    x = drawn()
    np.testing.assert_array_equal(run(op_type, x).ravel(), (x[:1] if op_type == "Squeeze" else x).ravel())


@pytest.mark.parametrize("op_type", facts.MOVES_QUANTIZED)
def test_numbers_are_moved(op_type: str) -> None:
    x = drawn()
    assert np.isin(run(op_type, x), [*x.ravel(), *[0] * (op_type == "Pad")]).all()


@pytest.mark.parametrize("op_type", facts.KEEPS_ROUNDED)
def test_rounded_numbers_stay_rounded(op_type: str) -> None:
    y = run(op_type, drawn().astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(y, y.astype(np.float16))


@pytest.mark.parametrize("op_type", facts.NOT_NEGATIVE)
def test_nothing_below_0(op_type: str) -> None:
    assert not (run(op_type, drawn()) < 0).any()


@pytest.mark.parametrize("op_type", facts.KEEPS_SIGN)
def test_nothing_below_0_of_positive_numbers(op_type: str) -> None:
    assert (run(op_type, np.abs(drawn())) >= 0).all()


@pytest.mark.parametrize("op_type", facts.ELEMENTWISE)
def test_elementwise_operators_read_one_element_for_each_result(op_type: str) -> None:
    x, x2 = np.abs(drawn()) / 8 + 0.01, drawn(1) / 8 + 1
    before, other = run(op_type, x, x2=x2), x.copy()
    other[1, 2, 3, 3] += 0.25
    changed = run(op_type, other, x2=x2) != before
    changed[1, 2, 3, 3] = False
    assert not changed.any()
    assert (op_type in facts.UNARY) == ("x2" not in CALLS[op_type])


@pytest.mark.parametrize("op_type", facts.HANDS_ON)
def test_a_tensor_is_handed_on(op_type: str) -> None:
    x = drawn()
    assert np.isin(run(op_type, x), [*x.ravel(), 0, 1]).all()  # 0 of Trilu, 1 that ScatterND puts in


@pytest.mark.parametrize("op_type", facts.DRAWS)
def test_two_runs_draw_other_numbers(op_type: str) -> None:
    call = f"{op_type}<shape=[32]>()" if op_type in ("RandomNormal", "RandomUniform") else f"{op_type}(x)"
    if op_type == "Multinomial":
        call = "Multinomial<sample_size=64>(x)"
    session = onnxruntime.InferenceSession(model_of(f"z = Identity(x) y = {call}", "float[1,64] x").SerializeToString())
    first, second = (session.run(["y"], {"x": np.full((1, 64), 0.5, np.float32)})[0] for _ in range(2))
    assert not np.array_equal(first, second)


FOLLOWED = {
    "Add": "Add(v, ONES)", "Cast": "Cast<to=7>(v)", "Concat": "Concat<axis=0>(v, ONES)", "Gather": "Gather(v, ONES)",
    "Mul": "Mul(v, TWOS)", "Shape": "Shape(x)", "Size": "Size(l)",
    "Slice": "Slice(v, ONES, TWOS)", "Squeeze": "Squeeze(w)", "Sub": "Sub(v, ONES)", "Unsqueeze": "Unsqueeze(s, ZERO)",
}  # fmt: skip


def shape_by(op_type: str) -> onnx.ModelProto:
    """A model in which a shape is computed by an operator."""
    more = "f = Unsqueeze(e, ZERO)" if op_type in ("Size", "Squeeze") else "f = Cast<to=7>(e)"
    constants = (
        "v = Constant<value_ints=[2,2]>() w = Constant<value_ints=[8]>() s = Constant<value_int=8>() l = Shape(x)"
    )
    return model_of(f"{constants} e = {FOLLOWED[op_type]} {more} y = ConstantOfShape(f)")


@pytest.mark.parametrize("op_type", FOLLOWED)
def test_inference_follows_numbers(op_type: str) -> None:
    model = shape_by(op_type)
    known = []
    for data_prop in (False, True):
        inferred = shape_inference.infer_shapes(model, data_prop=data_prop).graph.output[0].type.tensor_type.shape.dim
        known.append(bool(inferred) and all(dim.HasField("dim_value") for dim in inferred))
    assert known == [False, True]


def test_inference_follows_no_other_numbers() -> None:
    schemas = [schema for schema in onnx.defs.get_all_schemas() if not schema.domain]
    assert {s.name for s in schemas if s.has_data_propagation_function} == FOLLOWED.keys()


@pytest.mark.parametrize("op_type", sorted({*FOLLOWED} - {"Shape", "Size", "Squeeze", "Unsqueeze"}))
def test_numbers_of_long_vectors_are_not_followed(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[onnx.ModelProto] = []
    infer = shape_inference.infer_shapes
    monkeypatch.setattr(shape_inference, "infer_shapes", lambda m, **k: seen.append(m) or infer(m, **k))
    body = f"y = {FOLLOWED[op_type]}"
    infer_shapes(model_of(body, "int64[4096] v"))
    assert [(node.domain, node.op_type) for node in seen[-1].graph.node] != [("", op_type)]


@pytest.mark.parametrize("op_type", facts.CARRIES_SHAPE)
def test_inputs_that_mean_a_shape_are_not_drawn(op_type: str) -> None:
    calls = FOLLOWED | {
        "Identity": "Identity(v)",
        "Reshape": "Reshape(v, FLAT)",
        "Squeeze": "Squeeze(v)",
        "Unsqueeze": "Unsqueeze(v, ONES)",
    }
    model = model_of(f"w = {calls[op_type]} y = Expand(x, w)", "float[2,4,4,4] x, int64[2] v")
    with pytest.raises(ob.OnnxBackpropError, match="'v'"):
        draw_feeds(model, {}, WAYS[0], np.random.default_rng(0))


COMPARED = {
    "GlobalMaxPool": "GlobalMaxPool(a)", "Max": "Max(a, b)", "Min": "Min(a, b)",
    "ReduceMax": "ReduceMax(a)", "ReduceMin": "ReduceMin(a)",
}  # fmt: skip


@pytest.mark.parametrize("op_type", facts.COMPARED)
def test_what_is_compared_is_computed_again_in_float32(op_type: str) -> None:
    model = model_of(f"a = Exp(x) b = Neg(x) y = {COMPARED[op_type]}", "float16[2,4,4] x")
    assert sum(node.op_type == op_type for node in ob.backward(model, wrt=["x"]).graph.node) == 2


def optimised(model: onnx.ModelProto, path: Path) -> list[str]:
    """The operators of a model as onnxruntime runs it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path / "optimised.onnx"), 3
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return [node.op_type for node in onnx.load(path / "optimised.onnx").graph.node]


FUSED = {
    "Cast": "t = Cast<to=1>(d) r = Transpose<perm=[1,0]>(t) p = MatMul(r, W)",
    "Div": "t = Div(x, HALF) p = MatMul(t, W)",
    "Mul": "t = Mul(x, HALF) p = MatMul(t, W)",
    "Transpose": "t = Transpose<perm=[1,0]>(x) p = MatMul(t, W)",
}


@pytest.mark.parametrize("op_type", facts.FUSED_INTO_PRODUCTS)
def test_fused_into_a_product_though_others_read_it(op_type: str, tmp_path: Path) -> None:
    CONSTANTS.update(W=np.ones((4, 4), np.float32), HALF=np.float32(0.5))
    model = model_of(f"{FUSED[op_type]} q = Softmax(t) y = Concat<axis=0>(p, q)", "float[4,4] x, double[4,4] d")
    assert "FusedMatMul" in optimised(model, tmp_path)


UNFUSED = {"ConvTranspose": "ConvTranspose(h, KERNEL)", "Resize": "Resize(h, , SCALES)"}


@pytest.mark.parametrize("op_type", facts.UNFUSED)
def test_fused_with_no_neighbour(op_type: str, tmp_path: Path) -> None:
    CONSTANTS.update(KERNEL=np.ones((4, 4, 1, 1), np.float32))
    call = (CALLS | UNFUSED)[op_type].replace("(x,", "(h,").replace("(x)", "(h)").replace("x2", "h")
    outputs = "k, z" if op_type == "Split" else "k"
    model = model_of(f"h = Erf(x) {outputs} = {call} y = Relu(k)")
    names = optimised(model, tmp_path)
    assert {op_type, "Erf", "Relu"} <= {*names}, names


# what a sum, an exponential or a root over each element adds to reading and writing it, and second looks at a tensor
SLOW = {"BatchNormalization": 2, "Erf": 2, "Exp": 2, "Gelu": 2, "GroupNormalization": 3, "InstanceNormalization": 3}
SLOW |= {"LayerNormalization": 2, "Log": 2, "LogSoftmax": 3, "Pow": 2, "Resize": 2, "Sigmoid": 2, "Softmax": 3}
SLOW |= {"Softplus": 2, "Tanh": 2, **dict.fromkeys(facts.CHEAP, 1)}


@pytest.mark.parametrize(("op_type", "passes"), SLOW.items())
def test_the_time_of_an_operator(op_type: str, passes: int) -> None:
    x = ir.Value(name="x")
    nodes = [ir.node(name, [x]) for name in (op_type, "Gather")]
    nbytes = {value: 64 for node in nodes for value in (x, *node.outputs)}
    slow, fast = (Sizes({}, nbytes).cost(node) for node in nodes)
    assert slow == passes * fast > 0


@pytest.mark.parametrize(
    ("op_type", "writes_over"), [*((o, True) for o in facts.IN_PLACE), ("Erf", False), ("MatMul", False)]
)
def test_memory_that_is_written_over_is_free_one_node_earlier(op_type: str, writes_over: bool) -> None:
    x = ir.Value(name="x")
    first = ir.node("Erf", [x])
    second = ir.node(op_type, first.outputs)
    nodes = [first, second, ir.node("Softmax", second.outputs)]
    graph = ir.Graph([x], nodes[-1].outputs, nodes=nodes)
    sizes = Sizes({}, {value: 64 for node in nodes for value in node.outputs})
    program = GraphProgram(graph, nodes, set(nodes), set(), sizes, set())
    assert program.end(program.buffer_of[first.outputs[0]], 1) == (0 if writes_over else 1)


@pytest.mark.parametrize("op_type", facts.MAY_SHARE)
def test_a_parameter_in_whose_memory_a_gradient_may_lie_is_not_overwritten(op_type: str) -> None:
    graph = model_of(f"h = Erf(x) g = {op_type}(p, h)", "float[4] x, float[4] p").graph
    assert _shared(graph, ["g"]) == {"p"}


TAKEN_AWAY = {
    "Add": "Add(h, NONE)", "Cast": "Cast<to=1>(h)", "Div": "Div(h, UNIT)", "Dropout": "Dropout(h)", "Mul": "Mul(h, UNIT)",
    "Expand": "Expand(h, SAME)", "Identity": "Identity(h)", "Sub": "Sub(h, NONE)",
}  # fmt: skip


@pytest.mark.parametrize("op_type", TAKEN_AWAY)
def test_taken_away_where_nothing_changes(op_type: str, tmp_path: Path) -> None:
    CONSTANTS.update(NONE=np.float32(0), UNIT=np.float32(1), SAME=np.array([2, 4, 4, 4]))
    assert op_type in facts.MAY_SHARE
    assert optimised(model_of(f"h = Erf(x) k = {TAKEN_AWAY[op_type]} y = Softmax(k)"), tmp_path) == ["Erf", "Softmax"]


def test_columns_are_complete() -> None:
    schemas = [schema for schema in onnx.defs.get_all_schemas() if not schema.domain]
    assert {s.name for s in schemas if "seed" in s.attributes} - {"Dropout"} == {*facts.DRAWS}
    assert {*facts.COMPARED} == COMPARED.keys()
    assert {*facts.FUSED_INTO_PRODUCTS} == FUSED.keys()
    assert {*facts.CARRIES_SHAPE} == {
        "Cast",
        "Concat",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Squeeze",
        "Unsqueeze",
    }
    assert facts.PASSES.keys() == SLOW.keys() - {*facts.CHEAP}


@pytest.mark.parametrize("op_type", facts.FREE)
def test_what_takes_no_time(op_type: str) -> None:
    node = ir.node(op_type, [ir.Value(name="x")])
    assert Sizes({}, dict.fromkeys((*node.inputs, *node.outputs), 64)).cost(node) == 0


def test_another_domain_is_another_operator() -> None:
    node = onnx.helper.make_node("Reshape", ["x", "s"], ["y"])
    assert node in facts.VIEW
    node.domain = "my.ops"
    assert node not in facts.VIEW
    assert None not in facts.VIEW
