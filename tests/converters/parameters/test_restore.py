"""Files of torch.export whose optimizer merged, dropped and computed parameters: what a training restores."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.origins import module_of, origin_of
from onnx_backprop.converters.prepare.exporters.torch_metadata import NO_GRADIENT
from tests.support.torch_files import FOLDED, KIND, SCOPES, W, X, exported, names_of, with_operations


def test_equal_biases_of_two_modules_are_two_parameters() -> None:
    """Each gets the gradient that it has by itself: that of the sum, of one tensor, would be another."""
    ones = np.full(4, 0.5, np.float32)
    body = "a = Gemm(x, a.weight, a.bias) b = Gemm(x, b.weight, a.bias) c = Mul(b, b) y = Add(a, c)"
    tensors = {"a.weight": W, "b.weight": W + 1, "a.bias": ones}
    file = exported(body, tensors, "a.weight a.bias b.weight b.bias", modules={"a": "a", "b": "b"}, x="float[N,3] x")
    graph = ob.training_graph(file, loss="mse")
    assert sorted(names_of(graph)) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    outputs = ob.session(graph.model).run(
        [graph.parameters[name] for name in ("a.bias", "b.bias")],
        {"x": X, "target": np.zeros((2, 4), np.float32), **graph.initial_values()},
    )
    a, b = X @ W + ones, X @ (W + 1) + ones
    dy = 2 * (a + b * b) / 8
    np.testing.assert_allclose(np.asarray(outputs[0]), dy.sum(0), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(outputs[1]), (dy * 2 * b).sum(0), rtol=1e-5)


def test_a_constant_that_was_merged_with_a_parameter_is_none() -> None:
    """alpha is zeros, and so is the bias that stands for none in a normalisation."""
    body = "a = InstanceNormalization(x, ones, alpha) b = Mul(a, alpha) c = Add(b, x) y = Conv(c, c.weight)"
    tensors = {"ones": np.ones(2, np.float32), "alpha": np.zeros(2, np.float32), "c.weight": W.reshape(3, 2, 2)}
    file = exported(body, tensors, "alpha c.weight", modules={"a": "norm", "b": ""}, x="float[N,2,5] x")
    # Mul broadcasts along the last axis
    file.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 2
    with pytest.warns(ob.OnnxBackpropWarning, match=r"^14 of the 18 numbers .*'alpha/constant' \(2, constant"):
        graph = ob.training_graph(file, loss="mse")
    assert sorted(names_of(graph)) == ["alpha", "c.weight"]
    assert graph.left_out == {"ones": "constant of the module", "alpha/constant": "constant of the module"}
    reads = [node.input[2] for node in graph.model.graph.node if node.op_type == "InstanceNormalization"]
    assert reads == ["alpha/constant"]


@pytest.mark.parametrize(
    ("body", "weight", "length", "x"),
    [
        ("y = Gemm<transB=1>(x, m.weight)", W.T, 4, "float[N,3] x"),
        ("y = Gemm(x, m.weight)", W, 4, "float[N,3] x"),
        ("y = Conv(x, m.weight)", W.reshape(4, 3, 1), 4, "float[N,3,5] x"),
        ("y = Conv<group=3>(x, m.weight)", W.reshape(6, 1, 2), 6, "float[N,3,5] x"),
        ("y = ConvTranspose<group=3>(x, m.weight)", W.reshape(3, 2, 2), 6, "float[N,3,5] x"),
    ],
)
def test_a_bias_of_zeros_is_there_again(body: str, weight: np.ndarray, length: int, x: str) -> None:
    file = exported(body, {"m.weight": weight}, "m.weight m.bias", modules={"y": "m"}, x=x)
    graph = ob.training_graph(file, loss="mse", optimizer="sgd")
    assert names_of(graph).keys() == {"m.weight", "m.bias"}
    assert names_of(graph)["m.bias"].shape == (length,)
    trainer = ob.Trainer(graph, learning_rate=0.1)
    data = np.ones((2, 3) if "N,3]" in x else (2, 3, 5), np.float32)
    trainer.step(x=data, target=np.zeros_like(ob.session(file).run(None, {"x": data})[0]))
    assert np.abs(trainer.parameters()["m.bias"]).min() > 0


def test_a_product_whose_module_has_no_bias_gets_none() -> None:
    file = exported("y = Gemm(x, m.weight)", {"m.weight": W}, "m.weight", modules={"y": "m"})
    assert list(ob.training_graph(file, loss="mse").parameters) == ["m.weight"]


@pytest.mark.parametrize("frozen", ["a.bias", "b.bias", "c.bias", "val_0"])
def test_what_an_optimizer_dropped_merged_or_folded_of_a_frozen_module_is_frozen(frozen: str) -> None:
    """a.bias is dropped, b.bias merged with c's, d.weight transposed; ob.torch.export lists what is frozen."""
    file = exported(
        "h = Gemm(x, a.weight) k = Add(h, b.bias) l = Mul(k, b.bias) y = MatMul(l, val_0)",
        {"a.weight": W[:, :3], "b.bias": np.ones(3, np.float32), "val_0": W},
        "a.weight a.bias b.bias c.bias d.weight",
        folded={"val_0": ["d.weight"]},
        modules={"h": "a", "k": "b", "l": "c", "y": "d"},
    )
    name = "d.weight" if frozen == "val_0" else frozen
    file.graph.metadata_props.add(key=NO_GRADIENT, value=json.dumps([name, 3]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "18 of the 30 numbers")
        graph = ob.training_graph(file, loss="mse")
    assert graph.left_out == {frozen: "requires no gradient"}
    assert set(graph.parameters) == {"a.weight", "a.bias", "b.bias", "c.bias", "val_0"} - {frozen}
    file.graph.metadata_props[-1].value = "[1"
    assert frozen in ob.training_graph(file, loss="mse").parameters


@pytest.mark.filterwarnings("ignore:.* hold the same numbers and are trained apart")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("body", "operation", "call"),
    [
        ("h = Gemm(x, a.w, a.b) y = Gemm(h, a.w, a.b)", "linear", "%X, %p_M_w, %p_M_b"),
        ("h = Gemm(x, a.w, a.b) y = Gemm(h, a.w, a.b)", "addmm", "%p_M_b, %X, %p_M_w"),
        ("g = MatMul(x, a.w) h = Add(g, a.b) m = MatMul(h, a.w) y = Add(m, a.b)", "linear", "%X, %p_M_w, %p_M_b"),
        ("g = MatMul(x, a.w) h = Add(a.b, g) m = MatMul(h, a.w) y = Add(a.b, m)", "baddbmm", "%p_M_b, %X, %p_M_w"),
        ("h = Conv(x, a.w, a.b) y = Conv(h, a.w, a.b)", "conv1d", "%X, %p_M_w, %p_M_b"),
        ("h = LayerNormalization(x, a.w, a.b) y = LayerNormalization(h, a.w, a.b)", "layer_norm", "%X, %p_M_w, %p_M_b"),
    ],
)
def test_copies_of_a_layer_are_apart(body: str, operation: str, call: str, order: int, inside: bool) -> None:
    """As of a TransformerEncoder, whose weights and biases the exporter has merged with those of the first."""
    weight = {"Laye": W[0, :3], "Conv": W[:, :3, None]}.get(body[4:8], W[:, :3])
    tensors = dict([("a.w", weight), ("a.b", W[2, :3])][::order])
    layers = {node: ("a", "x") if node in "gh" else ("b", "h") for node in "ghmy"}
    modules = {node: layer if inside else "" for node, (layer, _) in layers.items()}
    calls = {node: call.replace("M", layer).replace("X", x) for node, (layer, x) in layers.items()}
    x = "float[N,3,2] x" if weight.ndim == 3 else "float[N,3] x"
    file = exported(body, tensors, "a.w a.b b.w b.b", modules=modules, x=x)
    graph = ob.training_graph(with_operations(file, calls, f"torch.ops.aten.{operation}.default"), loss="mse")
    read = [name for node in graph.model.graph.node for name in node.input if name in graph.parameters]
    assert read[:4] == ["a.w", "a.b", "b.w", "b.b"]


@pytest.mark.parametrize(
    ("sources", "array"),
    [(["g", "v"], W), (["v", "u"], W), (["v", "val_2"], np.zeros_like(W)), (["v", "val_2"], np.vstack([W[:1], W[:2]]))],
)
def test_what_was_computed_from_several_is_doubtful(sources: list[str], array: np.ndarray) -> None:
    file = exported("y = MatMul(x, val_1)", {"val_1": array}, "g v", buffers="u", folded={"val_1": sources})
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == ["val_1"]
    sentence = next(str(w.message) for w in caught if "does not say for sure" in str(w.message))
    assert "'v'" in sentence
    assert "val_1" in sentence
    assert "val_1" in graph.settings["doubtful"]
    assert "? the exporter has computed it" in graph.summary()


@pytest.mark.parametrize(("layers", "more"), [(40, ""), (43, " and 3 more")])
def test_a_long_list_of_doubtful_tensors_says_where_all_are(layers: int, more: str) -> None:
    body = "".join(f"h{n + 1} = MatMul(h{n}, val_{n}) " for n in range(layers)).replace("(h0,", "(x,")
    tensors = {f"val_{n}": np.eye(3, dtype=np.float32) + W[:, :3] * (n + 1) / 99 for n in range(layers)}
    folded = {name: ["g", "v"] for name in tensors}
    file = exported(f"{body} y = Identity(h{layers})", tensors, "g v", folded=folded)
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        graph = ob.training_graph(file, loss="mse")
    sentence = next(str(w.message) for w in caught if "does not say for sure" in str(w.message))
    (doubt,) = {row.doubt for row in graph.rows()}
    assert f"{more} ({doubt})" in sentence
    assert ("explain_gradients lists them all" in sentence) == bool(more)
    assert doubt
    explained = str(ob.explain_gradients(file))
    assert all(name in explained for name in tensors)


def test_parameters_that_are_not_in_the_file_are_named() -> None:
    file = exported(
        "y = Conv(x, c.weight)", {"c.weight": W.reshape(4, 3, 1)}, "c.weight bn.weight bn.bias", x="float[N,3,5] x"
    )
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"no tensor for .*: 'bn\.weight', 'bn\.bias'\. .*ob\.torch\.export"
    ):
        graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == ["c.weight"]
    assert "'bn.weight', 'bn.bias'" in str(ob.explain_gradients(file))


def test_buffers_and_constants_are_not_trained() -> None:
    body = (
        "a = MatMul(x, m.weight) b = Mul(a, gate) c = Pow(b, p) d = Add(c, table) e = Mul(d, half) y = Add(e, frozen)"
    )
    tensors = {"m.weight": W, "gate": np.float32(0), "p": np.float32(3), "table": W[0], "half": np.float32([0.5])}
    file = exported(body, {**tensors, "frozen": W[1]}, "m.weight gate p frozen", buffers="table")
    value = next(value for value in file.graph.value_info if value.name == "frozen")
    value.metadata_props.add(key="onnx_backprop.requires_grad", value="False")
    with pytest.warns(ob.OnnxBackpropWarning, match=r"^14 of the 23 numbers .*'table' \(4, buffer of the module\)"):
        graph = ob.training_graph(file, loss="mse", optimizer="sgd")
    assert set(graph.parameters) == {"m.weight", "gate", "p"}
    kinds = ("buffer of the module", "constant of the module", "requires no gradient")
    assert graph.left_out == dict(zip(("table", "half", "frozen"), kinds, strict=True))
    again = ob.TrainingGraph.load(graph.model)
    assert again.summary() == graph.summary()
    assert set(ob.training_graph(file, loss="mse", trainable=["table", "gate"]).parameters) == {"table", "gate"}


@pytest.mark.parametrize(
    ("name", "scopes", "module"),
    [
        ("/layer1/layer1.0/conv1/Conv", None, "layer1.0.conv1"),
        ("/enc/enc.0/Gemm", None, "enc.0"),
        ("/bert/encoder/layer.0/attention/self/query/MatMul", None, "bert.encoder.layer.0.attention.self.query"),
        ("/MatMul", None, ""),
        ("Gemm_12", None, ""),
        ("", None, ""),
        ("node_linear", ["", "enc", "enc.0", "linear"], "enc.0"),
        ("node_linear", ["", "linear"], ""),
        ("/other/MatMul", [], "other"),
    ],
)
def test_the_module_of_a_node(name: str, scopes: list[str] | None, module: str) -> None:
    node = onnx.helper.make_node("MatMul", ["a", "b"], ["c"], name=name)
    if scopes:
        node.metadata_props.add(key=SCOPES, value=str(scopes))
    assert module_of(node) == module


def test_hostile_metadata() -> None:
    file = exported("y = MatMul(x, w)", {"w": W}, "w")
    for text in ("[[[", "{}", "['a'", json.dumps("x")):
        other = ModelProto()
        other.CopyFrom(file)
        other.graph.node[0].metadata_props.add(key=SCOPES, value=text)
        other.graph.value_info[0].metadata_props.add(key=FOLDED, value=text)
        other.graph.metadata_props.add(key="onnx_backprop.missing", value=text)
        other.graph.metadata_props.add(key="onnx_backprop.separated", value=text)
        assert list(ob.training_graph(other, loss="mse").parameters) == ["w"]
    assert origin_of(file.graph.initializer[0]).kind == ""  # the caller's model is not changed


@pytest.mark.parametrize("name", ["exp", "mul_1", "softplus", "sigmoid_2"])
def test_what_was_computed_from_one_parameter_is_doubtful(name: str) -> None:
    """A scale that a module stores the logarithm of: trained as it stands, it is another parameter."""
    file = exported(f"y = MatMul(x, {name})", {name: W}, "log", folded={name: ["log"]})
    with pytest.warns(
        ob.OnnxBackpropWarning, match=rf"trained are 'log' \({name}\) \(the exporter has computed it from 'log'\)"
    ):
        graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == [name]


def test_a_tensor_that_the_optimizer_has_changed_is_doubtful() -> None:
    """torch writes a kind for each parameter; what has the name of one and no kind was put in its place."""
    tensors = {"c.weight": W.reshape(4, 3, 1), "c.bias": W[0]}
    file = exported("y = Conv(x, c.weight, c.bias)", tensors, "c.weight c.bias", x="float[N,3,5] x")
    del file.graph.value_info[0].metadata_props[:]
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"trained are 'c\.weight' \(the exporter has computed it from 'c\.weight'\)"
    ):
        assert list(ob.training_graph(file, loss="mse").parameters) == ["c.weight", "c.bias"]
    del file.graph.value_info[1].metadata_props[:]  # another tool has dropped all of them: the signature says enough
    assert list(ob.training_graph(file, loss="mse").parameters) == ["c.weight", "c.bias"]


def test_convolutions_that_the_optimizer_merged_are_named_once_for_all() -> None:
    """A reason for each would fill more than the lines that a message may have, and its middle would be left out."""
    names = [f"inner.backbone.stages.blocks.main.point_conv.m{n}.weight" for n in range(43)]
    body = "".join(f"h{n + 1} = Conv(h{n}, {name}, {name}_bias) " for n, name in enumerate(names)).replace(
        "(h0,", "(x,"
    )
    tensors = {}
    for n, name in enumerate(names):
        tensors |= {name: W[:, :3].reshape(3, 3, 1) + n, f"{name}_bias": W[0, :3] + n}
    whole = tensors | {"head.scale": W[:, :1]}
    file = exported(f"{body} y = Mul(h43, head.scale)", whole, f"{' '.join(names)} head.scale", x="float[N,3,5] x")
    for value in file.graph.value_info:
        if value.name in tensors:
            del value.metadata_props[:]
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        graph = ob.training_graph(file, loss="mse")
    sentence = next(str(w.message) for w in caught if "does not say for sure" in str(w.message))
    assert "…" not in sentence.partition(" frozen=")[0]
    assert " and 46 more (the exporter has merged a convolution with what follows it" in sentence
    assert all(repr(name) in sentence for name in list(tensors)[:40])
    assert {row.doubt for row in graph.rows()} != {""}


def test_normalisations_that_share_ones_and_zeros_have_their_own() -> None:
    body = "a = LayerNormalization(x, n.weight, n.bias) b = LayerNormalization(a, n.weight, n.bias) y = MatMul(b, w)"
    tensors = {"n.weight": np.ones(3, np.float32), "n.bias": np.zeros(3, np.float32), "w": W}
    file = exported(body, tensors, "n.weight n.bias l.weight l.bias w", modules={"a": "n", "b": "l"})
    graph = ob.training_graph(file, loss="mse")
    assert set(graph.parameters) == {"n.weight", "n.bias", "l.weight", "l.bias", "w"}
    reads = {node.input[2] for node in graph.model.graph.node if node.op_type == "LayerNormalization"}
    assert reads == {"n.bias", "l.bias"}


def test_a_tensor_of_its_own_numbers_is_no_other_of_the_module() -> None:
    """The buffer of a module inside, which nothing reads any more, was not merged with a weight that it reads twice."""
    file = exported(
        "a = MatMul(x, p.w) b = MatMul(x, p.w) y = Mul(a, b)",
        {"p.w": W},
        "p.w",
        buffers="p.n.u",
        modules={"a": "p.n", "b": "p.n"},
    )
    assert list(ob.training_graph(file, loss="mse").parameters) == ["p.w"]


def test_tensors_that_are_inputs_too_are_no_batches() -> None:
    """Three rows of zeros beside a weight of three rows: as files of older IR versions list their tensors."""
    file = exported(
        "c = Add(expand, x) y = MatMul(c, fc.weight)",
        {"expand": np.zeros((3, 1, 3), np.float32), "fc.weight": W},
        "e.rows fc.weight",
        folded={"expand": ["e.rows", "val_6"]},
        modules={"c": "e"},
        x="float[1,4,3] x",
    )
    file.graph.input.append(onnx.helper.make_tensor_value_info("fc.weight", onnx.TensorProto.FLOAT, W.shape))
    with pytest.warns(ob.OnnxBackpropWarning, match="expand"):
        graph = ob.training_graph(file, loss="mse")
    assert {value.shape for name, value in names_of(graph).items() if "fc" not in name} == {(3, 1, 3)}


def test_the_ones_of_a_group_normalisation_are_no_scale_of_its_module() -> None:
    """InstanceNormalization of the groups, with an activation's scale that was merged with its ones, then the scales."""
    file = exported(
        "n = InstanceNormalization(x, act.scale, zero) a = Mul(n, val_1) b = Mul(a, act.scale)"
        "m = InstanceNormalization(b, act.scale, zero) y = Mul(m, val_1)",
        {"act.scale": np.ones(1, np.float32), "zero": np.zeros(1, np.float32), "val_1": np.ones(32, np.float32)},
        "act.scale norm1.weight norm2.weight",
        folded={"val_1": ["norm1.weight"]},
        modules={"n": "norm1", "a": "norm1", "b": "act", "m": "norm2", "y": "norm2"},
        x="float[N,1,32] x",
    )
    with_operations(
        file, {"n": "%x, 1, %p_norm1_weight", "a": "%x, 1, %p_norm1_weight"}, "torch.ops.aten.group_norm.default"
    )
    with_operations(
        file, {"m": "%b, 1, %p_norm2_weight", "y": "%b, 1, %p_norm2_weight"}, "torch.ops.aten.group_norm.default"
    )
    graph = ob.training_graph(file, loss="mse")
    shapes = {name: value.shape for name, value in names_of(graph).items()}
    assert shapes == {"act.scale": (1,), "norm1.weight": (32,), "norm2.weight": (32,)}
    assert graph.left_out["act.scale/constant"] == "constant of the module"


def test_copies_of_a_folded_tensor_are_folded_too() -> None:
    """Gemma's 1 + weight: neither tensor is the parameter, and both are named."""
    file = exported(
        "a = Mul(x, add_4) b = Mul(a, add_4) y = MatMul(b, fc.weight)",
        {"add_4": np.ones(3, np.float32), "fc.weight": W},
        "n.weight m.weight fc.weight",
        folded={"add_4": ["n.weight", "val_3"]},
        modules={"a": "n", "b": "m"},
    )
    with pytest.warns(ob.OnnxBackpropWarning, match=r"from 'n\.weight'\).*from 'm\.weight'\)"):
        graph = ob.training_graph(file, loss="mse")
    assert sorted(names_of(graph)) == ["fc.weight", "m.weight", "n.weight"]


def test_a_file_all_of_whose_tensors_were_changed() -> None:
    """A bias-free network whose normalisations are folded: its inputs alone still have a kind."""
    file = exported("y = Conv(x, c.weight)", {"c.weight": W.reshape(4, 3, 1)}, "c.weight n.weight", x="float[N,3,5] x")
    del file.graph.value_info[0].metadata_props[:]
    file.graph.input[0].metadata_props.add(key=KIND, value="USER_INPUT")
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        ob.training_graph(file, loss="mse")
    messages = " ".join(str(warning.message) for warning in caught)
    assert "trained are 'c.weight' (the exporter has computed it" in messages
    assert "no tensor for these parameters of the module: 'n.weight'" in messages


def test_what_was_folded_says_nothing_of_the_rest_of_a_file_without_signature() -> None:
    """Quantisers keep the metadata of values and drop the signature: no tensor is a constant because of that."""
    body = "a = MatMul(x, val_0) b = Add(a, fc.bias) y = LayerNormalization(b, norm.weight, norm.bias)"
    tensors = {"val_0": W, "fc.bias": W[0], "norm.weight": W[1], "norm.bias": W[2]}
    file = exported(body, tensors, "", folded={"val_0": ["fc.weight"]})
    del file.graph.metadata_props[:]
    file.graph.input[0].metadata_props.add(key=KIND, value="USER_INPUT")
    graph = ob.training_graph(file, loss="mse")
    assert names_of(graph).keys() == {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}
    assert not graph.left_out


@pytest.mark.parametrize(("operand", "trained"), [("ones", False), ("full_like_2", False), ("reciprocal", True)])
def test_constants_that_torch_merged_with_a_parameter(operand: str, trained: bool) -> None:
    """Ones that the forward pass fills are a constant; what it computes may come from the parameter, and is doubtful."""
    file = exported("a = Mul(x, s) y = Mul(a, s)", {"s": np.ones(3, np.float32)}, "s")
    file = with_operations(file, {"a": "%x, %p_s", "y": f"%a, %{operand}"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(file, loss="mse")
    assert set(graph.parameters) == {"s", *(["s/computed"] if trained else [])}
    messages = "\n".join(str(w.message) for w in caught)
    assert ("'s/computed' (the exporter has computed it)" in messages) is trained
    assert "trained as one" not in messages


def test_freezing_one_factor_of_a_computed_tensor_is_reported() -> None:
    """As LoRA by hand, W + BA, whose W is frozen."""
    file = exported(
        "h = MatMul(x, add) y = MatMul(h, o)",
        {"add": W, "o": W.T.copy()},
        "w a1 b1 o",
        folded={"add": ["w", "a1", "b1"]},
    )
    for frozen, want in ((["w"], True), (["w", "[ab]1"], False), (["[wab]*"], False), (["add"], False), (["o"], False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph = ob.training_graph(file, loss="mse", frozen=frozen)
        assert list(graph.parameters) == (["add"] if frozen == ["o"] else ["o"]), frozen
        warned = any(
            "frozen too, though no pattern names them, are 'a1', 'b1' in 'add'" in str(w.message) for w in caught
        )
        assert warned is want, frozen
