"""Files of TorchScript: names say what is trained, and merged tensors are apart again."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.opset.graphs.edit import assign
from tests.support.torch_files import W, exported, scripted


def check_first_loss(file: ModelProto) -> None:
    """The first loss of a training is that of the file."""
    x, target = np.float32([[0.1, 0.2, 0.3]]), np.zeros((1, 4), np.float32)
    y = np.asarray(ob.session(file).run(None, {"x": x})[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = ob.Trainer(ob.training_graph(file, loss="mse", optimizer="sgd"), learning_rate=0.1)
    np.testing.assert_allclose(trainer.step(x=x, target=target), np.square(y).mean(), rtol=1e-4)


def graph_and_warnings(file: ModelProto) -> tuple[ob.TrainingGraph, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(file, loss="mse")
    return graph, "\n".join(str(w.message) for w in caught)


def test_torchscript_says_names() -> None:
    """Weights and biases are sure; a gate and a filter are guesses, which a warning names; a Constant is none."""
    body = (
        "h = MatMul(x, l.weight) a = Add(h, l.bias) g = Mul(a, gate) k = Constant<value = float[4] {1.0, 1.0, 1.0, 1.0}>() "
        "c = Mul(g, k) y = Mul(c, blur)"
    )
    tensors = {"l.weight": W, "l.bias": W[0], "gate": np.float32([0.0]), "blur": W[1]}
    graph, warned = graph_and_warnings(scripted(body, tensors))
    assert set(graph.parameters) == {"l.weight", "l.bias", "gate"}
    assert graph.left_out == {"k": "constant of the module", "blur": "buffer, by its name"}
    assert "trained are 'gate'" in warned
    assert "left out are 'blur'" in warned
    assert "l.weight" not in warned.split("numbers of the file")[0]


@pytest.mark.parametrize(
    ("kept", "other", "array", "apart"),
    [
        ("a.bias", "b.bias", np.zeros(4, np.float32), True),  # equal before any training
        ("layer0.bias", "layer1.bias", W[0], True),  # copies of one layer
        ("emb.bias", "head.bias", W[0], False),  # one parameter of two modules
    ],
)
def test_what_torchscript_merged(kept: str, other: str, array: np.ndarray, apart: bool) -> None:
    body = f"n__b = Identity({kept}) h = MatMul(x, w) a = Add(h, {kept}) y = Add(a, n.b)"
    file = scripted(body, {"w": W, kept: array})
    for node in file.graph.node:
        for names in (node.input, node.output):
            assign(names, [other if name == "n.b" else name for name in names])
    graph, warned = graph_and_warnings(file)
    assert (other in graph.parameters) is apart
    assert f"'{kept}' and '{other}'" in warned
    assert ("They are trained apart" in warned) is apart
    assert ("It is trained as one" in warned) is not apart


def test_names_of_transposed_weights_that_torchscript_merged() -> None:
    """The Identity that stands for the other weight comes first, and is in no module."""
    kept, other = "onnx::MatMul_7", "onnx::MatMul_9"
    names = {"other": "Identity_3", "a": "/net/net.0/MatMul", "y": "/net/net.1/MatMul"}
    file = scripted("other = Identity(kept) a = MatMul(x, kept) y = MatMul(a, other)", {kept: W[:, :3]}, names)
    for node in file.graph.node:
        for listed in (node.input, node.output):
            assign(listed, [{"kept": kept, "other": other}.get(name, name) for name in listed])
    for pattern, chosen in (("net.0.*", kept), ("net.1.*", other), ("net.1.weight", other)):
        assert list(ob.training_graph(file, loss="mse", trainable=[pattern]).parameters) == [chosen]


def test_a_stop_is_no_merged_tensor() -> None:
    file = scripted(
        "s = Identity(a.bias) h = MatMul(x, w) a = Add(h, a.bias) y = Add(a, s)",
        {"w": W, "a.bias": np.zeros(4, np.float32)},
    )
    file.graph.node[0].metadata_props.add(key="onnx_backprop.stop", value="")
    assert set(graph_and_warnings(file)[0].parameters) == {"w", "a.bias"}


@pytest.mark.parametrize(
    ("name", "array", "trained"),
    [
        ("dw.weight", np.eye(4, dtype=np.float32), True),
        ("pe", np.ones((3, 4), np.float32), False),
        ("model.time_constant", np.float32([0.3, 0.2, 0.1, 0.7]), True),
        ("logits_bias", np.zeros((1, 4), np.float32), True),
        ("decoder.mask_token", np.float32([0.3, 0.2, 0.1, 0.7]), True),
        ("decoder.token_mask", np.float32([0.3, 0.2, 0.1, 0.7]), False),
        ("policy.log_std", np.float32([0.3, 0.2, 0.1, 0.7]), True),
    ],
)
def test_names_of_torchscript_before_numbers(name: str, array: np.ndarray, trained: bool) -> None:
    file = scripted(
        "h = MatMul(x, w) y = MatMul(h, t)" if array.shape == (4, 4) else "h = MatMul(x, w) y = Add(h, t)",
        {"w": W, "t": array},
    )
    file.graph.initializer[1].name = file.graph.node[1].input[1] = name
    if array.shape[0] == 3:
        file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    graph, warned = graph_and_warnings(file)
    assert (name in graph.parameters) is trained
    assert name in warned or name in ("dw.weight", "decoder.mask_token")


@pytest.mark.parametrize(
    ("weight", "bias", "merged"),
    [
        ("conv1.weight", "conv1.weight_bias", True),  # torch's rewriter
        ("y_weight", "y_bias", True),  # onnxslim, after the output y
        ("ConvBnFusion_W_conv1.weight", "ConvBnFusion_BN_B_bn1.bias", True),  # onnxruntime
        ("ConvMulFusion_W_fc.weight", "fc.bias", True),
        ("linear_1_weight_fused", "linear_1_bias_fused", True),  # onnxslim, of a Gemm and a Mul
        ("val_5_weight", "linear_1_bias_fused", True),  # and an Add
        ("conv1.weight", "conv1.bias", False),
        ("conv1_weight", "conv1_bias", False),
    ],
)
def test_convolutions_that_a_tool_has_merged(weight: str, bias: str, merged: bool) -> None:
    """Both tensors are trained, and a warning names them where their names are those of a merged convolution."""
    graph, warned = graph_and_warnings(convolution(weight, bias))
    assert set(graph.parameters) == {weight, bias}
    for name in (weight, bias):
        assert (f"'{name}'" in warned) is merged
    assert ("a product has been merged with what follows it" in warned) is merged


def test_a_convolution_that_torch_has_merged_and_whose_bias_is_gone() -> None:
    """The metadata is gone too, as after onnxruntime's optimizer: the output has the name of BatchNormalization's."""
    for output, merged in (("getitem", True), ("getitem_3", True), ("node_Conv_8/Conv", True), ("conv2d", False)):
        file = convolution("conv1.weight", "conv1.bias")
        node = file.graph.node[0]
        del node.input[2:], file.graph.initializer[1:]
        node.output[0] = file.graph.output[0].name = output
        graph, warned = graph_and_warnings(file)
        assert set(graph.parameters) == {"conv1.weight"}
        assert ("'conv1.weight' (by its name, a product has been merged" in warned) is merged


def test_a_folded_bias_that_copies_another_is_called_merged() -> None:
    """TorchScript keeps one tensor of zeros, and hands it on under the name of what it has computed."""
    file = convolution("n.weight", "n.bias")
    file.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros(4, np.float32), "n.bias"))
    merged = numpy_helper.from_array(np.float32(np.arange(16)).reshape(4, 4, 1, 1) ** 0.5, "onnx::Conv_8")
    file.graph.initializer.append(merged)
    file.graph.node[0].output[0] = "h"
    nodes = helper.make_node("Identity", ["n.bias"], ["onnx::Conv_9"]), file.graph.node[0]
    last = helper.make_node("Conv", ["h", "onnx::Conv_8", "onnx::Conv_9"], ["y"], "/layer/conv/Conv")
    assign(file.graph.node, [*nodes, last])
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == {"n.weight", "n.bias", "onnx::Conv_8", "onnx::Conv_9"}
    (doubts,) = (line for line in warned.splitlines() if "does not say for sure" in line)
    assert "'layer.conv.weight' (onnx::Conv_8), 'layer.conv.bias' (onnx::Conv_9) (the exporter has merged" in doubts
    assert "(the file calls it" not in doubts


def test_a_gate_that_a_tool_has_computed() -> None:
    """A column for each channel, that is read by Mul behind no normalisation: an exporter may have computed it."""
    for name, computed in (("/a/Unsqueeze_output_0", True), ("/a/Exp_1_output_0", True), ("onnx::Mul_9", True)):
        file = scripted("h = MatMul(x, w) y = Mul(h, gate)", {"w": W, "gate": W[:, :1]}, {"y": "/a/Mul"})
        file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
        file.graph.initializer[1].name = file.graph.node[1].input[1] = name
        graph, warned = graph_and_warnings(file)
        assert name in graph.parameters
        assert (f"({name}) (the exporter has computed it)" in warned) is computed


def test_equal_parameters_of_several_modules_that_a_tool_has_merged() -> None:
    """Without the Identity nodes, the names of the nodes say which modules they are in; a module may be called twice."""
    body = (
        "a = LayerNormalization<axis = -1>(x, n1.scale, n1.bias) b = LayerNormalization<axis = -1>(a, n1.scale, n1.bias) "
        "c = LayerNormalization<axis = -1>(b, n1.scale, n1.bias) d = Mul(c, n1.scale) y = Mul(d, n1.gate)"
    )
    tensors = {"n1.scale": np.ones(3, np.float32), "n1.bias": np.zeros(3, np.float32), "n1.gate": W[:, 0]}
    names = {"a": "/n1/LayerNormalization", "b": "/n1_1/LayerNormalization", "c": "/head/norm/LayerNormalization"}
    graph, warned = graph_and_warnings(scripted(body, tensors, {**names, "d": "/n2/Mul", "y": "/Mul"}))
    apart = {"head.norm.weight", "head.norm.bias", "n2.scale"}
    assert set(graph.parameters) == {*tensors, *apart}
    for name in apart:
        assert f"and '{name}'" in warned
    assert "'n1.scale' is read by /n1/LayerNormalization, /n1_1/LayerNormalization" in warned


@pytest.mark.parametrize(("node", "computed"), [("node_linear", True), ("/l/MatMul", False)])
def test_names_that_torch_export_gives_to_what_it_computes(node: str, computed: bool) -> None:
    """The metadata is gone, as after onnxslim. In a file of TorchScript a parameter may be called so."""
    tensors = {"l.weight": W, "embedding_1": W[:, 0] * 2, "exp": W[0] * 3, "emb": W[0]}
    file = scripted(
        "a = Add(x, embedding_1) b = MatMul(a, l.weight) c = Mul(b, exp) y = Add(c, emb)", tensors, {"b": node}
    )
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == set(tensors)
    assert ("'embedding_1', 'exp' (the exporter has computed it)" in warned) is computed


def test_names_of_torchscript_behind_another_tool() -> None:
    """onnxruntime's optimizer for transformers writes its own name into the file."""
    body = "h = MatMul(x, l.weight) a = Add(h, bias) g = Mul(a, mask) y = Add(g, c)"
    tensors = {"l.weight": W, "bias": W[0] ** 2, "mask": W[1], "c": W[2]}
    for producer, known in (("onnxruntime.transformers", True), ("tf2onnx", False)):
        file = scripted(body, tensors, {"h": "/l/MatMul", "y": "/Add_1"})
        file.producer_name = producer
        file.graph.node[0].output[0] = file.graph.node[1].input[0] = "/l/MatMul_output_0" if known else "h"
        file.graph.initializer[3].name = file.graph.node[3].input[1] = "/Constant_1_output_0"
        graph, _ = graph_and_warnings(file)
        assert set(graph.parameters) == {"l.weight", "bias", *(() if known else ("mask", "/Constant_1_output_0"))}


def test_a_batch_normalisation_with_buffers_for_weights() -> None:
    """FrozenBatchNorm2d writes out what BatchNormalization would do."""
    body = (
        "h = MatMul(x, l.weight) s = Sqrt(n.running_var) a = Sub(h, n.running_mean) b = Div(a, s) c = Mul(b, n.weight) "
        "y = Add(c, n.bias)"
    )
    tensors = {f"n.{name}": W[k] + 2 for k, name in enumerate(("running_var", "weight", "bias"))}
    graph, warned = graph_and_warnings(scripted(body, {"l.weight": W, "n.running_mean": W[0], **tensors}))
    assert set(graph.parameters) == {"l.weight"}
    assert "'n.weight', 'n.bias' (its module has running statistics for itself, as FrozenBatchNorm2d)" in warned


def test_copies_of_a_layer_that_a_tool_has_merged() -> None:
    """nn.TransformerEncoder begins with copies; onnxsim keeps one tensor of each, and gives nodes its own names."""
    body = (
        "a = MatMul(x, q) b = Relu(a) c = Gemm(b, l0.out.weight, l0.out.bias) d = MatMul(c, q) e = Relu(d) "
        "f = Gemm(e, l0.out.weight, l0.out.bias) g = MatMul(f, twice) h = MatMul(g, twice) y = Relu(h)"
    )
    square = np.linspace(1, 2, 9, dtype=np.float32).reshape(3, 3)
    tensors = {"q": W[:, :3] + 1, "l0.out.weight": W[:, 1:], "l0.out.bias": W[0, :3], "twice": square}
    names = {"a": "/l0/q/MatMul", "b": "/l0/Relu", "d": "MatMul_4", "e": "/l1/Relu"}
    names |= {"c": "/l0/out/Gemm", "f": "/l1/out/Gemm", "g": "/twice/MatMul", "h": "/twice/MatMul_1"}
    file = scripted(body, tensors, names)
    for node in file.graph.node:
        assign(node.input, ["onnx::MatMul_7" if name == "q" else name for name in node.input])
    file.graph.initializer[0].name = "onnx::MatMul_7"
    graph, warned = graph_and_warnings(file)
    apart = {"l1.out.weight", "l1.out.bias", "onnx::MatMul_7_2"}
    assert set(graph.parameters) == {"onnx::MatMul_7", *apart, *tensors} - {"q"}
    assert "'l0.out.weight' and 'l1.out.weight'" in warned
    assert "'twice' and" not in warned
    assert "read by several nodes" not in warned
    assert {row.name: row.module for row in graph.rows()}["onnx::MatMul_7_2"] == "l1.q.weight"


@pytest.mark.parametrize(
    ("weight", "first", "second"),
    [
        ("l0.fc.weight", "/l0/fc/MatMul/MatMulAddFusion", "/l1/fc/MatMul/MatMulAddFusion"),  # onnxruntime
        ("/l0/fc/MatMul_output_0_weight", "/l0/fc/MatMul_output_0", "/l1/fc/MatMul_output_0"),  # onnxslim
    ],
)
def test_names_that_tools_give_to_copies_of_a_layer(weight: str, first: str, second: str) -> None:
    file = scripted("h = MatMul(x, w) y = MatMul(h, w)", {"w": W[:, :3] + 1}, {"h": first, "y": second})
    file.graph.initializer[0].name = file.graph.node[0].input[1] = file.graph.node[1].input[1] = weight
    assert set(graph_and_warnings(file)[0].parameters) == {weight, "l1.fc.weight"}


def test_what_several_nodes_read_without_names_of_modules() -> None:
    """As in a file of torch.export without metadata: a module that is called twice, or copies of one."""
    names = {"h": "node_linear", "a": "node_add", "y": "node_linear_1"}
    tensors = {"l.weight": W[:, :3] + 1, "l.bias": W[0, :3]}
    file = scripted("h = Gemm(x, l.weight, l.bias) a = Tanh(h) y = Gemm(a, l.weight, l.bias)", tensors, names)
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == set(tensors)
    readers = "by 'node_linear', 'node_linear_1'"
    assert f"trained as one are 'l.weight' {readers}, 'l.bias' {readers}. Exporters" in warned


def convolution(weight: str, bias: str) -> ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 5, 5]) for name in ("x", "y"))
    rng = np.random.default_rng(3)
    arrays = {weight: rng.standard_normal((4, 4, 1, 1)), bias: rng.standard_normal(4)}
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    node = helper.make_node("Conv", ["x", weight, bias], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="pytorch")


def test_a_table_of_sines_that_the_file_calls_a_parameter() -> None:
    """Whisper's positions are a parameter that requires no gradient, which no file of torch says."""
    angles = np.arange(6)[:, None] * np.float32([1.0, 0.3])
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    file = exported(
        "h = MatMul(x, l.weight) y = Add(h, p.weight)",
        {"l.weight": W, "p.weight": table},
        "l.weight p.weight",
        x="float[6,3] x",
    )
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == {"l.weight", "p.weight"}
    assert (
        "'p.weight' (its numbers are those of a table of sines and cosines, which the module may not train)" in warned
    )
    assert "'l.weight'" not in warned


@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 4)])
def test_a_slice_of_a_weight_that_another_call_reads_whole_is_named(part: slice) -> None:
    """One attention as self-attention, then as cross-attention."""
    whole, some = np.tile(W, (1, 8)) + np.arange(32, dtype=np.float32), slice(part.start * 8, part.stop * 8)
    tensors = {"w": whole, "v": whole[:, some], "o": np.ones((32, 3), np.float32)}
    file = scripted(
        "a = MatMul(x, w) b = MatMul(a, o) y = MatMul(b, v)", tensors, {"a": "/a/MatMul", "y": "/a_1/MatMul"}
    )
    for node in file.graph.node:
        assign(node.input, [{"w": "onnx::MatMul_19", "v": "onnx::MatMul_29"}.get(name, name) for name in node.input])
    for tensor, name in zip(file.graph.initializer, ("onnx::MatMul_19", "onnx::MatMul_29"), strict=False):
        tensor.name = name
    warned = graph_and_warnings(file)[1]
    assert "onnx::MatMul_29) holds a part of the numbers of 'a.weight' (onnx::MatMul_19)" in warned


U, V = (vector / np.linalg.norm(vector) for vector in (W[:, 0], W[0]))
SPECTRAL = "m = MatMul(l.w_orig, l.w_v) s = MatMul(l.w_u, m) d = Div(l.w_orig, s) y = MatMul(x, d)"
LOW_RANK = "h = MatMul(x, l.w_orig) a = MatMul(x, l.w_u) b = MatMul(a, l.w_v) y = Add(h, b)"
SCALES = "a = Mul(x, l.w_u) h = MatMul(a, l.w_orig) y = Mul(h, l.w_v)"


@pytest.mark.parametrize("prefix", ["l.w_", "l.parametrizations.w."])
@pytest.mark.parametrize(
    ("body", "u", "v", "left_out"),
    [(SPECTRAL, U, V, "uv"), (SPECTRAL, U, 2 * V, "u"), (SCALES, U, V, ""), (LOW_RANK, W[:, :2], W[:2], "")],
)
def test_vectors_of_spectral_norm(prefix: str, body: str, u: np.ndarray, v: np.ndarray, left_out: str) -> None:
    """Other tensors that have their names are trained, and named in a warning."""
    file = scripted(body, {"l.w_orig": W, "l.w_u": u, "l.w_v": v})
    old = "l.w_orig", "l.w_u", "l.w_v"
    new = old if prefix == "l.w_" else (f"{prefix}original", f"{prefix}0._u", f"{prefix}0._v")
    names: dict[str, str] = dict(zip(old, new, strict=True))
    for node in file.graph.node:
        assign(node.input, [names.get(name, name) for name in node.input])
    for tensor in file.graph.initializer:
        tensor.name = names[tensor.name]
    graph, warned = graph_and_warnings(file)
    assert graph.left_out == {names[f"l.w_{vector}"]: "buffer, by its name" for vector in left_out}
    for vector in set("uv") - set(left_out):
        assert names[f"l.w_{vector}"] in graph.parameters
        assert names[f"l.w_{vector}"] in warned


@pytest.mark.parametrize(
    ("node", "computed"), [("Clip(h, limit)", True), ("Pow(h, limit)", True), ("Where(c, h, limit)", False)]
)
def test_limits_that_the_exporter_has_computed(node: str, computed: bool) -> None:
    """Plain limits are Constant nodes; a Cast of a parameter or a buffer is folded."""
    file = scripted(f"h = MatMul(x, w) c = Less(h, w) y = {node}", {"w": W[:, :1], "limit": np.float32(2.5)})
    name = "onnx::Clip_12"
    file.graph.initializer[1].name = name
    assign(file.graph.node[2].input, [name if old == "limit" else old for old in file.graph.node[2].input])
    if not computed:
        file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == {"w"}
    assert (f"left out are '{name}' (the exporter has computed it)" in warned) is computed


RANDOM = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("weight", "masked"),
    [
        (np.tril(RANDOM), True),
        (RANDOM * (np.arange(16) > 0), True),  # a column
        (RANDOM, False),
        (np.zeros((16, 16), np.float32), False),
        (np.eye(16, dtype=np.float32), False),  # as some modules begin
        ((RANDOM * 20).round() / 20, False),  # of a quantised file
    ],
)
def test_weights_that_the_exporter_has_masked(weight: np.ndarray, masked: bool) -> None:
    file = scripted("y = MatMul(x, w)", {"w": weight}, {"y": "/made/0/MatMul"})
    file.graph.initializer[0].name = file.graph.node[0].input[1] = "onnx::MatMul_8"
    file.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    graph, warned = graph_and_warnings(file)
    assert set(graph.parameters) == {"onnx::MatMul_8"}
    assert ("(onnx::MatMul_8) (it has exact zeros, as a weight" in warned) is masked


KERNEL = np.random.default_rng(1).standard_normal((3, 2, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("kernel", "vector", "axis", "tied"),
    [
        ("c.weight_orig", "c.weight_v", 0, True),
        ("c.weight_orig", "c.weight_v", 1, True),  # of a transposed convolution
        ("c.weight", "c.weight_v", 0, False),  # a layer may begin as a copy of another
        ("c.weight_orig", "d.weight_v", 0, False),
    ],
)
def test_the_matrix_that_spectral_norm_makes_of_a_kernel_is_tied_to_it(
    kernel: str, vector: str, axis: int, tied: bool
) -> None:
    copy = np.moveaxis(KERNEL, axis, 0).reshape(KERNEL.shape[axis], -1)
    body = "a = MatMul(copy, vector) s = MatMul(unit, a) f = Flatten(kernel) h = MatMul(x, f) y = Div(h, s)"
    tensors = {"copy": copy, "kernel": KERNEL, "unit": np.ones(len(copy)), "vector": np.ones(copy.shape[1])}
    file = scripted(body, {name: np.float32(array) for name, array in tensors.items()})
    names = {"copy": "onnx::MatMul_9", "kernel": kernel, "vector": vector}
    for node in file.graph.node:
        assign(node.input, [names.get(name, name) for name in node.input])
    for tensor in file.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    graph, warned = graph_and_warnings(file)
    assert kernel in graph.parameters
    assert ("onnx::MatMul_9" in graph.parameters) is not tied
    assert (f"'{kernel}' and 'onnx::MatMul_9'. It is trained as one" in warned) is tied
    check_first_loss(file)


def test_a_matrix_under_spectral_norm_of_its_columns_has_the_loss_of_the_file() -> None:
    body = "m = MatMul(t, w_v) s = MatMul(w_u, m) d = Div(w_orig, s) y = MatMul(x, d)"
    file = scripted(body, {"t": W.T.copy(), "w_orig": W, "w_u": V, "w_v": U})
    file.graph.initializer[0].name = file.graph.node[0].input[0] = "onnx::MatMul_7"
    check_first_loss(file)
