"""BatchNorms with the chains around them: which are fused, and that the bits are those of the separate nodes."""

from __future__ import annotations

import ctypes
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE
from onnx_backprop.ort_ops.rewrites import fuse_batch_norms as rewrite
from onnx_backprop.ort_ops.rewrites.fuse_batch_norms import fuse_batch_norms
from onnx_backprop.ort_ops.rewrites.fuse_elementwise import fuse_elementwise
from tests.ort_ops.guarded import Guarded
from tests.support import single_op

f32 = np.float32
FORWARD, BACKWARD = "BatchNormForwardTraining", "BatchNormTrainingBackward"
BOTH = [NATIVE_PREFIX + FORWARD, NATIVE_PREFIX + BACKWARD]
BN = 'z, nm, nv, m, v = onnx_backprop.BatchNormForwardTraining<epsilon=1e-3, momentum=0.9, data_format="NCX">(x, rm, rv, g, b)'
BNB = 'dx, dg, db = onnx_backprop.BatchNormTrainingBackward<epsilon=1e-3, data_format="NCX">(x, dz, m, v, g)'
RELU = f"{BN}  y = Relu(z)  dz = onnx_backprop.ReLUBackward(y, dy)  {BNB}"
RESIDUAL = f"{BN}  s = Add(r, z)  y = Relu(s)  a = Add(dy, more)  dz = onnx_backprop.ReLUBackward(y, a)  {BNB}"
PASSED_ON = f"{RESIDUAL}  passed = Abs(dz)"
SILU = "c = Sigmoid(z)  d = Sub(one, c)  e = Mul(z, d)  f = Add(one, e)  h = Mul(c, f)  dz = Mul(sum, h)"
GATED = f"""
    {BN}  q = Sigmoid(z)  y = Mul(z, q)  t = Mul(gate, dy)  lengths = Shape(x)  u = Expand(pool, lengths)
    sum = Add(t, u)  {SILU}  {BNB}"""
SWISH = f"""
    {BN}  y = HardSwish(z)  under = LessOrEqual(z, less)  over = GreaterOrEqual(z, three)  d = Div(z, three)
    between = Where(under, zero, d)  slope = Where(over, one, between)  dz = Mul(slope, dy)  {BNB}"""
SHAPES = [(2, 3, 5, 7), (3, 17, 32), (2, 5, 3, 2, 70), (4, 3), (3, 4, 4, 4), (1, 2, 4099), (0, 3, 4, 5)]


def model(nodes: str, shape: tuple[int, ...] = (2, 3, 5, 7), outputs: str = "y dx") -> ModelProto:
    """A graph of float32 in which every value's shape is stated, as a training graph's are."""
    dims, plane, flags = list(shape), [*shape[:2], *[1] * len(shape[2:])], ("under", "over")
    graph = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "onnx_backprop": 1]>
        graph (float{dims} x, float{dims} dy, float{dims} more, float{dims} r, float{plane} gate, float{plane} pool,
               float[{shape[1]}] rm, float[{shape[1]}] rv, float[{shape[1]}] g, float[{shape[1]}] b) => ()
        <float one = {{1.0}}, float three = {{3.0}}, float less = {{-3.0}}, float zero = {{0.0}}> {{ {nodes} }}""")
    channels = {"nm", "nv", "m", "v", "dg", "db"}
    for name in dict.fromkeys(name for node in graph.graph.node for name in node.output if name not in ("", "lengths")):
        kind = TensorProto.BOOL if name in flags else TensorProto.FLOAT
        value = helper.make_tensor_value_info(name, kind, [shape[1]] if name in channels else dims)
        wanted = name in (*outputs.split(), *channels, "passed")
        (graph.graph.output if wanted else graph.graph.value_info).append(value)
    return graph


def of_any_lengths(graph: ModelProto) -> ModelProto:
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if axis > 1 and dim.dim_value > 1:
                dim.dim_param = f"L{axis}"
    return graph


def fused(graph: ModelProto) -> ModelProto:
    return fuse_batch_norms(fuse_elementwise(deepcopy(graph)))


def kinds(graph: ModelProto) -> list[str]:
    return [node.op_type for node in graph.graph.node]


def feeds(rng: np.random.Generator, graph: ModelProto, special: bool = False) -> dict[str, np.ndarray]:
    result = {}
    for value in graph.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        values = rng.standard_normal(shape).astype(f32) * 3
        if special and len(shape) > 2 and values.size:
            picked = rng.random(values.shape) < 0.1
            values[picked] = rng.choice(np.array([0.0, -0.0, 1e-42, 3e18], f32), picked.sum())
            if value.name in ("r", "dy"):  # of x, none would make whole channels of them
                values.flat[rng.integers(0, values.size, 3)] = np.inf, -np.inf, np.nan
        result[value.name] = np.abs(values) if value.name == "rv" else values
    return result


def answers(graph: ModelProto, given: dict[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    options = single_op.options(threads)
    got = ob.session(deepcopy(graph), session_options=options).run(None, given)
    return {value.name: np.asarray(array) for value, array in zip(graph.graph.output, got, strict=True)}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name, strict=True)
        known = ~np.isnan(array)
        np.testing.assert_array_equal(np.signbit(got[name])[known], np.signbit(array)[known], err_msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(RELU, BOTH), (RESIDUAL, BOTH), (PASSED_ON, [*BOTH, "Abs"]), (GATED, [BOTH[0], "Shape", BOTH[1]]), (SWISH, BOTH)],
    ids=["relu", "residual", "passed on", "gated silu", "hard swish"],
)
def test_the_bits_are_those_of_the_nodes(rng, nodes: str, expected: list[str], shape: tuple[int, ...]) -> None:
    graph = model(nodes, shape)
    changed = fused(graph)
    assert (kinds(changed) == expected) == (np.prod(shape[2:]) > rewrite.SHORT)
    plain = fuse_elementwise(deepcopy(graph)) if nodes == GATED else graph  # Sigmoid has other roundings elsewhere
    for special in (False, True):
        given = feeds(rng, graph, special)
        one = answers(changed, given)
        assert_same(one, answers(plain, given))
        assert_same(answers(changed, given, threads=2), one)


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_is_touched_beside_the_tensors(rng, at_end: bool) -> None:
    """Each of them lies beside an unreadable page."""
    for nodes in (RESIDUAL, PASSED_ON, GATED, SWISH):
        for shape in [(2, 3, 5, 7), (1, 2, 33), (3, 4, 2, 1)]:
            graph = model(nodes, shape)
            given = feeds(rng, graph)
            changed = fused(of_any_lengths(graph))
            assert {*BOTH} <= {*kinds(changed)}
            expected = answers(changed, given)
            session = ob.session(changed, session_options=single_op.options(2))
            binding, kept = session.io_binding(), dict[str, tuple[Guarded, int]]()
            for name, array in (given | expected).items():
                memory = Guarded(array.nbytes)
                address = memory.address(at_end=at_end)
                kept[name] = memory, address
                bind = binding.bind_input if name in given else binding.bind_output
                ctypes.memmove(address, array.ctypes.data, array.nbytes if name in given else 0)
                if name in given and name not in {value.name for value in session.get_inputs()}:
                    continue
                bind(name, "cpu", 0, TensorProto.FLOAT, array.shape, address)
            session.run_with_iobinding(binding)
            got = {name: np.empty_like(array) for name, array in expected.items()}
            for name, array in got.items():
                ctypes.memmove(array.ctypes.data, kept[name][1], array.nbytes)
            assert_same(got, expected)


def test_values_are_those_of_float64(rng) -> None:
    """Of a batch norm, an activation that is no step function, and a gate, by numerical arithmetic of its own."""
    graph = model(GATED, (3, 4, 6, 5))
    given = feeds(rng, graph)
    got = answers(fused(graph), given)
    x, dy, gate, pool, g, b = (given[name].astype(np.float64) for name in ("x", "dy", "gate", "pool", "g", "b"))
    axes, per = (0, 2, 3), (1, -1, 1, 1)
    mean, rate = x.mean(axes).reshape(per), 1 / np.sqrt(x.var(axes).reshape(per) + np.float64(f32(1e-3)))
    n = (x - mean) * rate
    z = n * g.reshape(per) + b.reshape(per)
    s = 1 / (1 + np.exp(-z))
    dz = (dy * gate + pool) * s * (1 + z * (1 - s))
    dx = g.reshape(per) * rate * (dz - dz.mean(axes).reshape(per) - n * (dz * n).mean(axes).reshape(per))
    for name, exact in {"y": z * s, "dx": dx, "dg": (dz * n).sum(axes), "db": dz.sum(axes)}.items():
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max(), err_msg=name)


def with_attribute(graph: ModelProto, op_type: str, name: str, value: Any) -> ModelProto:
    for node in graph.graph.node:
        if node.op_type == op_type:
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return graph


def with_local_relu(graph: ModelProto) -> ModelProto:
    graph.opset_import.append(helper.make_opsetid("mine", 1))
    text = '<opset_import: ["": 18], domain: "mine"> Relu (x) => (y) { y = Neg(x) }'
    graph.functions.append(parser.parse_function(text))
    return graph


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (model(RELU, outputs="y dx z"), [FORWARD, "Relu", BOTH[1]]),
        (model(f"{RELU}  passed = Abs(z)"), [FORWARD, "Relu", BOTH[1], "Abs"]),
        (model(f"{RELU}  passed = Abs(dz)"), [*BOTH, "Abs"]),
        (model(RELU.replace(BNB, f"passed = Abs(dz)  {BNB}")), [BOTH[0], "ReLUBackward", "Abs", BACKWARD]),
        (model(RELU, outputs="y dx dz"), BOTH),
        (model(RESIDUAL.replace("s = Add", "passed = Abs(nm)  s = Add")), [FORWARD, "Abs", ELEMENTWISE, BOTH[1]]),
        (model(f"{BN}  y = Abs(z)  dz = Add(dy, more)  {BNB}"), [FORWARD, "Abs", BOTH[1]]),
        (model(f"{BN}  y = Relu(z)  dz = Mul(dy, gate)  {BNB}"), [BOTH[0], "Mul", BACKWARD]),
        (model(f"{GATED}  passed = Abs(t)"), [BOTH[0], "Mul", "Shape", BOTH[1], "Abs"]),
        (with_attribute(model(RELU), BACKWARD, "epsilon", 1e-5), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU.replace("m, v, g)", "m, v, b)")), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU.replace("m, v, g)", "rm, rv, g)")), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU, outputs="y"), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU.replace("(x, dz", "(r, dz")), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU.replace(", m, v, g)", ")")), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(RELU.replace("m, v", 'm, ""')), [BOTH[0], "ReLUBackward", BACKWARD]),
        (model(SWISH.replace(", g, b)", ")").replace(", g)", ")")), BOTH),
        (model(f"{BN}  dz = Add(dy, more)  y = Relu(z)  {BNB}"), [FORWARD, BOTH[1], "Relu"]),
        (
            model(f"under = IsNaN(r)  {BN}  y = Where(under, zero, z)  dz = Where(under, zero, dy)  {BNB}"),
            ["IsNaN", FORWARD, "Where", "Where", BACKWARD],
        ),
        (with_local_relu(model(f"{BN}  y = mine.Relu(z)  dz = Mul(dy, y)  {BNB}")), [FORWARD, "Relu", BOTH[1]]),
        (
            with_attribute(with_attribute(model(RELU, (2, 3, 9, 3)), FORWARD, "data_format", "NXC"), BACKWARD, "data_format", "NXC"),
            [FORWARD, "Relu", "ReLUBackward", BACKWARD],
        ),
    ],
    ids=[
        *("z is put out", "z is read elsewhere", "dz is read behind", "dz is read before", "dz is put out"),
        *("statistics are read before", "no step", "no chain", "a gate is read elsewhere"),
        *("another epsilon", "another gamma", "other statistics", "nobody reads dx"),
        *("another x", "no statistics", "no variance", "no parameters", "dz before y", "a mask", "another Relu"),
        "channels last",
    ],
)  # fmt: skip
def test_fusion_conditions(graph: ModelProto, expected: list[str], rng) -> None:
    changed = fused(graph)
    assert kinds(changed) == expected
    given = feeds(rng, graph)
    assert_same(answers(changed, given), answers(fuse_elementwise(deepcopy(graph)), given))


def test_a_node_inside_a_branch_reads_z(rng) -> None:
    graph = model(RELU)
    branch = parser.parse_graph("inner () => (float[2, 3, 5, 7] chosen) { chosen = Neg(z) }")
    graph.graph.node.append(helper.make_node("If", ["yes"], ["passed"], then_branch=branch, else_branch=branch))
    graph.graph.output.append(helper.make_tensor_value_info("passed", TensorProto.FLOAT, [2, 3, 5, 7]))
    graph.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
    changed = fused(graph)
    assert kinds(changed) == [FORWARD, "Relu", BOTH[1], "If"]
    given = feeds(rng, model(RELU)) | {"yes": np.array(True)}
    assert_same(answers(changed, given), answers(graph, given))


def test_names_that_are_taken(rng) -> None:
    """By a value that is made in the fused graph too."""
    graph = model(PASSED_ON.replace("z, nm, nv,", 'z, "", "",'))
    for node in graph.graph.node:
        for names in (node.input, node.output):
            names[:] = ["y/unread" if name == "dz" else name for name in names]
    next(value for value in graph.graph.value_info if value.name == "dz").name = "y/unread"
    changed = fused(graph)
    assert kinds(changed) == [*BOTH, "Abs"]
    given = feeds(rng, graph)
    assert_same(answers(changed, given), answers(graph, given))


@pytest.mark.parametrize("name", ["z", "dy"])
def test_a_run_on_another_shape_is_refused(name: str, rng) -> None:
    """That all are of one shape is what the graph says, not what a run has to bring."""
    changed = fused(model(RESIDUAL))
    wrong = "r" if name == "z" else "more"
    for value in changed.graph.input:
        if value.name == wrong:
            value.type.tensor_type.shape.dim[0].dim_param = "any"
    given = feeds(rng, model(RESIDUAL))
    given[wrong] = given[wrong][:1]
    with pytest.raises(Exception, match="no program for operands of the shapes"):
        answers(changed, given)


def test_steps_of_a_trainer_have_the_same_bits(monkeypatch, rng) -> None:
    from models import resnet

    graph = ob.training_graph(  # of images of any size
        resnet.build(features=4), loss="softmax_cross_entropy", optimizer=ob.optimizers.SGD(momentum=0.9)
    )

    def trained() -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = ob.Trainer(graph, learning_rate=0.05)
        shapes = {v.name: [d.dim_value or 32 for d in v.type.tensor_type.shape.dim] for v in graph.model.graph.input}
        x, labels = graph.inputs
        draw = np.random.default_rng(7)
        batch = {x: draw.standard_normal(shapes[x]).astype(f32), labels: draw.integers(0, 10, shapes[labels])}
        return [float(trainer.step(batch)) for _ in range(3)], trainer.state()

    seen = []
    real = rewrite.fuse_batch_norms
    monkeypatch.setattr(rewrite, "fuse_batch_norms", lambda model: seen.append(real(model)) or model)
    losses, state = trained()
    assert sum(node.op_type in BOTH for node in seen[0].graph.node) > 20
    monkeypatch.setattr(rewrite, "fuse_batch_norms", lambda model: model)
    expected, plain = trained()
    assert losses == expected
    assert_same(state, plain)
