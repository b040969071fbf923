"""Blocks of torch.no_grad in files of torch's dynamo exporter, by the code that their nodes were traced in."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.support.torch_files import W, X, exported, with_operations

V = np.linspace(1, -1, 16, dtype=np.float32).reshape(4, 4)
BODY = "h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v)"


def traced(body: str, code: dict[str, tuple[int, str]], *, outside: bool = True) -> ModelProto:
    """code: the block that each value comes from, by number, and what its line there reads."""
    file = exported(body, {"w": W, "v": V}, "w v")
    for node in all_nodes(file.graph):
        name = node.output[0]
        trace = f'File "net.py", line 7, in forward\n    return self.{name}(x)' if outside else ""
        if name in code:
            key, arguments = code[name]
            line = f"{name} = torch.ops.aten.{node.op_type.lower()}.default({arguments});  x = None"
            trace = f'File "<eval_with_key>.{key}", line 5, in forward\n    {line}'
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    return file


def parameters_and_warnings(file: ModelProto, **options: list[str]) -> tuple[list[str], list[str]]:
    """What is trained, and what is said of blocks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ob.OnnxBackpropWarning)
        graph = ob.training_graph(file, loss="mse", **options)
    return list(graph.parameters), [str(w.message) for w in caught if "no_grad" in str(w.message)]


def test_a_block_that_names_a_parameter_stops_gradients() -> None:
    trained, sentences = parameters_and_warnings(traced(BODY, {"h": (36, "x, p_w"), "t": (36, "h")}))
    assert trained == ["v"]
    assert len(sentences) == 1
    assert sentences[0].startswith("no gradient passes 't': ")


def test_values_inside_pass_gradients_to_nobody_and_to_the_outside_none() -> None:
    """h is read inside and outside: y = tanh(stop(h)) v + u, u = h alike."""
    body = "h = MatMul(x, w) t = Tanh(h) g = MatMul(x, v3) s = Add(t, g) y = Mul(s, h)"
    file = traced(body.replace("v3", "w"), {"h": (3, "x, p_w"), "t": (3, "h")})
    converted = ob.backward(file, wrt=["w"])
    feeds = {"x": X, "y_grad": np.ones((2, 4), np.float32)}
    named = dict(zip([o.name for o in converted.graph.output], ob.session(converted).run(None, feeds), strict=True))
    h = X @ W
    np.testing.assert_allclose(np.asarray(named["y"]), (np.tanh(h) + h) * h, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(named["w_grad"]), X.T @ h, rtol=1e-5)


@pytest.mark.parametrize("arguments", ["x, arg0_1", "x, weight"])
def test_of_other_blocks_the_file_does_not_say_whether_gradients_pass(arguments: str) -> None:
    file = traced(BODY, {"h": (36, arguments), "t": (36, "h")})
    trained, sentences = parameters_and_warnings(file)
    assert trained == ["w", "v"]
    assert len(sentences) == 1
    assert sentences[0].startswith("the module computes 't' under torch.no_grad() or torch.autocast(), ")
    trained, sentences = parameters_and_warnings(file, stop=["t"])
    assert (trained, sentences) == (["v"], [])


def test_two_blocks_of_which_no_gradient_reaches_the_second() -> None:
    body = "z = Exp(x) h = MatMul(z, w) t = Tanh(h) q = Softmax(t) y = MatMul(q, v)"
    trained, sentences = parameters_and_warnings(traced(body, {"z": (4, "x"), "h": (5, "z, p_w"), "q": (6, "t")}))
    assert trained == ["v"]
    assert len(sentences) == 1  # no gradient reaches the block of q
    assert "'h'" in sentences[0]


def test_a_file_whose_nodes_are_all_of_such_code_has_no_blocks() -> None:
    """What was exported is a program of torch.export, whose code is generated."""
    code = {"h": (36, "x, p_w"), "t": (36, "h"), "y": (36, "t, p_v")}
    assert parameters_and_warnings(traced(BODY, code)) == (["w", "v"], [])


def test_of_blocks_before_one_that_computes_the_output_the_file_says_nothing() -> None:
    """PyTorch would train nothing: it is what follows a torch.autograd.Function that switches gradients off and on."""
    code = {"t": (4, "h, p_w"), "y": (5, "t, p_v")}
    trained, sentences = parameters_and_warnings(traced(BODY, code))
    assert trained == ["w", "v"]
    assert len(sentences) == 1
    assert sentences[0].startswith("the module computes 't', 'y' under torch.no_grad() or torch.autocast(), ")


def test_a_block_of_autocast_that_computes_the_output_leaves_those_of_no_grad_alone() -> None:
    trained, sentences = parameters_and_warnings(traced(BODY, {"h": (4, "x, p_w"), "y": (5, "t, arg0_1")}))
    assert trained == ["v"]
    assert [sentence.partition(": ")[0] for sentence in sentences][:1] == ["no gradient passes 'h'"]


def test_blocks_in_branches_stop_gradients() -> None:
    branches = ", ".join(
        f"{branch}_branch = {branch} () => (float[2,4] {branch}_y) {{ {branch}_h = MatMul(x, w) {branch}_y = {op}({branch}_h) }}"
        for branch, op in (("then", "Tanh"), ("else", "Exp"))
    )
    body = f"s = ReduceSum <keepdims = 0> (x) b = Cast <to = 9> (s) i = If (b) <{branches}> y = MatMul(i, v)"
    code = {"then_h": (3, "x, p_w"), "else_h": (4, "x, p_w"), "else_y": (4, "h")}
    trained, sentences = parameters_and_warnings(traced(body, code))
    assert trained == ["v"]
    assert sentences[0].startswith("no gradient passes 'then_h', 'else_y': ")


def test_code_of_torch_fx_is_no_block() -> None:
    file = traced(BODY, {})
    for node in file.graph.node[:2]:
        node.metadata_props[
            -1
        ].value = f'File "<eval_with_key>.3", line 5, in forward\n    {node.output[0]} = self.a(p_w)'
    assert parameters_and_warnings(file) == (["w", "v"], [])


def test_a_block_that_the_exporter_merged_with_the_same_operations_outside() -> None:
    """y = tanh(h) v + stop(tanh(h)): one Tanh, which the product reads as `tanh_1`."""
    file = traced(
        "h = MatMul(x, w) tanh = Tanh(h) p = MatMul(tanh, v) y = Add(p, tanh)", {"h": (3, "x, p_w"), "tanh": (3, "h")}
    )
    file = with_operations(file, {"p": "%tanh_1, %p_v", "y": "%p, %tanh"})
    trained, sentences = parameters_and_warnings(file)
    assert trained == ["w", "v"]
    assert any(sentence.startswith("gradients pass 'tanh' to 'p'") for sentence in sentences)
    converted = ob.backward(file, wrt=["w"])
    feeds = {"x": X, "y_grad": np.ones((2, 4), np.float32)}
    named = dict(zip([o.name for o in converted.graph.output], ob.session(converted).run(None, feeds), strict=True))
    dh = (np.ones((2, 4)) @ V.T) * (1 - np.tanh(X @ W) ** 2)
    np.testing.assert_allclose(np.asarray(named["w_grad"]), X.T @ dh, rtol=1e-4, atol=1e-6)


def test_integers_that_leave_a_block_stop_nothing() -> None:
    body = "h = MatMul(x, w) i = ArgMax<axis = 1, keepdims = 0>(h) y = Gather(v, i)"
    file = traced(body, {"h": (36, "x, arg0_1"), "i": (36, "h")})
    value = file.graph.value_info.add(name="i")
    value.type.tensor_type.elem_type = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ob.backward(file, wrt=["v"]).graph.output[-1].name == "v_grad"
