"""What rules emit with: plain numbers as operands, types of results, and what nobody reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import drop_unread


def value(dtype: ir.DataType | None, *shape: int) -> ir.Value:
    return ir.Value(name="x", type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape(shape))


def held(operand: ir.Value | None) -> np.ndarray:
    tensor = ir.convenience.get_const_tensor(operand) if operand is not None else None
    assert tensor is not None
    return tensor.numpy()


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT64])
def test_a_number_has_the_type_of_what_it_meets(dtype: ir.DataType) -> None:
    op = Builder(set())
    y = op.Sub(1, value(dtype, 2))
    producer = y.producer()
    assert producer is not None
    assert held(producer.inputs[0]).dtype == dtype.numpy()
    assert y.dtype == dtype


def test_numbers_that_share_no_type_with_another_input() -> None:
    op = Builder(set())
    x = value(ir.DataType.FLOAT16, 2, 3)
    for y, index, expected in (
        (op.ReduceSum(x, [0, 1]), 1, np.array([0, 1], np.int64)),
        (op.Gather(x, 1), 1, np.array(1, np.int64)),
        (op.Where(op.Greater(x, 0), 0.5, x), 1, np.array(0.5, np.float16)),
        (op.Pow(x, 2.0), 1, np.array(2, np.float32)),
    ):
        producer = y.producer()
        assert producer is not None
        np.testing.assert_array_equal(held(producer.inputs[index]), expected, strict=True)
        assert y.dtype == ir.DataType.FLOAT16


def test_types_that_inputs_do_not_decide() -> None:
    op = Builder(set())
    x = value(ir.DataType.FLOAT, 2)
    assert op.Cast(x, to=ir.DataType.DOUBLE).dtype == ir.DataType.DOUBLE
    assert op.Shape(x).dtype == ir.DataType.INT64
    assert op.Greater(x, 0).dtype == ir.DataType.BOOL
    assert op.filled(op.Shape(x), 1, ir.DataType.BFLOAT16).dtype == ir.DataType.BFLOAT16
    assert [part.dtype for part in op.emit("Split", [x, [1, 1]], {}, outputs=2)] == [ir.DataType.FLOAT] * 2


def test_a_number_beside_a_value_of_unknown_type_is_refused() -> None:
    with pytest.raises(ob.InvalidModelError, match="the element type of 'x' is unknown"):
        Builder(set()).Sub(1, value(None, 2))


def test_what_nobody_reads_goes_with_what_only_it_reads() -> None:
    op = Builder(set())
    x = value(ir.DataType.FLOAT, 2)
    kept, unread = op.Neg(x), op.Exp(op.Abs(x))
    drop_unread(op.nodes, [kept])
    assert [node.op_type for node in op.nodes] == ["Neg"]
    assert not unread.uses()


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_lookups_are_added_to_what_there_is(lookups: int, tied: bool) -> None:
    """The gradient of a tied embedding: rows are added to that of the product, and zeros made where there is none."""
    rng = np.random.default_rng(0)
    w, h, dy = (rng.standard_normal(shape, np.float32) for shape in ((7, 3), (4, 3), (4, 7)))
    ids = np.array([[1, 5, 1], [0, 6, 6]])
    sums = " ".join(f"g{n} = Gather(w, i{n}) s{n} = ReduceSum<keepdims = 0>(g{n})" for n in range(lookups))
    total = "t0 = Identity(s0)" if lookups == 1 else "t0 = Add(s0, s1)"
    product = "m = Mul(z, dy) s = ReduceSum<keepdims = 0>(m) y = Add(t0, s)" if tied else "y = Identity(t0)"
    inputs = ", ".join(f"int64[3] i{n}" for n in range(2))
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g ({inputs}, float[4, 3] h, float[4, 7] dy) => (float y) <float[7, 3] w> {{
            wt = Transpose<perm = [1, 0]>(w) z = MatMul(h, wt) {sums} {total} {product} }}""")
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    derived = ob.backward(model, wrt=["w"])
    operators = [node.op_type for node in derived.graph.node if node.output[0] in _leading(derived, "w_grad")]
    assert operators.count("ScatterElements") == lookups
    assert operators.count("Add") == 0
    assert operators.count("ConstantOfShape") == (not tied)
    feeds = {"i0": ids[0], "i1": ids[1], "h": h, "dy": dy}
    (got,) = ob.session(derived, kernels=None).run(["w_grad"], feeds)
    expected = np.float64(dy).T @ h if tied else np.zeros(w.shape)
    np.add.at(expected, ids[:lookups].ravel(), 1.0)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-6)


def _leading(model: ModelProto, name: str) -> set[str]:
    """The values that lead to one through sums and lookups."""
    makers = {output: node for node in model.graph.node for output in node.output}
    ancestors, waiting = set[str](), [name]
    while waiting:
        value = waiting.pop()
        if (node := makers.get(value)) is not None:
            ancestors.add(value)
            waiting += node.input[:1] if node.op_type == "ScatterElements" else node.input
    return ancestors
