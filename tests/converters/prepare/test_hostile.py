"""Files that somebody has made to break things: one clear error of ours, soon, at every door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.functions.long_vectors import infer_shapes

LINEAR = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { h = Mul(x, w) y = Tanh(h) }
"""
CONV = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[1, 2, 8, 8] x) => (float[?, ?, ?, ?] y) <float[2, 2, 1, 1] w = {1, 2, 3, 4}>
    { y = Conv<kernel_shape = [1, 1], strides = [1, 1], dilations = [1, 1], pads = [0, 0, 0, 0], group = 1>(x, w) }
"""
RESIZE = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y) <float[1] w = {1}, float[4] scales = {1, 1, 2, 2}>
    { z = Mul(x, w) y = Resize<mode = "linear">(z, , scales) }
"""

Change = Callable[[ModelProto], None]


def attribute(name: str, value: object) -> Change:
    """Another value for an attribute of the first node."""

    def change(model: ModelProto) -> None:
        node = model.graph.node[0]
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def scale(value: float) -> Change:
    def change(model: ModelProto) -> None:
        model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array([1, 1, 2, value], np.float32), "scales"))

    return change


def first_length(value: int) -> Change:
    def change(model: ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = value

    return change


def constant(*names: str, outputs: int = 1) -> Change:
    def change(model: ModelProto) -> None:
        node = NodeProto(op_type="Constant", output=[f"c{n}" for n in range(outputs)])
        node.attribute.extend(helper.make_attribute(name, 1.0 if "float" in name else 1) for name in names)
        model.graph.node.insert(0, node)

    return change


def tensor(**fields: object) -> Change:
    def change(model: ModelProto) -> None:
        first = model.graph.initializer[0]
        first.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(first), first.name))
        for name, value in fields.items():
            if name == "dims":
                del first.dims[:]
                first.dims.extend(value)
            else:
                setattr(first, name, value)

    return change


def typeless(model: ModelProto) -> None:
    model.graph.node[0].attribute.add(name="axis", i=1).type = AttributeProto.UNDEFINED


def raw_text(model: ModelProto) -> None:
    model.graph.node[1].attribute[0].s = b"\xff\xfe"


def reference(model: ModelProto) -> None:
    model.graph.node[0].attribute.add(name="axis", ref_attr_name="axis", type=AttributeProto.INT)


def outside(model: ModelProto) -> None:
    first = model.graph.initializer[0]
    first.ClearField("float_data")
    first.data_location = TensorProto.EXTERNAL
    first.external_data.add(key="location", value="../secret")


def nested(depth: int) -> Change:
    def change(model: ModelProto) -> None:
        node = model.graph.node[0]
        for level in range(depth):
            out = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
            branch = helper.make_graph([node], f"b{level}", [], [out])
            same = helper.make_node("Identity", ["x"], [f"o{level}"])
            other = helper.make_graph([same], "o", [], [helper.make_tensor_value_info(f"o{level}", 1, None)])
            node = helper.make_node("If", ["c"], [f"h{level}"], then_branch=branch, else_branch=other)
        model.graph.node[0].CopyFrom(node)
        model.graph.node[1].input[0] = node.output[0]
        model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))

    return change


def equation(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Einsum", ["x"], ["e"], equation="ij->i\x05"))


def segment(model: ModelProto) -> None:
    model.graph.initializer[0].segment.end = 1


def untyped_input(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED


def branch_without_output(model: ModelProto) -> None:
    nested(1)(model)
    del model.graph.node[0].attribute[1].g.output[:]


def opset(version: int) -> Change:
    def change(model: ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def cycle(model: ModelProto) -> None:
    model.graph.node[0].input[1] = "y"


def extra_input(model: ModelProto) -> None:
    model.graph.node[1].input.extend(["", "w"])


def num_outputs(model: ModelProto) -> None:
    split = helper.make_node("Split", ["x"], ["a", "b"], num_outputs=2**40, axis=1)
    model.graph.node.append(split)


HOSTILE: dict[str, tuple[str, Change, str]] = {
    "scale nan": (RESIZE, scale(np.nan), "scales|shape inference|no tensor has"),
    "scale inf": (RESIZE, scale(np.inf), "scales|shape inference|no tensor has"),
    "scale 0": (RESIZE, scale(0), "scales|shape inference|no tensor has"),
    "scale below 0": (RESIZE, scale(-1), "scales|shape inference|no tensor has"),
    "scale huge": (RESIZE, scale(3e38), "Resize|no tensor has"),
    "length huge": (LINEAR, first_length(2**62), "which no tensor has"),
    "length that inference ends the process on": (LINEAR, first_length(2**31), "which no tensor has"),
    "dilations": (CONV, attribute("dilations", [2**62, 1]), "expected numbers from 1 to"),
    "strides": (CONV, attribute("strides", [0, 1]), "expected numbers from 1 to"),
    "pads": (CONV, attribute("pads", [2**62, 0, 0, 0]), "attribute 'pads': expected"),
    "kernel": (CONV, attribute("kernel_shape", [2**30, 2**30]), "too large. The limit is"),
    "group": (CONV, attribute("group", 0), "attribute 'group': expected numbers from 1"),
    "attribute type": (CONV, attribute("strides", "two"), "strides"),
    "attribute without type": (LINEAR, typeless, "type 0, which is none of ONNX"),
    "text": (RESIZE, raw_text, "attribute 'mode' is no UTF-8 text"),
    "reference": (LINEAR, reference, "refers to one of a function, in which it is not"),
    "constant without value": (LINEAR, constant(), "expected one output and one of the attributes"),
    "constant with two": (LINEAR, constant("value_int", "value_float"), "expected one output and one of"),
    "constant of two outputs": (LINEAR, constant("value_int", outputs=2), "expected one output"),
    "negative dims": (LINEAR, tensor(dims=[-2]), "expected none below 0"),
    "overflowing dims": (LINEAR, tensor(dims=[2**62, 2**62]), "holds 8 bytes, expected"),
    "too few bytes": (LINEAR, tensor(raw_data=b"1234567"), "holds 7 bytes, expected 8"),
    "element type": (LINEAR, tensor(data_type=99), "element type 99, which is none of ONNX"),
    "external data": (LINEAR, outside, "cannot be read|secret"),
    "deep": (LINEAR, nested(26), "more than 24 deep"),
    "equation": (LINEAR, equation, "expected letters, commas, dots and an arrow"),
    "segment": (LINEAR, segment, "is a segment of one"),
    "untyped input": (LINEAR, untyped_input, "the input 'x' has no element type"),
    "branch": (LINEAR, branch_without_output, "expected a then_branch and an else_branch of 1 outputs, got"),
    "opset": (LINEAR, opset(2**40), "which is none"),
    "cycle": (LINEAR, cycle, "onnx.checker"),
    "arity": (LINEAR, extra_input, "onnx.checker"),
    "outputs of Split": (LINEAR, num_outputs, "expected 2, the outputs that are named"),
}
DOORS: dict[str, Callable[[Path], object]] = {
    "backward": ob.backward,
    "explain": ob.explain_gradients,
    "training_graph": lambda path: ob.training_graph(path, loss="mse", optimizer="adam"),
    "check": ob.check_gradients,
    "expand": ob.expand_gradients,
}


@pytest.mark.parametrize("door", list(DOORS))
@pytest.mark.parametrize("name", list(HOSTILE))
def test_refused_in_one_sentence(name: str, door: str, tmp_path: Path) -> None:
    text, change, sentence = HOSTILE[name]
    model = parser.parse_model(text)
    change(model)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ob.OnnxBackpropError, match=sentence):
        DOORS[door](path)


@pytest.mark.parametrize("door", [*DOORS.values(), ob.session], ids=[*DOORS, "session"])
def test_a_model_in_memory_has_no_folder(door: Callable[[Any], object]) -> None:
    model = parser.parse_model(LINEAR)
    outside(model)
    model.graph.initializer[0].external_data.add(key="offset", value="none")
    with pytest.raises(ob.InvalidModelError, match=r"lies in the file '../secret'. Give the path of the model, or"):
        door(model)


@pytest.mark.parametrize("door", [ob.session, ob.check_gradients, ob.backward])
def test_an_empty_name_behind_the_last_input(door: Callable[[Any], object]) -> None:
    """With which onnxruntime 1.32 ends the process, in LayerNormalization at least."""
    door(
        parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
            g (float[2,4] x) => (float[2,4] y) <float[4] s = {1,2,3,4}> { y = LayerNormalization(x, s, "") }""")
    )


def test_a_scale_of_more_axes_than_what_it_scales() -> None:
    text = LINEAR.replace("Mul(x, w)", "LayerNormalization(x, v)")
    model = parser.parse_model(text.replace("{1, 2}>", "{1, 2}, float[1, 1, 2] v = {1, 2}>"))
    with pytest.raises(ob.OnnxBackpropError, match="'v' of rank 3 does not broadcast to 'h' of rank 2"):
        ob.backward(model, wrt=["v"])


def test_a_rule_that_stumbles_says_what_onnx_says() -> None:
    """Inference does not look so closely at nodes of branches."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[N] x, bool c) => (float[N] y)
        <float w = {2.0}> { y = If(c) <then_branch = a () => (float[N] p) { p = GatherND(x, w) },
                                       else_branch = b () => (float[N] q) { q = Add(x, w) }> }""")
    with pytest.raises(ob.InvalidModelError, match="GatherND 'p': .*rank larger than 0"):
        ob.backward(model, wrt=["x"])


def test_a_mode_that_an_old_opset_has_not() -> None:
    model = parser.parse_model("""<ir_version: 4, opset_import: ["": 9]> g (float[1,1,2,2] x) => (float[1,1,4,4] y)
        <float[4] s = {1, 1, 2, 2}> { y = Upsample<mode = "nea\\x01rest"> (x, s) }""")
    with pytest.raises(ob.InvalidModelError, match="Upsample 'y': attribute mode: expected one of nearest, linear"):
        ob.backward(model, wrt=["x"])


def test_scales_in_a_matrix() -> None:
    model = parser.parse_model(RESIZE.replace("float[4] scales", "float[4, 1] scales"))
    with pytest.raises(ob.InvalidModelError, match=r"Resize 'y': expected scales in one axis, got the shape \[4, 1\]"):
        ob.backward(model)


def test_a_function_that_reads_what_is_outside(caplog: pytest.LogCaptureFixture) -> None:
    model = doubling(1)
    model.ir_version = 7  # before 8 onnx's checker does not look into functions
    model.functions[0].node[0].input[0] = "\x1b[31mw"
    with pytest.raises(ob.InvalidModelError, match="functions cannot be written out"):
        ob.backward(model)
    assert not caplog.records


@pytest.mark.parametrize("text", [LINEAR, CONV, RESIZE], ids=["linear", "conv", "resize"])
def test_the_unchanged_models_convert(text: str) -> None:
    ob.backward(parser.parse_model(text))


def doubling(count: int) -> ModelProto:
    """Functions of which each calls the next one twice."""
    model = parser.parse_model(LINEAR.replace("Tanh(h)", "own.f0(h)").replace("18]", '18, "own": 1]'))
    for n in range(count):
        body = [helper.make_node(f"f{n + 1}", [a], [b], domain="own") for a, b in (("a", "b"), ("b", "c"))]
        if n == count - 1:
            body = [helper.make_node("Tanh", ["a"], ["c"])]
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"f{n}", ["a"], ["c"], body, imports))
    return model


@pytest.mark.parametrize("door", ["backward", "explain", "session", "load", "check"])
def test_exponential_functions(door: str) -> None:
    with pytest.raises(ob.UnsupportedError, match=r"50331648 nodes once .* limit is 100000; .*limits\(expansions="):
        READERS[door](doubling(25))


def test_functions_within_the_limit_convert() -> None:
    assert len(ob.backward(doubling(4)).graph.node) > 8


def test_the_limit_of_expansions() -> None:
    with ob.limits(expansions=5), pytest.raises(ob.UnsupportedError, match="has 24 nodes once"):
        ob.backward(doubling(4))


def test_recursive_functions() -> None:
    model = doubling(3)
    model.functions[2].node[0].op_type, model.functions[2].node[0].domain = "f0", "own"
    with pytest.raises(ob.InvalidModelError, match="function 'own::f0' calls itself"):
        ob.backward(model)


def test_a_call_with_too_many_inputs() -> None:
    model = doubling(2)
    model.graph.node[1].input.append("w")
    with pytest.raises(ob.InvalidModelError, match="expected at most 1 inputs and 1 outputs"):
        ob.backward(model)


def test_long_vectors_inside_branches() -> None:
    """Inference would follow each of their numbers: 2³¹ dimensions."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[2147483647] x, bool c, float w) => (float[?] y)
        { y = If(c) <then_branch = a () => (float[?] p) { p = Mul(x, w) }, else_branch = b () => (float[?] q)
          { r = Add(x, w) q = Mul(r, w) }> }
    """)
    assert len(ob.backward(model, wrt=["w"]).graph.output) == 2


def test_lengths_keep_their_names_behind_long_biases() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[?,2] x, float[2,3000] w) => (float[?,3000] y)
        { a = MatMul(x, w)  b = Add(bias, a)  c = Mul(b, bias)  d = Sub(c, bias)  e = Tanh(d)  y = Mul(e, a) }
    """)
    model.graph.initializer.add(name="bias", data_type=1, dims=[3000], raw_data=bytes(12000))
    lengths = {v.name: v.type.tensor_type.shape.dim[0].dim_param for v in prepare(model).graph.value_info}
    assert len({lengths[name] for name in "abcde"}) == 1
    assert lengths["a"]


def test_a_function_that_is_called_as_a_standard_operator() -> None:
    """It is not taken for a sum where it reads a long vector."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "own": 1]>
        g (float[2,70000] x, float[70000] w) => (float[?,?] y) { y = own.Add(x, w) }
        <domain: "own", opset_import: ["": 18]> Add (a, b) => (c) { c = Mul(a, b) }
    """)
    (y,) = infer_shapes(model).graph.output
    assert [d.dim_value for d in y.type.tensor_type.shape.dim] == [2, 70000]


@pytest.mark.parametrize(
    "name", ["\x1b[31mred\x1b[0m", "a\nb", "x" * 100_000, "abc\u202edef"], ids=["colour", "lines", "long", "backwards"]
)
def test_names_in_messages_and_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = parser.parse_model(LINEAR)
    model.graph.initializer[0].name = model.graph.node[0].input[1] = name
    model.graph.node[0].name = name
    table = str(ob.explain_gradients(model))
    summary = ob.training_graph(model, loss="mse").summary()
    model.graph.node[0].op_type, model.graph.node[0].domain = "Unknown", "ai.onnx.ml"
    with pytest.raises(ob.OnnxBackpropError) as caught:
        ob.backward(model)
    for text in (table, summary, str(caught.value)):
        assert len(text) < 5000
        assert name not in text or (text == str(caught.value) and name.isascii() and "\n" in name)  # onnx's lines
        assert all(c.isprintable() or c == "\n" for c in text)


def test_names_that_are_no_utf8_in_every_place(tmp_path: Path) -> None:
    content = parser.parse_model(LINEAR.replace("g (", "quitelong (")).SerializeToString()
    content = (
        content.replace(b"quitelong", b"quite\xff\xfe\xffg").replace(b"\x01h", b"\x01\xff").replace(b"Tanh", b"T\xffnh")
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    for door in (*DOORS.values(), ob.session):
        with pytest.raises(ob.OnnxBackpropError, match=r"T\\+xffnh"):
            door(path)


def test_an_input_too_large_to_be_drawn() -> None:
    model = parser.parse_model(LINEAR)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**31 - 1
    with pytest.raises(ob.InvalidArgumentError, match="too large to be drawn. The limit is"):
        ob.check_gradients(model)


def test_a_model_of_more_nodes_than_the_limit() -> None:
    with ob.limits(nodes=1), pytest.raises(ob.UnsupportedError, match=r"has 2 nodes.*limits\(nodes="):
        ob.backward(parser.parse_model(LINEAR))
    ob.backward(parser.parse_model(LINEAR))


@pytest.mark.parametrize("changes", [{"nodes": -1}, {"nodes": True}, {"nodes": 1.5}, {"node": 1}], ids=str)
def test_limits_that_are_none(changes: dict[str, int]) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="limits: "), ob.limits(**changes):
        pass


GARBAGE = [b"model", 3, None, "", "\0", "x" * 5000, ".", "/nowhere/model.onnx"]
READERS = DOORS | {
    "session": ob.session,
    "load": ob.TrainingGraph.load,
    "use_kernels": lambda model: ob.use_kernels(model, "onnx"),
}


@pytest.mark.parametrize("door", list(READERS))
@pytest.mark.parametrize("value", GARBAGE, ids=["bytes", "number", "none", "empty", "nul", "long", "folder", "missing"])
def test_what_is_no_model(value: object, door: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="or the path of a file, got|no such file"):
        READERS[door](value)


@pytest.mark.parametrize("kernels", ["onnx", None])
def test_sessions_on_what_is_no_file_of_onnx(kernels: str | None, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for content in (b"", b"garbage", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ob.InvalidModelError, match="is not an ONNX file|onnxruntime does not load the model"):
            ob.session(path, kernels=kernels)


def test_what_onnxruntime_says_about_a_model_is_kept() -> None:
    model = parser.parse_model(LINEAR)
    model.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(ob.InvalidModelError, match="onnxruntime does not load the model: .*NoSuchOperator"):
        ob.session(model)
