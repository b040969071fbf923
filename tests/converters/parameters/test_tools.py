"""Files that a tool has changed behind the exporter: equal biases merged, heads untied, names and lengths of its own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx.numpy_helper import from_array

import onnx_backprop as ob
from tests.converters.parameters.test_torchscript import graph_and_warnings
from tests.support.torch_files import W, exported, scripted, with_operations

RNG = np.random.default_rng(3)
M = RNG.standard_normal((3, 3)).astype(np.float32)
N = RNG.standard_normal((3, 3)).astype(np.float32)
ZEROS = np.zeros(3, np.float32)


def renamed(file: ModelProto, names: dict[str, str]) -> ModelProto:
    for node in file.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in file.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    return file


@pytest.mark.parametrize(
    ("first", "second", "bias", "apart"),
    [
        ("a.weight", "b.weight", "a.bias", True),  # of another module, by the weight's name
        ("onnx::MatMul_7", "onnx::MatMul_8", "a.bias", True),  # one product has one bias
        ("val_32_weight", "val_66_weight", "norm.bias", True),
        ("a.first", "a.second", "a.bias", False),  # of one module
        ("onnx::MatMul_7", "onnx::MatMul_8", "bias", False),  # of the module that has both products
    ],
)
@pytest.mark.parametrize("gemm", [True, False])
def test_equal_biases_that_a_tool_has_merged(first: str, second: str, bias: str, apart: bool, gemm: bool) -> None:
    one = "Gemm(x, u, c)" if gemm else "Add(h, c)"
    two = "Gemm(t, v, c)" if gemm else "Add(k, c)"
    products = "" if gemm else "h = MatMul(x, u) "
    more = "" if gemm else "k = MatMul(t, v) "
    file = scripted(f"{products}a = {one} t = Tanh(a) {more}y = {two}", {"u": M, "v": N, "c": ZEROS})
    graph, warned = graph_and_warnings(renamed(file, {"u": first, "v": second, "c": bias}))
    assert len(graph.parameters) == 4 if apart else 3
    assert bias in graph.parameters
    assert ("They are trained apart" in warned) is apart
    if apart and second == "b.weight":
        assert "b.bias" in graph.parameters


DICT = "a = Gemm(x, m.p.weight, m.p.bias) t = Tanh(a) b = Gemm(t, m.q.weight, m.p.bias) y = Gemm(b, p.weight, m.p.bias)"


def test_the_name_of_a_merged_bias_is_beside_the_weight() -> None:
    """A ModuleDict is not in the names of the nodes, and what it has is called as a module outside may be."""
    tensors = {"m.p.weight": M, "m.q.weight": N, "m.p.bias": ZEROS, "p.weight": M @ N}
    file = scripted(DICT, tensors, {"a": "/e/p/Gemm", "b": "/e/q/Gemm", "y": "/p/Gemm"})
    graph, _ = graph_and_warnings(renamed(file, {name: f"e.{name}" for name in tensors if name.startswith("m.")}))
    assert set(graph.parameters) == {"p.weight", "p.bias"} | {
        f"e.m.{module}.{leaf}" for module in "pq" for leaf in ("weight", "bias")
    }


def test_the_name_of_a_transposed_weight_is_beside_the_bias() -> None:
    body = "h = MatMul(x, u) a = Add(h, c) k = MatMul(a, v) b = Add(k, d) l = MatMul(b, w) y = Add(l, c)"
    places = {"h": "q/MatMul", "a": "q/Add", "k": "r/MatMul", "b": "r/Add"}
    names = {value: f"/e/{place}" for value, place in places.items()} | {"l": "/q/MatMul", "y": "/q/Add"}
    file = scripted(body, {"u": M, "v": N, "w": M @ N, "c": ZEROS}, names)
    file.graph.node.insert(0, helper.make_node("Identity", ["c"], ["d"]))
    weights = {"u": "onnx::MatMul_7", "v": "onnx::MatMul_8", "w": "onnx::MatMul_9"}
    graph, _ = graph_and_warnings(renamed(file, {**weights, "c": "e.m.q.bias", "d": "e.m.r.bias"}))
    names = {row.name: row.module for row in graph.rows()}
    assert [names[name] for name in weights.values()] == ["e.m.q.weight", "e.m.r.weight", "q.weight"]
    assert "q.bias" in graph.parameters


def test_biases_of_other_numbers_stay_one() -> None:
    file = scripted("a = Gemm(x, u, c) t = Tanh(a) y = Gemm(t, v, c)", {"u": M, "v": N, "c": M[0]})
    graph, warned = graph_and_warnings(renamed(file, {"u": "a.weight", "v": "b.weight", "c": "a.bias"}))
    assert set(graph.parameters) == {"a.weight", "b.weight", "a.bias"}
    assert "'a.bias'" in warned


@pytest.mark.filterwarnings("ignore:the file has one tensor, or one and its transposed copy")
@pytest.mark.parametrize("head", ["onnx::MatMul_23", "t_1"])
def test_a_head_whose_weight_the_exporter_has_transposed_is_tied(head: str) -> None:
    """The gradient of the table is that of both readers."""
    table = RNG.standard_normal((6, 4)).astype(np.float32)
    file = scripted("e = Gather(table, ids) h = Tanh(e) y = MatMul(h, head)", {"table": table, "head": table.T.copy()})
    file.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, [2]))
    for node in file.graph.node:
        node.name = f"node_{node.op_type}"
    graph, warned = graph_and_warnings(renamed(file, {"table": "e.weight", "head": head}))
    assert list(graph.parameters) == ["e.weight"]
    assert f"'e.weight' and '{head}'. It is trained as one" in warned
    trainer = ob.Trainer(ob.training_graph(file, loss="mse", optimizer="sgd"), learning_rate=1.0)
    ids, w = np.array([1, 4]), table.astype(np.float64)
    trainer.step(ids=ids, target=np.zeros((2, 6), np.float32))
    h = np.tanh(w[ids])
    dy = 2 * h @ w.T / 12
    gradient = dy.T @ h
    gradient[ids] += dy @ w * (1 - h**2)
    np.testing.assert_allclose(table - trainer.parameters()["e.weight"], gradient, rtol=1e-4, atol=1e-6)


def test_a_transposed_copy_that_is_no_embedding_stays_apart() -> None:
    """Of two networks that begin with the same numbers."""
    file = scripted("a = Gemm<transB=1>(x, u) t = Tanh(a) y = MatMul(t, v)", {"u": M, "v": M.T.copy()})
    graph, _ = graph_and_warnings(renamed(file, {"u": "actor.weight", "v": "onnx::MatMul_9"}))
    assert set(graph.parameters) == {"actor.weight", "onnx::MatMul_9"}


def test_an_embedding_and_a_head_that_begin_as_the_identity_are_two() -> None:
    table = np.eye(6, dtype=np.float32)
    file = scripted("e = Gather(table, ids) h = Tanh(e) y = MatMul(h, head)", {"table": table, "head": table})
    file.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, [2]))
    graph, _ = graph_and_warnings(renamed(file, {"table": "e.weight", "head": "onnx::MatMul_23"}))
    assert set(graph.parameters) == {"e.weight", "onnx::MatMul_23"}


@pytest.mark.filterwarnings("ignore:the file does not say for sure")
def test_lengths_that_onnxruntime_has_written_beside_a_gemm() -> None:
    """It writes tensors of these names again, beside the gradient's products, and did not load both."""
    body = "r = Reshape(x, before) g = Gemm(r, u, c) s = Reshape(g, after) m = MatMul(s, v) y = Add(m, d)"
    lengths = {"before": np.array([-1, 3]), "after": np.array([2, 1, 3])}
    file = scripted(body, {"u": M, "v": N, "c": M[0], "d": M[1]})
    file.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3]))
    file.graph.initializer.extend(from_array(a, n) for n, a in lengths.items())
    names = {"before": "gemm_input_shape", "after": "gemm_output_shape_token_3"}
    graph = ob.training_graph(renamed(file, names), loss="mse", optimizer="sgd")
    assert not any("gemm_" in t.name and not t.name.startswith("optimised/") for t in graph.model.graph.initializer)
    trainer = ob.Trainer(graph, learning_rate=1e-3)
    x = np.ones((2, 1, 3), np.float32)
    assert trainer.step(x=x, target=x) > trainer.step(x=x, target=x)


@pytest.mark.parametrize(("scale", "left_out"), [(2.0, True), (1.7, False)])
def test_the_root_of_the_width_that_scales_an_embedding(scale: float, left_out: bool) -> None:
    table = RNG.standard_normal((6, 4)).astype(np.float32)
    tensors = {"table": table, "s": np.float32(scale)}
    file = scripted("e = Gather(table, ids) y = Mul(e, s)", tensors)
    file.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, [2]))
    graph, warned = graph_and_warnings(renamed(file, {"table": "m.embed.weight", "s": "m.embed.embed_scale"}))
    assert ("m.embed.embed_scale" in graph.left_out) is left_out
    assert "m.embed.embed_scale" in warned or not left_out


@pytest.mark.parametrize(("name", "warned"), [("/a/Transpose_6_output_0", True), ("onnx::MatMul_9", False)])
def test_a_batch_of_matrices_that_a_tool_has_computed_is_doubtful(name: str, warned: bool) -> None:
    file = scripted("y = MatMul(x, u)", {"u": RNG.standard_normal((2, 3, 3)).astype(np.float32)}, {"y": "/a/MatMul"})
    _, text = graph_and_warnings(renamed(file, {"u": name}))
    assert ("the exporter has computed it" in text) is warned


@pytest.mark.parametrize(
    ("share", "warned"),
    [(", None, 1, -100, 0.1", True), (", None, 1, -100, 0.0", False), (", None, 1, -100, 1.0.1", False), ("", False)],
)
def test_label_smoothing_that_the_exporter_has_left_out(share: str, warned: bool) -> None:
    file = exported("a = MatMul(x, w) y = SoftmaxCrossEntropyLoss(a, t)", {"w": W}, "w")
    file.graph.input.append(helper.make_tensor_value_info("t", TensorProto.INT64, ["N"]))
    file.graph.node[1].name = "y"
    file = with_operations(file, {"y": f"%a, %t{share}"}, "torch.ops.aten.cross_entropy_loss.default")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(file, loss=None)
    assert any("left out label_smoothing of 'y' (0.1)" in str(w.message) for w in caught) is warned


@pytest.mark.parametrize(
    ("nodes", "warned"),
    [
        ({"a": "Gemm_7", "y": "Gemm_9"}, True),
        ({"a": "/a/Gemm", "t": "/Tanh", "y": "/b/Gemm"}, False),  # as TorchScript writes it
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_biases_that_a_tool_may_have_taken_away(nodes: dict[str, str], warned: bool, bias: bool) -> None:
    body = f"a = Gemm(x, u) t = Tanh(a) y = Gemm(t, v{', c' if bias else ''})"
    file = scripted(body, {"u": M, "v": N, **({"c": M[0]} if bias else {})}, nodes)
    _, text = graph_and_warnings(renamed(file, {"u": "a.weight", "v": "b.weight", "c": "b.bias"}))
    assert ("no bias for 'a.weight'. " in text) is (warned and bias)


def test_a_bias_that_is_frozen_is_there() -> None:
    body = "h = MatMul(x, u) a = Add(h, d) t = Tanh(a) y = Gemm(t, v, c)"
    file = scripted(body, {"u": M, "d": M[1], "v": N, "c": M[0]}, {"h": "MatMul_7", "y": "Gemm_9"})
    file = renamed(file, {"u": "a.weight", "d": "a.bias", "v": "b.weight", "c": "b.bias"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(file, loss="mse", frozen=["a.bias"])
    assert not any("no bias" in str(w.message) for w in caught)


@pytest.mark.parametrize("lengths", ["_v_3", "/n/Constant_output_0"])
def test_a_group_norm_whose_ones_and_zeros_a_tool_has_taken_away(lengths: str) -> None:
    body = "a = Gemm(x, u, c) r = Reshape(a, one) n = InstanceNormalization(r, s, b) y = Reshape(n, two)"
    file = scripted(body, {"u": M, "c": M[0], "s": np.ones(1, np.float32), "b": ZEROS[:1]}, {"n": "/h/n/Instance"})
    file.graph.initializer.extend([from_array(np.array([2, 1, 3]), "one"), from_array(np.array([2, 3]), "two")])
    file.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]))
    file.graph.node[0].name = "/a/Gemm"
    names = {"u": "a.weight", "c": "a.bias", "s": "/h/n/Constant_1_output_0", "b": "/h/n/Constant_2_output_0"}
    _, text = graph_and_warnings(renamed(file, {**names, "one": lengths}))
    assert ("no bias for the normalisation of 'h.n'. " in text) is lengths.startswith("_v")


@pytest.mark.parametrize(("shape", "warned"), [((3, 2), True), ((3, 1), False)])
def test_a_weight_by_which_elements_are_multiplied_is_doubtful(shape: tuple[int, int], warned: bool) -> None:
    """As of a piecewise linear encoding, whose module has it as a buffer, or of an embedding of numbers, which trains it."""
    w = RNG.standard_normal(shape).astype(np.float32)
    file = scripted("u = Unsqueeze(x, last) y = Mul(u, w)", {"w": w})
    file.graph.initializer.append(from_array(np.array([-1]), "last"))
    graph, text = graph_and_warnings(renamed(file, {"w": "encoding.weight"}))
    assert list(graph.parameters) == ["encoding.weight"]
    assert ("'encoding.weight' (it is multiplied element by element" in text) is warned


def test_weights_that_a_tool_has_made_constants() -> None:
    """TorchScript's own Constants have names of their own."""
    file = scripted("h = MatMul(x, w) a = Add(h, b) y = Mul(a, k)", {"w": M, "b": M[0], "k": M[1]}, {"h": "/l/MatMul"})
    file = renamed(file, {"w": "onnx::MatMul_7", "b": "l.bias", "k": "/Constant_output_0"})
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in file.graph.initializer]
    nodes = [*constants, *file.graph.node]
    del file.graph.initializer[:], file.graph.node[:]
    file.graph.node.extend(nodes)
    graph, _ = graph_and_warnings(file)
    assert set(graph.parameters) == {"onnx::MatMul_7", "l.bias"}
    assert graph.left_out == {"/Constant_output_0": "constant of the module"}


@pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")
def test_a_file_of_torch_export_all_of_whose_tensors_were_renamed() -> None:
    """Its metadata names none of them."""
    file = exported("h = MatMul(x, w) a = Add(h, b) y = Pow(a, e)", {"w": M, "b": M[0], "e": np.float32(2.0)}, "w b")
    del file.graph.value_info[:]
    graph, _ = graph_and_warnings(renamed(file, {"w": "a1", "b": "a2", "e": "a3"}))
    assert set(graph.parameters) == {"a1", "a2"}


@pytest.mark.parametrize(
    ("body", "name", "doubtful"),
    [
        ("h = MatMul(x, w) a = Add(h, c) y = Add(a, name)", "gate.bias", True),
        ("a = Gemm(x, w, c) y = Add(a, name)", "correction_bias", True),
        ("h = MatMul(x, w) a = Add(h, name) t = Tanh(a) y = Gemm(t, w, c)", "l.bias", False),
    ],
)
def test_a_second_bias(body: str, name: str, doubtful: bool) -> None:
    """It may be a buffer, as what corrects the choice of experts."""
    file = scripted(body, {"w": M, "c": M[0], "name": M[1]})
    graph, warned = graph_and_warnings(renamed(file, {"w": "l.weight", "c": "o.bias", "name": name}))
    assert set(graph.parameters) == {"l.weight", "o.bias", name}
    assert (f"'{name}' (it is added to a product that has a bias; the file calls it neither" in warned) is doubtful


def test_numbers_that_converters_write() -> None:
    """skl2onnx's centre and scale of an input, jax2onnx's term of a Gemm with beta = 0."""
    body = "h = Mul(x, s) a = Add(h, t) p = Gemm<beta = 0.0>(a, u, z) y = Gemm(p, v, c)"
    tensors = {"s": M[0], "t": M[1], "u": M, "v": N, "c": M[2], "z": np.float32(0)}
    file = scripted(body, tensors)
    file.producer_name = "any"
    graph, _ = graph_and_warnings(renamed(file, {"s": "Mu_Mulcst", "t": "Ad_Addcst", "z": "dot_bias_0"}))
    assert set(graph.parameters) == {"u", "v", "c"}
    assert graph.left_out["Ad_Addcst"] == graph.left_out["Mu_Mulcst"] == "statistic of an input"
    assert graph.left_out["dot_bias_0"] == "term times 0 of Gemm"


def test_no_number_of_the_code_is_trained_in_the_place_of_trees() -> None:
    """LightGBM's converter writes 1 - p."""
    file = scripted("p = Sigmoid(x) y = Sub(one, p)", {"one": np.float32(1)})
    file.producer_name = "any"
    with pytest.raises(ob.InvalidArgumentError, match="'one'"):
        ob.training_graph(file, loss="mse")


def test_names_that_paddle_gives() -> None:
    """A parameter is layer_0.w_0, however few numbers it has; what the code or a buffer has is generated_tensor_0."""
    file = scripted("h = Gemm(x, u, c) g = Mul(h, a) y = Add(g, b)", {"u": M, "c": M[0], "a": M[0, :1], "b": M[1]})
    file.producer_name = "any"
    names = {"u": "linear_0.w_0", "c": "linear_0.b_0", "a": "gate_0.w_0", "b": "generated_tensor_0"}
    graph, warned = graph_and_warnings(renamed(file, names))
    assert set(graph.parameters) == {"linear_0.w_0", "linear_0.b_0", "gate_0.w_0"}
    assert "trained are 'gate_0.w_0' (it is a single number" in warned
    assert "left out are 'generated_tensor_0' (Paddle gives such names to tensors that are no parameters)" in warned


@pytest.mark.parametrize(
    "names",
    [
        ("node_mul", "node_mul_1"),
        ("node_mul_1", "node_mul_3"),
        ("mul_1", "mul_3"),
        ("node_mul", f"node_mul_{'9' * 5000}"),
    ],
)
def test_operations_that_a_tool_has_taken_out(names: tuple[str, str]) -> None:
    """x · 1 and exp(-s) · l leave a gap in the numbers that torch gives its operations."""
    file = scripted("h = Gemm(x, u, c) a = Mul(h, h) y = Mul(a, h)", {"u": M, "c": M[0]})
    for node, name in zip(file.graph.node[1:], names, strict=True):
        node.name = name
    warned = graph_and_warnings(renamed(file, {"u": "l.weight", "c": "l.bias"}))[1]
    assert ("lacks operations of the module: 'mul', 'mul_2'. The exporter or a tool has" in warned) is (
        names[0] == "node_mul_1"
    )
    warned = graph_and_warnings(renamed(file, {"l.weight": "mul", "l.bias": "mul_2"}))[1]
    assert "lacks operations" not in warned


@pytest.mark.parametrize(
    ("values", "nodes", "names", "rest"),
    [
        (
            "/Add_output_0, gamma, l.running_var, onnx::Mul_3, scale, w",
            "Add (/Add)",
            ["'gamma'", "'scale'"],
            "",
        ),  # TorchScript
        ("gamma, group_norm, l.scale, mul", "Add (node_group_norm)", ["'gamma'", "'l.scale'"], ""),  # torch.export
        (
            "gelu, l.scale, ... (+3 more)",
            "Add (node_add), ... (+2 more)",
            ["'l.scale'"],
            "values that it does not name (3)",
        ),
        ("val_1", "Add (node_add)", [], ""),
    ],
)
def test_parameters_removed_by_onnxsim_are_named(values: str, nodes: str, names: list[str], rest: str) -> None:
    """It writes the names into the file, 20 at most."""
    scripts = values.startswith("/")
    file = scripted("h = MatMul(x, w) y = Relu(h)", {"w": W}, {"h": "/l/MatMul" if scripts else "node_linear"})
    for key, text in (("onnxsim.removed_values", values), ("onnxsim.removed_nodes", nodes)):
        file.metadata_props.add(key=key, value=text)
    warned = graph_and_warnings(file)[1]
    listed = " and ".join(filter(None, (", ".join(names), rest)))
    assert f"onnxsim has removed {listed}. " in warned if listed else "onnxsim" not in warned
