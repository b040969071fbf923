"""`register_kernel`: operators of domains that are not ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Attribute, Input, Op, Output


def operator(domain: str, name: str = "Scaled", **more: Any) -> Op:
    """y = factor·x + Σ offsets, of rank 1, with a second output, the sum of the absolute values of y."""

    def shape(attributes, args):
        dims = args[0].dims
        if dims is not None and len(dims) != 1:
            raise ShapeError(f"expected x of rank 1, got rank {len(dims)}", op_type=attributes.op)
        return dims, (1,)

    def reference(attributes, _shapes, x):
        y = attributes["factor"] * x + sum(attributes["offsets"] or ())
        return y, np.abs(y).sum(keepdims=True)

    return Op(
        name=name,
        domain=domain,
        doc="y = factor·x + Σ offsets.",
        attributes=(Attribute("factor", "float", "", default=2.0), Attribute("offsets", "ints", "")),
        inputs=(Input("x", "T1", ""),),
        outputs=(Output("y", ""), Output("total", "")),
        shape=shape,
        reference=reference,
        **more,
    )


def model(domain: str, name: str = "Scaled", rank: str = "N", kind: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "{domain}": 1]>
        g ({kind}[{rank}] x) => ({kind}[] y, {kind}[] total) {{
            h = Abs (x)
            y, total = {domain}.{name} <factor = 3.0, offsets = [1, 2]> (h)
        }}""")


@pytest.mark.parametrize("kernels", ["native", "numpy", "numba"])
def test_a_reference_alone_runs_on_every_route_of_python(kernels: str) -> None:
    domain = f"kernels.of_{kernels}"
    first = ob.session(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Abs (x) }""")
    )
    ob.register_kernel(operator(domain))  # behind the first session of the process
    for kind, dtype in (("float", np.float32), ("float16", np.float16)):
        x = np.linspace(-2, 2, 7).astype(dtype)
        y, total = map(np.asarray, ob.session(model(domain, kind=kind), kernels=kernels).run(None, {"x": x}))
        expected = 3 * np.abs(x.astype(np.float64)) + 3
        np.testing.assert_array_equal(y, expected.astype(np.float32).astype(dtype))
        np.testing.assert_allclose(total, [expected.sum()], rtol=1e-3 if dtype == np.float16 else 1e-6)
    assert np.asarray(first.run(None, {"x": -np.ones(2, np.float32)})[0]).tolist() == [1, 1]


def test_its_sentence_refuses_a_shape() -> None:
    ob.register_kernel(operator("kernels.refusing"))
    for kernels in ("native", "numpy"):
        session = ob.session(model("kernels.refusing", rank="N, M"), kernels=kernels)
        with pytest.raises(Exception, match="expected x of rank 1, got rank 2"):
            session.run(None, {"x": np.ones((2, 2), np.float32)})


def test_without_a_body_the_route_of_standard_operators_leaves_it_alone() -> None:
    ob.register_kernel(operator("kernels.bodiless"))
    used = ob.use_kernels(model("kernels.bodiless"), "onnx")
    assert [node.op_type for node in used.graph.node] == ["Abs", "Scaled"]
    assert not used.functions
    with pytest.raises(ob.InvalidModelError, match="The declaration of Scaled has no body="):
        ob.session(model("kernels.bodiless"), kernels="onnx")
    with pytest.raises(ob.InvalidModelError, match="Nothing runs it: declare it by onnx_backprop.register_kernel"):
        ob.session(model("kernels.of_nobody"))


def test_a_type_that_no_kernel_takes_is_refused_with_advice() -> None:
    file = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (bfloat16[2, 2] x) => (bfloat16[2, 2] y) { y = MatMul(x, x) }'
    )
    with pytest.raises(
        ob.InvalidModelError, match="no kernel of it for these types on this device: export the model in float32"
    ):
        ob.session(file)


def test_kinds_that_there_are_not_are_refused() -> None:
    attribute: Any = Attribute("slope", 1.0, "")
    source: Any = Input("x", "float", "")
    for wrong, words in (
        ({"attributes": (attribute,)}, "Attribute 'slope': kind: expected one of int, float, .* got 1.0"),
        ({"inputs": (source,)}, "Input 'x': type_name: expected one of T1, .* got 'float'"),
    ):
        with pytest.raises(ob.InvalidArgumentError, match=words):
            ob.register_kernel(dataclasses.replace(operator("kernels.wrong"), **wrong))


def test_options_from_before_are_named() -> None:
    options = ob.register_ops(onnxruntime.SessionOptions())
    ob.register_kernel(operator("kernels.late"))
    with pytest.raises(ob.InvalidModelError, match="Scaled was registered after these session options had been"):
        ob.session(model("kernels.late"), session_options=options)
    y, _ = ob.session(model("kernels.late"), session_options=onnxruntime.SessionOptions()).run(
        None, {"x": np.ones(2, np.float32)}
    )
    assert np.asarray(y).tolist() == [6, 6]


def test_what_is_no_operator_of_ones_own_is_refused() -> None:
    wrongs: list[Any] = ["Scaled", operator("ai.onnx"), operator("onnx_backprop"), operator(""), operator("a b")]
    for wrong in wrongs:
        with pytest.raises(ob.InvalidArgumentError, match="operator: expected"):
            ob.register_kernel(wrong)
    number: Any = 3
    with pytest.raises(ob.InvalidArgumentError, match="plan: expected a function"):
        ob.register_kernel(operator("kernels.planless"), number)
    ob.register_kernel(operator("kernels.planless"))  # nothing of the refused one is left
    with pytest.raises(ob.RegistrationError, match=r"second declaration of kernels\.planless::Scaled"):
        ob.register_kernel(operator("kernels.planless"))


def test_no_library_holds_python() -> None:
    ob.register_kernel(operator("kernels.interpreted"))

    @ob.register_gradient("kernels.interpreted", "Scaled")
    def rule(op, _node, dy):
        return 3 * dy

    graph = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "kernels.interpreted": 1]>
        g (float[N] x) => (float[N] y) <float[1] w = {2}> {
            h = Mul (x, w)
            y = kernels.interpreted.Scaled <factor = 3.0> (h)
        }""")
    training = ob.training_graph(graph, loss="mse", optimizer="sgd")
    trainer = ob.Trainer(training, learning_rate=0.0)
    x = np.array([1, 2], np.float32)
    assert trainer.step(x=x, target=0 * x) == pytest.approx(np.mean((6 * x) ** 2))
    with pytest.raises(ob.UnsupportedError, match="its kernel is Python, which no library runs"):
        ob.compile_plugin(training, "/nonexistent", lengths={"N": 2})
