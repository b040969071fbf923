"""Native updates: the bits of the standard operators, at any length, refusals, memory of their own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD, Adagrad, Adam, AdamW, Group, Lion, Optimizer, RMSProp
from onnx_backprop.converters.training.update.step import optimizer_graph
from onnx_backprop.ort_ops import register_ops
from onnx_backprop.ort_ops.elementwise.kernel import NAME
from onnx_backprop.ort_ops.elementwise.program import PIECE, Program
from onnx_backprop.ort_ops.rewrites.fuse_updates import fuse_updates
from onnx_backprop.ort_ops.rewrites.in_place import update_in_place
from tests.ort_ops.guarded import Guarded

SHAPES = ((), (1,), (0, 3), (17,), (2, 3, 5, 7), (5, 3, 1, 1), (PIECE,), (PIECE * 2 + 3,), (1, 16))
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9, weight_decay=0.01),
    "nesterov": SGD(momentum=0.9, nesterov=True),
    "adam": Adam(weight_decay=0.1),
    "adamw": AdamW(),
    "rmsprop": RMSProp(),
    "centred rmsprop": RMSProp(centered=True, momentum=0.5),
    "adagrad": Adagrad(rate_decay=0.1),
    "lion": Lion(weight_decay=0.1),
    "groups": AdamW(groups=[Group(parameters=["p0", "p3"], weight_decay=0.0, rate=2.0)], clip_norm=1.0, ema=0.9),
    "accumulated": SGD(momentum=0.9, accumulate=2, clip_value=0.5),
}


def updating(optimizer: Optimizer, dtype: ir.DataType = ir.DataType.FLOAT) -> ModelProto:
    return optimizer_graph(optimizer, {f"p{n}": (dtype, shape) for n, shape in enumerate(SHAPES)})


def feeds(model: ModelProto, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Positive numbers where state may have to be; NaN, infinities and zeros in the last tensor."""
    result: dict[str, np.ndarray] = {}
    defaults = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name in defaults:
            continue
        if np.issubdtype(kind, np.integer):
            result[value.name] = np.full(shape, 3, kind)
            continue
        drawn = rng.standard_normal(shape)
        if "." in value.name:
            drawn = np.abs(drawn)
        if value.name == f"p{len(SHAPES) - 1}_grad":
            drawn[0, :5] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
        result[value.name] = np.asarray(drawn).astype(kind)
    result["learning_rate"] = np.asarray(0.01, result["learning_rate"].dtype)
    return result


def native(model: ModelProto) -> list[Any]:
    graphs = [model.graph, *(a.g for n in model.graph.node for a in n.attribute if a.HasField("g"))]
    return [node for graph in graphs for node in graph.node if node.op_type == NAME]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_bits_are_those_of_standard_operators(name: str) -> None:
    model = updating(OPTIMIZERS[name])
    fed = feeds(model, np.random.default_rng(5))
    expected = ob.session(model, kernels=None).run(None, fed)
    fused = fuse_updates(ModelProto.FromString(model.SerializeToString()))
    taken = {name for node in native(fused) for name in node.input}
    assert taken >= {f"p{n}" for n in range(len(SHAPES))}
    got = ob.session(model, kernels="native").run(None, fed)
    for output, e, g in zip(model.graph.output, expected, got, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(e), err_msg=output.name)
        assert np.asarray(g).shape == np.asarray(e).shape


@pytest.mark.parametrize("dtype", [ir.DataType.DOUBLE, ir.DataType.FLOAT16])
def test_other_types_keep_their_standard_operators(dtype: ir.DataType) -> None:
    model = updating(AdamW(), dtype)
    assert not native(fuse_updates(ModelProto.FromString(model.SerializeToString())))
    fed = feeds(model, np.random.default_rng(5))
    expected, got = (ob.session(model, kernels=k).run(None, fed) for k in (None, "native"))
    for e, g in zip(expected, got, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(e))


def test_mixed_types_are_taken_apart() -> None:
    types = {"a": ir.DataType.FLOAT, "b": ir.DataType.FLOAT16, "c": ir.DataType.FLOAT}
    model = optimizer_graph(AdamW(), {name: (dtype, (3, 4)) for name, dtype in types.items()})
    (node,) = native(fuse_updates(ModelProto.FromString(model.SerializeToString())))
    assert {"a", "c"} <= set(node.input)
    assert "b" not in node.input
    fed: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(1)
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name not in {t.name for t in model.graph.initializer}:
            fed[value.name] = np.asarray(np.abs(rng.standard_normal(shape))).astype(kind)
    expected, got = (ob.session(model, kernels=k).run(None, fed) for k in (None, "native"))
    for e, g in zip(expected, got, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(e))


def single(program: str, tensors: int, results: int, shapes: list[tuple[int, ...]], numbers: int = 3) -> ModelProto:
    inputs = [helper.make_tensor_value_info(f"t{n}", TensorProto.FLOAT, list(shapes[n])) for n in range(tensors)]
    outputs = [helper.make_tensor_value_info(f"r{n}", TensorProto.FLOAT, None) for n in range(results)]
    node = helper.make_node(
        NAME, ["s", *(f"t{n}" for n in range(tensors))], [f"r{n}" for n in range(results)],
        domain="ai.onnx.contrib", program=program,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("s", TensorProto.FLOAT, [numbers]), *inputs], outputs
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.contrib", 1)], ir_version=10
    )


def opened(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        model.SerializeToString(), register_ops(options), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 1 -> t1",
        "2 1; Add t0 -> v0",
        "1 1; Cast t0 -> v0",
        "1 1; Add t0 v0 -> v0",
        "1 2; Sqrt t0 -> v0",
        "1 1; Less t0 t0 -> v0",
        "2 1; Where t0 t0 t1 -> v0",
        "2 1; Less t0 t1; And v0 s0 -> t0",
        "x 1 -> t0",
    ],
)
def test_texts_that_are_no_formula(text: str) -> None:
    with pytest.raises(ob.InvalidModelError, match="no formula"):
        Program.parse(text)
    with pytest.raises(Exception, match="Update: no formula"):
        opened(single(text, 1, 1, [(3,)]))


def test_a_formula_is_its_text() -> None:
    text = "2 2; Mul s0 t1; Add t0 v0; Sign v1; Sqrt v2 -> v3 t0"
    assert str(Program.parse(text)) == text
    assert Program.parse(text).numbers == 1


def test_tensors_of_other_lengths_and_too_few_numbers_are_refused() -> None:
    s, a, b = np.ones(3, np.float32), np.ones((2, 3), np.float32), np.ones(5, np.float32)
    session = opened(single("2 1; Mul s2 t1; Add t0 v0 -> v1", 2, 1, [(2, 3), (5,)]))
    with pytest.raises(Exception, match="the tensors of an item must have one shape"):
        session.run(None, {"s": s, "t0": a, "t1": b})
    session = opened(single("2 1; Mul s3 t1; Add t0 v0 -> v1", 2, 1, [(2, 3), (2, 3)]))
    with pytest.raises(Exception, match="a formula as many numbers as it reads"):
        session.run(None, {"s": s, "t0": a, "t1": a})


@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 100, PIECE + 5])
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beyond_the_tensors_is_read_or_written(count: int, at_end: bool) -> None:
    """Tensors and results lie beside pages that nobody may touch; a result lies where a tensor does."""
    rng = np.random.default_rng(count)
    session = opened(single("3 2; Mul s0 t2; Mul s1 t1; Add v0 v1; Sub t0 v2 -> v3 v2", 3, 2, [(count,)] * 3))
    memories = [Guarded(4 * count) for _ in range(3)]
    drawn = [rng.standard_normal(count).astype(np.float32) for _ in memories]
    binding = session.io_binding()
    s = np.array([0.5, 2.0, 9.0], np.float32)
    binding.bind_ortvalue_input("s", onnxruntime.OrtValue.ortvalue_from_numpy(s))
    for n, (memory, values) in enumerate(zip(memories, drawn, strict=True)):
        address = memory.address(at_end=at_end)
        view(address, count)[:] = values
        binding.bind_input(f"t{n}", "cpu", 0, np.float32, [count], address)
    for result, tensor in (("r0", 0), ("r1", 2)):
        binding.bind_output(result, "cpu", 0, np.float32, [count], memories[tensor].address(at_end=at_end))
    session.run_with_iobinding(binding)
    v2 = s[0] * drawn[2] + s[1] * drawn[1]
    np.testing.assert_array_equal(view(memories[2].address(at_end=at_end), count), v2)
    np.testing.assert_array_equal(view(memories[0].address(at_end=at_end), count), drawn[0] - v2)


@pytest.mark.parametrize("op_type", ["Identity", "Reshape", "Mul"])
def test_a_gradient_in_the_memory_of_a_parameter(op_type: str) -> None:
    """da is b in another shape: onnxruntime makes no copy of it, so b must not be overwritten."""
    count = 3 * PIECE
    values = {"shape": np.array([count]), "one": np.ones(1, np.float32)}
    second = {"Identity": [], "Reshape": ["shape"], "Mul": ["one"]}[op_type]
    update = helper.make_node(
        NAME, ["s", "b", "db", "a", "da"], ["b_new", "a_new"], domain="ai.onnx.contrib",
        program="2 1; Mul s0 t1; Sub t0 v0 -> v1",
    )  # fmt: skip
    nodes = [helper.make_node(op_type, ["b", *second], ["da"]), helper.make_node("Relu", ["a"], ["db"])]
    nodes.append(helper.make_node("ReduceSum", ["a"], ["loss"], keepdims=0))

    def declared(name: str, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs = [declared("a", [count]), declared("b", [count]), declared("s", [1])]
    outputs = [declared("loss", []), declared("a_new", [count]), declared("b_new", [count])]
    held = [numpy_helper.from_array(value, name) for name, value in values.items()]
    model = helper.make_model(
        helper.make_graph([*nodes, update], "g", inputs, outputs, held),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.contrib", 1)],
        ir_version=10,
    )
    in_place, guard = update_in_place(model, "loss", {"a": "a_new", "b": "b_new"})
    assert in_place == {"a"}
    session = opened(model)
    drawn = {"a": np.full(count, 2, np.float32), "b": np.full(count, 5, np.float32), "s": np.float32([0.1])}
    drawn[guard] = np.ones((), np.float32)
    binding, held_values = session.io_binding(), {}
    for name, value in drawn.items():
        held_values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(value)
        binding.bind_ortvalue_input(name, held_values[name])
    new = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(count, np.float32))
    binding.bind_ortvalue_output("a_new", held_values["a"])
    binding.bind_ortvalue_output("b_new", new)
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(drawn["a"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(new.numpy(), 4.8, rtol=1e-6)
    assert drawn[guard] == 2


def view(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
