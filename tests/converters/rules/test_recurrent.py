"""Gradients of RNN, GRU and LSTM, against differences of onnxruntime's own cells."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, parser

import onnx_backprop as ob
from tests.support.gradient_checks import (
    VARIANTS,
    Case,
    Oracle,
    build,
    case,
    check_cases,
    check_gradient,
    session_run,
    spread,
)

STEPS, BATCH, INPUTS, HIDDEN = 4, 3, 2, 3
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
CELLS = tuple(GATES)
SMOOTH = Oracle("onnxruntime", 2.0**-7, 5e-4)
KINKED = Oracle("onnxruntime", 2.0**-9, 2e-3)
ORDER = {"RNN": "x w r b lens h", "GRU": "x w r b lens h", "LSTM": "x w r b lens h c p"}


def shapes(op: str, directions: int) -> dict[str, tuple[int, ...]]:
    n = GATES[op]
    return {
        "x": (STEPS, BATCH, INPUTS),
        "w": (directions, n * HIDDEN, INPUTS),
        "r": (directions, n * HIDDEN, HIDDEN),
        "b": (directions, 2 * n * HIDDEN),
        "h": (directions, BATCH, HIDDEN),
        "c": (directions, BATCH, HIDDEN),
        "p": (directions, 3 * HIDDEN),
    }


def recurrent(
    op: str,
    attributes: str = "",
    *,
    inputs: str | None = None,
    outputs: str = "YHC",
    lens: list[int] | None = None,
    oracle: Oracle = SMOOTH,
    scale: float = 0.5,
    **given: Any,
) -> Case:
    """A node with the named inputs and outputs; y holds all of its outputs, one behind the other."""
    directions = 2 if "bidirectional" in attributes else 1
    named = (inputs or ORDER[op].replace(" lens", "")).split() + (["lens"] if lens else [])
    listed = [name if name in named else '""' for name in ORDER[op].split()]
    while listed[-1] == '""':
        listed.pop()
    kinds = outputs if op == "LSTM" else outputs.replace("C", "")
    ports = [kind if kind in kinds else '""' for kind in "YHC"[: 3 if "C" in kinds else 2 if "H" in kinds else 1]]
    flat = " ".join(f"flat{kind} = Reshape({kind}, all)" for kind in kinds)
    nodes = (
        f"all = Constant<value_ints = [-1]>() "
        f"{', '.join(ports)} = {op} <hidden_size = {HIDDEN}{', ' if attributes else ''}{attributes}> ({', '.join(listed)}) "
        f"{flat} y = Concat<axis = 0>({', '.join(f'flat{kind}' for kind in kinds)})"
    )
    arrays = {
        name: np.float32(scale) * spread(shape, zlib.crc32(f"{nodes}{name}".encode()))
        for name, shape in shapes(op, directions).items()
        if name in named
    }
    constants = {} if lens is None else {"lens": np.array(lens, np.int32)}
    return case(nodes, op=op, constants=constants, oracle=oracle, **arrays, **given)


def short(case: Case) -> str:
    """The node without what is around it."""
    node = re.search(r"\S+(, \S+)* = (RNN|GRU|LSTM) .*?\)", case.nodes)
    assert node
    lens = "".join(str(case.constants.get("lens", "")).split())
    return re.sub(r'["\s]|hidden_size=3,?', "", node[0]).replace("[", "(").replace("]", ")") + lens.strip("[]")


DIRECTIONS = [f'direction = "{name}"' for name in ("forward", "reverse", "bidirectional")]
ACTIVATIONS = [  # of one gate; constants; whether it has a kink
    ("Relu", "", "", True),
    ("LeakyRelu", "0.2", "", True),
    ("LeakyRelu", "", "", True),
    ("ThresholdedRelu", "0.1", "", True),
    ("Affine", "0.4", "0.3", False),
    ("ScaledTanh", "1.3", "0.6", False),
    ("HardSigmoid", "0.3", "0.4", True),
    ("HardSigmoid", "", "", True),
    ("Elu", "0.6", "", True),
    ("Elu", "", "", False),
    ("Softsign", "", "", True),
    ("Softplus", "", "", False),
    ("Sigmoid", "", "", False),
]

# where 0.2 puts the point next to a kink, on whose other side differences look
SCALES = {("GRU", "LeakyRelu", "0.2"): 0.15, ("GRU", "LeakyRelu", ""): 0.15, ("LSTM", "LeakyRelu", "0.2"): 0.15}


def activated(op: str, name: str, alpha: str, beta: str, kinked: bool) -> Case:
    """The activation in every place of the cell but one, so that constants must be handed out in order."""
    functions = {"RNN": [name], "GRU": [name, "Tanh"], "LSTM": [name, "Tanh", name]}[op]
    count = functions.count(name)
    attributes = "activations = [" + ", ".join(f'"{f}"' for f in functions) + "]"
    for attribute, value in (("activation_alpha", alpha), ("activation_beta", beta)):
        if value:
            attributes += f", {attribute} = [{', '.join([value] * count)}]"
    scale = SCALES.get((op, name, alpha), 0.2)  # unbounded gates explode
    return recurrent(op, attributes, oracle=KINKED if kinked else SMOOTH, scale=scale)


CASES = [
    *(recurrent(op, d, lens=lens) for op in CELLS for d in DIRECTIONS for lens in (None, [2, 4, 1])),
    *(recurrent(op, lens=[4, 0, 3]) for op in CELLS),
    *(recurrent(op, inputs=inputs) for op in CELLS for inputs in ("x w r", "x w r b", "x w r h", "x w r b h")),
    *(recurrent("LSTM", inputs=inputs) for inputs in ("x w r c", "x w r p", "x w r b p", "x w r h c p")),
    *(recurrent(op, d, outputs=outputs) for op in ("RNN", "GRU") for outputs in ("Y", "H") for d in DIRECTIONS),
    *(recurrent("LSTM", outputs=outputs) for outputs in ("Y", "H", "C", "YH", "YC", "HC")),
    *(recurrent(op, outputs=outputs, lens=[2, 4, 1]) for op in CELLS for outputs in ("Y", "H")),
    *(recurrent(op, "clip = 0.4", oracle=KINKED) for op in CELLS),
    recurrent("LSTM", "clip = 0.5", inputs="x w r b h c", oracle=KINKED),
    *(recurrent("GRU", f"linear_before_reset = 1, {d}", lens=lens) for d in DIRECTIONS for lens in (None, [2, 4, 1])),
    recurrent("GRU", "linear_before_reset = 1", inputs="x w r"),
    recurrent("GRU", "linear_before_reset = 1, clip = 0.4", oracle=KINKED),
    *(recurrent("LSTM", "input_forget = 1", inputs=i, lens=n) for i in (None, "x w r") for n in (None, [2, 4, 1])),
    *(activated(op, *settings) for op in CELLS for settings in ACTIVATIONS),
    recurrent(
        "LSTM",
        'direction = "bidirectional", activations = ["Sigmoid", "LeakyRelu", "Tanh", "HardSigmoid", "Softsign", "Elu"], '
        "activation_alpha = [0.2, 0.4, 0.5], activation_beta = [0.3]",
        oracle=KINKED,
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def batch_first(case: Case) -> Case:
    """The same node in layout 1, on the same numbers, with outputs in the order of layout 0."""
    nodes = case.nodes.replace("<hidden_size", "<layout = 1, hidden_size")
    for kind, perm in (("Y", "[1, 2, 0, 3]"), ("H", "[1, 0, 2]"), ("C", "[1, 0, 2]")):
        nodes = nodes.replace(f"Reshape({kind}, all)", f"Reshape(turned{kind}, all)")
        nodes = nodes.replace(f"flat{kind} =", f"turned{kind} = Transpose<perm = {perm}>({kind}) flat{kind} =", 1)
    turned = {name: array.swapaxes(0, 1) if name in "xhc" else array for name, array in case.inputs.items()}
    return Case(**(vars(case) | {"nodes": nodes, "inputs": turned}))


def time_first(model: ModelProto) -> ModelProto:
    """A model with its nodes of layout 1, which onnxruntime does not run, written in layout 0 between Transposes."""
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    for node in model.graph.node:
        if not any(a.name == "layout" and a.i for a in node.attribute):
            result.graph.node.append(node)
            continue
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        inner.attribute.remove(next(a for a in inner.attribute if a.name == "layout"))
        before, after = [], []
        for index in (0, 5, 6):  # x and the initial states
            if index < len(node.input) and node.input[index]:
                inner.input[index] = f"{node.input[index]}_turned_in"
                before.append(helper.make_node("Transpose", [node.input[index]], [inner.input[index]], perm=[1, 0, 2]))
        for index, perm in enumerate(([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])):
            if index < len(node.output) and node.output[index]:
                inner.output[index] = f"{node.output[index]}_turned_out"
                after.append(helper.make_node("Transpose", [inner.output[index]], [node.output[index]], perm=perm))
        result.graph.node.extend([*before, inner, *after])
    return result


@pytest.mark.parametrize("outputs", ["YHC", "H", "C"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", CELLS)
def test_batch_first_is_the_same_with_the_axes_turned(op: str, direction: str, outputs: str) -> None:
    case = recurrent(op, direction, outputs=outputs if op == "LSTM" else "YH")
    model, feeds, wrt = build(case, opset=22)
    turned = batch_first(case)
    text = (
        '<ir_version: 10, opset_import: ["" : 22]> g ('
        + ", ".join(f"float[{','.join(map(str, array.shape))}] {name}" for name, array in turned.inputs.items())
        + f") => (float[n] y) {{ {turned.nodes} }}"
    )
    other = parser.parse_model(text)
    dy = {"y_grad": spread(session_run(model)(feeds)[0].shape)}
    want = session_run(ob.backward(model, wrt=wrt))(feeds | dy)
    got = session_run(time_first(ob.backward(other, wrt=wrt)))(dict(turned.inputs) | dy)
    for name, one, two in zip(["y", *wrt], want, got, strict=True):
        np.testing.assert_allclose(two.swapaxes(0, 1) if name in "xhc" else two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("RNN", 'activations = ["Affine"]', "RNN 'rnn_1': .*activation_alpha for Affine"),
        ("GRU", 'activations = ["ScaledTanh", "Tanh"], activation_alpha = [0.5]', "activation_beta for ScaledTanh"),
        ("LSTM", 'activations = ["Sigmoid", "ThresholdedRelu", "Tanh"]', "activation_alpha for ThresholdedRelu"),
        ("RNN", 'activations = ["Sine"]', "activations of .*'Sine'"),
        ("GRU", 'activations = ["Sigmoid"]', "activations with 2 names"),
        ("LSTM", "clip = -1.0", "clip above 0; got -1.0"),
        ("RNN", 'direction = "sideways"', "direction .*'sideways'"),
        ("RNN", "layout = 2", "layout of 0 and 1; got 2"),
    ],
)
def test_refused_attributes(op: str, attributes: str, message: str) -> None:
    case = recurrent(op, attributes)
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 22]> g (float[4,3,2] x, float[1,12,2] w, float[1,12,3] r, float[1,24] b, '
        f"float[1,3,3] h, float[1,3,3] c, float[1,9] p) => (float[n] y) {{ {case.nodes} }}"
    )
    model.graph.node[1].name = f"{op.lower()}_1"
    with pytest.raises(ob.UnsupportedAttributeError, match=message):
        ob.backward(model, wrt=["x"])


def test_a_node_that_puts_out_its_last_state_only_is_run_once() -> None:
    model, _, wrt = build(recurrent("LSTM", outputs="C"), opset=18)
    training = ob.backward(model, wrt=wrt)
    nodes = [node for node in training.graph.node if node.op_type == "LSTM"]
    assert len(nodes) == 1
    assert nodes[0].output[0]
    assert list(nodes[0].output[1:]) == ["", "C"]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_one_training_graph_serves_every_length(steps: int) -> None:
    case = recurrent("GRU", DIRECTIONS[2])
    longer = {**case.inputs, "x": np.float32(0.5) * spread((steps, BATCH, INPUTS))}
    check_cases([Case(**(vars(case) | {"inputs": longer}))], "symbolic")


def test_in_a_branch() -> None:
    """The node is in a sub-graph, its states are computed again in the sub-graph of the gradient."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (bool k, float[2,3,2] x, float[1,3,2] w, float[1,3,3] r) => (float[2,1,3,3] y) {
        y = If (k) < then_branch = t () => (float[2,1,3,3] p) { p = RNN <hidden_size = 3> (x, w, r) },
                     else_branch = e () => (float[2,1,3,3] q) { s = Constant<value_ints = [2, 1, 3, 3]>()
                                                               q = ConstantOfShape(s) } > }"""
    inputs = {"x": (2, 3, 2), "w": (1, 3, 2), "r": (1, 3, 3)}
    feeds = {name: np.float32(0.5) * spread(shape) for name, shape in inputs.items()}
    check_gradient(parser.parse_model(text), feeds | {"k": np.array(True)}, ["x", "w", "r"], oracle=SMOOTH)
