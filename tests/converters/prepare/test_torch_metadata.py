"""`torch_metadata.signature`: the parameters and buffers that torch's exporter names, those that it folded too."""

import numpy as np
import pytest
from onnx import ModelProto, StringStringEntryProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.origins import MISSING, restored
from onnx_backprop.converters.prepare.exporters.torch_metadata import (
    ALIASES,
    SIGNATURE,
    TIES,
    Entry,
    signature,
    tied_names,
)
from onnx_backprop.converters.prepare.ir_models import to_ir
from onnx_backprop.converters.prepare.load import prepare

TEXT = """
# inputs
p_fc_weight: PARAMETER target='fc.weight'
p_0_bias: PARAMETER target='0.bias'
b_bn_running_mean: BUFFER target='bn.running_mean' persistent=True
b_mask: BUFFER target='mask' persistent=False
c_lifted: CONSTANT_TENSOR target='lifted_tensor_0'
x: USER_INPUT

# outputs
linear: USER_OUTPUT
b_bn: BUFFER_MUTATION target='bn.running_mean'
"""
ENTRIES = [
    Entry("PARAMETER", "fc.weight", "p_fc_weight", (2, 3)),
    Entry("PARAMETER", "0.bias", "p_0_bias", None),
    Entry("BUFFER", "bn.running_mean", "b_bn_running_mean", None),
    Entry("BUFFER", "mask", "b_mask", None),
    Entry("CONSTANT_TENSOR", "lifted_tensor_0", "c_lifted", None),
    Entry("USER_INPUT", "", "x", None),
]


def _model(text: str) -> ModelProto:
    source = '<ir_version: 10, opset_import: ["": 18]> g (float[1,2] x) => (float[1,3] y) { y = MatMul(x, w) }'
    model = parser.parse_model(source)
    model.graph.node[0].input[1] = "fc.weight"
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "fc.weight"))
    if text:
        model.graph.metadata_props.append(StringStringEntryProto(key=SIGNATURE, value=text))
    return model


@pytest.mark.parametrize("load", [ModelProto, to_ir, prepare])
@pytest.mark.parametrize(("text", "entries"), [(TEXT, ENTRIES), ("", []), ("# inputs\nnonsense\n", [])])
def test_a_signature_is_read(load, text, entries):
    model = _model(text)
    assert signature(model if load is ModelProto else load(model)) == entries


def test_other_names_of_tied_parameters_are_read_and_are_not_missing() -> None:
    model = _model(TEXT.replace("'0.bias'", "'head.weight'"))
    (tensor,) = model.graph.initializer
    value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    value.metadata_props.add(key=ALIASES, value='["head.weight", 3]')
    model.graph.value_info.append(value)
    assert tied_names(model) == {"head.weight": "fc.weight"}
    assert restored(to_ir(prepare(model)).graph, MISSING) == []
    value.metadata_props[0].value = "[1"
    model.graph.value_info[0].CopyFrom(value)
    assert tied_names(model) == {}
    assert restored(to_ir(prepare(model)).graph, MISSING) == ["head.weight"]


def test_equal_tensors_of_a_file_that_states_its_ties_are_not_tied() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[1,16] x) => (float[1,16] y) '
        "{ a = MatMul(x, v) y = MatMul(a, w) }"
    )
    values = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name in "vw")
    with pytest.warns(ob.OnnxBackpropWarning, match="'v' and 'w' hold the same numbers"):
        ob.training_graph(model, loss="mse")
    model.graph.metadata_props.append(StringStringEntryProto(key=TIES, value="stated"))
    assert set(ob.training_graph(model, loss="mse").parameters) == {"v", "w"}


@pytest.mark.filterwarnings("ignore:these rows of tables are all zeros")
def test_an_embedding_and_a_head_whose_first_row_is_zeros() -> None:
    """Of padding: nothing but the first row was looked at."""
    table = np.vstack([np.zeros((1, 4)), np.arange(12).reshape(3, 4) ** 2]).astype(np.float32)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (int64[2] i) => (float y) { a = Gather(emb, i) y = MatMul(a, head) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(table, "emb"))
    model.graph.initializer.append(numpy_helper.from_array(table.T.copy(), "head"))
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"'emb' and 'head' hold the same numbers.* tie=\[\('emb', 'head'\)\]"
    ):
        ob.training_graph(model, loss="mse")


@pytest.mark.parametrize(
    ("op_type", "inputs", "stored", "added"),
    [
        ("BatchNormalization", "weight bias mean weight", "weight", "running_var"),
        ("BatchNormalization", "weight bias bias var", "bias", "running_mean"),
        ("BatchNormalization", "var bias mean var", "var", "weight"),
        ("BatchNormalization", "weight mean mean var", "mean", "bias"),
        ("InstanceNormalization", "weight weight", "weight", "bias"),
        ("LayerNormalization", "weight weight", "weight", "bias"),
        ("LayerNormalization", "bias bias", "bias", "weight"),
    ],
)
def test_merged_tensors_of_a_normalization_are_named_by_their_positions(op_type, inputs, stored, added):
    """Of a file whose nodes say their module and not their arguments."""
    names = {"mean": "running_mean", "var": "running_var"}
    read = [f"norm.{names.get(name, name)}" for name in inputs.split()]
    node = helper.make_node(op_type, ["x", *read], ["y"], "norm")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", "norm", "norm.batch_norm"]))
    x, y = (helper.make_tensor_value_info(name, 1, [2, 3, 4, 4]) for name in "xy")
    tensors = [numpy_helper.from_array(np.ones(3, np.float32), name) for name in dict.fromkeys(read)]
    graph = helper.make_graph([node], "g", [x], [y], tensors)
    missing = f"norm.{added}"
    kinds = {name: "BUFFER" if "running" in name else "PARAMETER" for name in (*dict.fromkeys(read), missing)}
    lines = [f"p_{n}: {kind} target={name!r}" for n, (name, kind) in enumerate(kinds.items())]
    graph.metadata_props.add(key=SIGNATURE, value="\n".join(["# inputs", *lines, "x: USER_INPUT", ""]))
    model = prepare(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]))
    index = read.index(f"norm.{names.get(stored, stored)}")
    others = [n for n, name in enumerate(read) if name == read[index]]
    place = {"weight": 0, "bias": 1, "running_mean": 2, "running_var": 3}[added]
    assert place in others
    assert model.graph.node[0].input[1 + place] == missing
    assert [name for n, name in enumerate(model.graph.node[0].input[1:]) if n != place] == [
        name for n, name in enumerate(read) if n != place
    ]


@pytest.mark.parametrize("constant", ["Constant", "initializer"])
def test_a_module_without_tensors_has_no_parameters(constant: str) -> None:
    """The scale of its attention is a number of the exporter's, as it is in a module with parameters."""
    node = "val_0 = Constant <value_float = 0.35> ()" if constant == "Constant" else ""
    stored = "" if node else "<float val_0 = {0.35}>"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20], producer_name: "pytorch"> g (float[2, 3] x) => (float[2, 3] y) {stored} {{ {node} y = Mul (x, val_0) }}'
    )
    model.graph.metadata_props.add(key=SIGNATURE, value="# inputs\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n")
    with pytest.raises(ob.InvalidArgumentError):  # nothing to train
        ob.training_graph(model, loss="mse", optimizer="sgd")
    assert "y" in [value.name for value in ob.backward(model, wrt=["x"]).graph.output]
