"""Tensors that a module has under several names, and modules that are called several times: trained as one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.torch_metadata import ALIASES, TIES
from tests.support.torch_files import W, exported, names_of, scripted, with_operations

ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)
SQUARE = W[:, :3] + 1
NORMS = "a = LayerNormalization(x, n.weight, n.bias) b = Tanh(a) c = LayerNormalization(b, n.weight, n.bias) "


def trained_of(file: ModelProto) -> tuple[ob.TrainingGraph, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(file, loss="mse")
    return graph, "\n".join(str(w.message) for w in caught)


def reads(graph: ob.TrainingGraph, op_type: str, index: int) -> list[str]:
    nodes = (node for node in graph.model.graph.node if node.op_type == op_type)
    return [node.input[index] for node in nodes if len(node.input) > index]


def norms(parameters: str, calls: Mapping[str, str], modules: Mapping[str, str], body: str = "") -> ModelProto:
    tensors = {"n.weight": ONES, "n.bias": ZEROS, "w": SQUARE}
    file = exported(f"{NORMS} {body or 'y = MatMul(c, w)'}", tensors, parameters, modules=modules)
    return with_operations(file, calls)


def test_a_file_that_lists_other_names_of_its_tensors() -> None:
    """As ob.torch.export writes one norm under two names: torch's program reads it by the last."""
    called = "[3], %p_m_weight, %p_m_bias"
    calls = {"a": f"%x, {called}", "c": f"%b, {called}"}
    file = norms("n.weight n.bias m.weight m.bias w", calls, {"a": "n", "c": "m"})
    file.graph.metadata_props.add(key=TIES, value="stated")
    for value in file.graph.value_info[:2]:
        value.metadata_props.add(key=ALIASES, value=f'["{value.name.replace("n.", "m.")}"]')
    graph, warned = trained_of(file)
    assert set(graph.parameters) == {"n.weight", "n.bias", "w"}
    assert reads(graph, "LayerNormalization", 1) == ["n.weight", "n.weight"]
    assert graph.left_out == {}
    assert warned == ""


@pytest.mark.parametrize("pattern", ["n.weight", "n", "m.weight", "m.*", "re:m.we.*"])
def test_a_tied_tensor_is_chosen_by_any_of_its_names(pattern: str) -> None:
    file = norms("n.weight n.bias w", {}, {"a": "n", "c": "m"})
    file.graph.metadata_props.add(key=TIES, value="stated")
    for value in file.graph.value_info[:2]:
        value.metadata_props.add(key=ALIASES, value=f'["{value.name.replace("n.", "m.")}"]')
    with warnings.catch_warnings():
        warnings.simplefilter("error", ob.OnnxBackpropWarning)
        assert "n.weight" not in ob.training_graph(file, loss="mse", frozen=[pattern]).parameters
        assert "n.weight" in ob.training_graph(file, loss="mse", trainable=[pattern]).parameters


@pytest.mark.parametrize(("name", "rows"), [("view", SQUARE), ("expand", np.repeat(SQUARE[:1], 3, 0))])
def test_a_tied_tensor_that_the_exporter_has_moved_is_chosen_by_any_of_its_names(name: str, rows: np.ndarray) -> None:
    """As the weight of a GroupNorm under two names, which is reshaped, and a token that a batch repeats."""
    file = exported(
        f"a = Add(x, {name}) b = Tanh(a) y = MatMul(b, w)",
        {name: rows, "w": SQUARE},
        "n.weight m.weight w",
        folded={name: ["m.weight", "val_0"]},
        modules={"a": "n", "b": "m"},
        x="float[3,3] x",
    )
    file = with_operations(file, {"a": "%x, %p_m_weight"})
    for pattern in ("n.*", "m.*"):
        assert set(names_of(ob.training_graph(file, loss="mse", frozen=[pattern]))) == {"w"}
        assert set(names_of(ob.training_graph(file, loss="mse", trainable=[pattern]))) == {"m.weight"}


def test_one_norm_under_two_names_beside_an_equal_one() -> None:
    """Of dynamo, which keeps the tensors of the other norm; "o" is read by the name "p" alone."""
    called = "[3], %p_p_weight, %p_p_bias"
    calls = {"a": f"%x, {called}", "c": f"%b, {called}", "d": "%c, [3], %p_n_weight, %p_n_bias"}
    body = "d = LayerNormalization(c, n.weight, n.bias) y = MatMul(d, w)"
    parameters = "o.weight o.bias n.weight n.bias p.weight p.bias w"
    graph, warned = trained_of(norms(parameters, calls, {"a": "o", "c": "p", "d": "n"}, body))
    assert set(graph.parameters) == {"n.weight", "n.bias", "p.weight", "p.bias", "w"}
    for index, name in ((1, "p.weight"), (2, "p.bias")):
        assert reads(graph, "LayerNormalization", index)[:2] == [name, name]
    assert "no tensor for" not in warned


@pytest.mark.parametrize("kept", ["n.bias", "m.bias"])
def test_one_tensor_as_the_weight_and_the_bias_of_a_norm(kept: str) -> None:
    """`m.weight = m.bias` beside an equal bias; torch reads it by the last name."""
    body = f"a = LayerNormalization(x, n.weight, {kept}) b = LayerNormalization(a, {kept}, {kept}) y = MatMul(b, w)"
    tensors = {"n.weight": ONES, kept: ZEROS, "w": SQUARE}
    file = exported(body, tensors, "n.weight n.bias m.weight m.bias w", modules={"a": "n", "b": "m"})
    calls = {"a": "%x, [3], %p_n_weight, %p_n_bias", "b": "%a, [3], %p_m_bias, %p_m_bias"}
    graph, warned = trained_of(with_operations(file, calls))
    assert set(graph.parameters) == {"n.weight", "n.bias", "m.bias", "w"}
    assert [reads(graph, "LayerNormalization", index) for index in (1, 2)] == [
        ["n.weight", "m.bias"],
        ["n.bias", "m.bias"],
    ]
    assert "no tensor for" not in warned


def test_a_bias_of_a_norm_without_a_weight_is_no_other_name_of_one() -> None:
    """F.layer_norm(x, (3,), None, bias), whose ones are a constant."""
    file = exported("y = LayerNormalization(x, ones, bias)", {"ones": ONES, "bias": ZEROS}, "weight bias")
    _, warned = trained_of(with_operations(file, {"y": "%x, [3], None, %p_bias"}))
    assert "no tensor for these parameters of the module: 'weight'" in warned


def test_a_parameter_that_was_folded_is_no_other_name_of_one_inside_its_module() -> None:
    file = exported("y = MatMul(x, m.l.weight)", {"m.l.weight": SQUARE}, "m.weight m.l.weight", modules={"y": "m"})
    _, warned = trained_of(with_operations(file, {"y": "%x, %p_m_l_weight"}))
    assert "no tensor for these parameters of the module: 'm.weight'" in warned


LAYER = "h = Gemm(x, l.weight) a = Tanh(h) y = Gemm(a, l.weight)"
CALLED = {"h": "%x, %p_l_weight, %p_l_bias", "y": "%a, %p_l_weight, %p_l_bias"}


@pytest.mark.parametrize("calls", [CALLED, {}], ids=["arguments", "names"])
def test_a_dropped_bias_of_a_module_that_is_called_twice(calls: dict[str, str]) -> None:
    file = exported(LAYER, {"l.weight": SQUARE}, "l.weight l.bias", modules={"h": "l", "y": "l"})
    graph, _ = trained_of(with_operations(file, calls))
    assert set(graph.parameters) == {"l.weight", "l.bias"}
    assert reads(graph, "Gemm", 2) == ["l.bias", "l.bias"]


def test_a_dropped_bias_of_two_modules() -> None:
    """`b.bias = a.bias`: torch reads it by the last name."""
    body = "h = Gemm(x, a.weight) t = Tanh(h) y = Gemm(t, b.weight)"
    tensors, modules = {"a.weight": SQUARE, "b.weight": SQUARE + 1}, {"h": "a", "y": "b"}
    file = exported(body, tensors, "a.weight a.bias b.weight b.bias", modules=modules)
    graph, warned = trained_of(
        with_operations(file, {"h": "%x, %p_a_weight, %p_b_bias", "y": "%t, %p_b_weight, %p_b_bias"})
    )
    assert set(names_of(graph)) == {"a.weight", "b.weight", "b.bias"}
    assert reads(graph, "Gemm", 2) == ["b.bias", "b.bias"]
    assert "no tensor for" not in warned


def test_a_product_of_a_weight_alone_gets_no_bias() -> None:
    """F.linear(x, m.l.weight) before m.l(x)."""
    file = exported(LAYER, {"l.weight": SQUARE}, "l.weight l.bias", modules={"y": "l"})
    graph, _ = trained_of(with_operations(file, {**CALLED, "h": "%x, %p_l_weight"}))
    assert [len(node.input) for node in graph.model.graph.node if node.op_type == "Gemm"][:2] == [2, 3]


@pytest.mark.parametrize("weight", [SQUARE, W], ids=["square", "wide"])
@pytest.mark.parametrize("calls", [{"h": "%x, %t", "y": "%a, %p_l_weight, %p_l_bias"}, {}], ids=["arguments", "names"])
def test_a_product_of_a_transposed_weight_gets_no_bias_of_another(weight: np.ndarray, calls: dict[str, str]) -> None:
    """F.linear(x, l.weight.t()) before l: the file has the weight a second time."""
    file = exported(
        "h = Gemm<transB=1>(x, t) a = Tanh(h) y = Gemm<transB=1>(a, l.weight)",
        {"t": weight.T.copy(), "l.weight": weight},
        "l.weight l.bias",
        folded={"t": ["l.weight"]},
        modules={"h": "", "y": "l"},
        x=f"float[N,{len(weight)}] x",
    )
    graph, _ = trained_of(with_operations(file, calls))
    assert {name: value.shape for name, value in names_of(graph).items()} == {
        "l.weight": weight.shape,
        "l.bias": (len(weight),),
    }
    assert [list(node.input[2:]) for node in graph.model.graph.node if node.op_type == "Gemm"][:2] == [[], ["l.bias"]]


@pytest.mark.parametrize(("op_type", "array"), [("Gemm<transB=1>", W), ("Conv", W.reshape(3, 4, 1))])
@pytest.mark.parametrize("weight", ["p_l_weight", "flip"])
def test_a_dropped_bias_is_the_one_that_torch_read(op_type: str, array: np.ndarray, weight: str) -> None:
    tensor = "l.weight" if weight == "p_l_weight" else weight
    body = f"h = {op_type}(x, {tensor}) y = Mul(h, l.bias)"
    tensors = {tensor: array, "l.bias": ZEROS[:1] if op_type == "Conv" else ZEROS}
    x = "float[N,4] x" if array.ndim == 2 else "float[N,4,3] x"
    file = exported(body, tensors, "l.weight l.bias other", folded={"flip": ["l.weight", "val_0"]}, x=x)
    graph, warned = trained_of(with_operations(file, {"h": f"%x, %{weight}, %p_other", "y": "%h, %p_l_bias"}))
    assert reads(graph, op_type.partition("<")[0], 2)[0] == "other"
    assert "no tensor for" not in warned


@pytest.mark.parametrize("calls", [{"h": "%x, %p_l_weight, %p_l_bias"}, {}], ids=["arguments", "names"])
def test_a_bias_of_another_length_is_not_added(calls: dict[str, str]) -> None:
    file = exported("h = Gemm(x, l.weight) y = Add(h, l.bias)", {"l.weight": W, "l.bias": ZEROS[:1]}, "l.weight l.bias")
    graph, _ = trained_of(with_operations(file, calls))
    assert reads(graph, "Gemm", 2) == []


def test_a_bias_that_is_dropped_from_one_product_and_added_to_another() -> None:
    """As of a layer that is called with two axes and with three: an Add keeps its zeros."""
    body = "h = Gemm(x, l.weight) a = MatMul(h, l.weight) y = Add(a, l.bias)"
    file = exported(body, {"l.weight": SQUARE, "l.bias": ZEROS}, "l.weight l.bias", modules=dict.fromkeys("hay", "l"))
    called = "%h, %p_l_weight, %p_l_bias"
    graph, _ = trained_of(with_operations(file, {"h": CALLED["h"], "a": called, "y": called}))
    assert set(graph.parameters) == {"l.weight", "l.bias"}
    assert reads(graph, "Gemm", 2)[0] == "l.bias"


@pytest.mark.parametrize("kept", ["a.in_proj_bias", "b.in_proj_bias"])
def test_a_bias_that_a_node_of_the_optimizer_splits(kept: str) -> None:
    """One attention as self-attention and as cross-attention, beside another: Split says nothing of its module."""
    body = (
        "s = Add(x, KEPT) t, u = Split<num_outputs = 2>(KEPT) v, w = Split<num_outputs = 2>(KEPT) "
        "c = Concat<axis = 0>(t, u) d = Concat<axis = 0>(v, w) e = Add(s, c) f = Add(e, d) y = MatMul(f, m)"
    )
    file = exported(
        body.replace("KEPT", kept),
        {kept: np.zeros(4, np.float32), "m": W.T},
        "a.in_proj_bias b.in_proj_bias m",
        modules={"s": "a", "c": "a", "d": "b"},
        x="float[N,4] x",
    )
    graph, _ = trained_of(with_operations(file, {"s": "%linear, %p_a_in_proj_bias", "c": "%t, %u", "d": "%v, %w"}))
    assert set(graph.parameters) == {"a.in_proj_bias", "b.in_proj_bias", "m"}
    assert reads(graph, "Split", 0)[:2] == ["a.in_proj_bias", "b.in_proj_bias"]
    assert graph.left_out == {}


def test_a_further_call_of_a_module_of_torchscript() -> None:
    """Attention reads the bias of a part of it; a_1 is a further call, and b_1 a module."""
    bias = "a.out_proj.bias"
    w = "a.out_proj.weight"
    body = f"h = Gemm(x, {w}, {bias}) i = Gemm(h, {w}, {bias}) j = Gemm(i, b.v, {bias}) y = Gemm(j, b_1.v, {bias})"
    tensors = {w: SQUARE, "b.v": SQUARE + 1, "b_1.v": SQUARE + 2, bias: ZEROS}
    names = {"h": "/a/Gemm", "i": "/a_1/Gemm", "j": "/b/Gemm", "y": "/b_1/Gemm"}
    graph, warned = trained_of(scripted(body, tensors, names))
    assert set(graph.parameters) == {*tensors, "b.bias", "b_1.bias"}
    assert reads(graph, "Gemm", 2) == [bias, bias, "b.bias", "b_1.bias"]
    assert "a_1.bias" not in warned


def test_a_bias_of_a_module_and_one_of_its_part_are_two() -> None:
    body = "h = Gemm(x, a.v, a.p.bias) y = Gemm(h, a.p.v, a.p.bias)"
    tensors = {"a.v": SQUARE, "a.p.v": SQUARE + 1, "a.p.bias": ZEROS}
    graph, _ = trained_of(scripted(body, tensors, {"h": "/a/Gemm", "y": "/a/p/Gemm"}))
    assert set(graph.parameters) == {*tensors, "a.bias"}


def test_readers_of_a_tensor_are_nodes_that_a_user_can_find() -> None:
    """The old spectral_norm: TorchScript reads the weight itself and what is reshaped of it, which are equal."""
    body = "i = Identity(l.weight) s = MatMul(x, i) t = Div(l.weight, k) y = MatMul(s, t)"
    tensors = {"l.weight": SQUARE, "k": np.float32(2)}
    file = scripted(body, tensors, {"i": "Identity_0", "s": "/MatMul", "t": "/Div", "y": "/l/MatMul"})
    file.graph.node[0].output[0] = file.graph.node[1].input[1] = "onnx::MatMul_9"
    assert "Identity_0" not in trained_of(file)[1]


def test_a_scale_merged_with_the_bias_of_the_same_module() -> None:
    """Both begin with zeros, as in residual blocks; what torch read at each place says which is which."""
    body = "a = LayerNormalization(x, n.bias, n.bias) b = Add(a, x) y = MatMul(b, w)"
    file = exported(body, {"n.bias": ZEROS, "w": SQUARE}, "n.weight n.bias w", modules={"a": "n"})
    graph, warned = trained_of(with_operations(file, {"a": "%x, [3], %p_n_weight, %p_n_bias"}))
    assert set(names_of(graph)) == {"n.weight", "n.bias", "w"}
    assert reads(graph, "LayerNormalization", 1) != reads(graph, "LayerNormalization", 2)
    assert "no tensor for" not in warned


def test_a_computed_matrix_is_no_lost_bias() -> None:
    body = "a = Gemm(x, w, b) c = Tanh(a) y = Gemm(c, w, b)"
    file = exported(body, {"w": np.eye(3, dtype=np.float32), "b": ZEROS}, "w b e")
    calls = {"a": "%x, %p_w, %p_b", "y": "%c, %permute, %p_e"}
    graph, _ = trained_of(with_operations(file, calls, "torch.ops.aten.linear.default"))
    lengths = {name: value.shape for name, value in names_of(graph).items()}
    assert lengths == {"w": (3, 3), "b": (3,), "e": (3,)}
