"""One name is one length: the names of lengths behind random windows, and those that onnxruntime runs with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from models import resnet
from onnx_backprop.converters.prepare.inference.equal_lengths import name_equal_lengths
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.graphs.types import shapes_of

CHANNELS = 2


def window(rng: np.random.Generator, n: int, source: str) -> Any:
    """A Conv or a pool of odd attributes."""
    op = str(rng.choice(["Conv", "MaxPool", "AveragePool", "LpPool"]))
    kernel = rng.integers(1, 4, 2)
    attributes: dict[str, Any] = {"kernel_shape": kernel.tolist()}
    if rng.random() < 0.7:
        attributes["strides"] = np.minimum(rng.integers(1, 3, 2), kernel).tolist()  # or SAME_* would take pixels away
    auto = str(rng.choice(["NOTSET", "", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto != "NOTSET":
        attributes["auto_pad"] = auto
    if auto in ("NOTSET", "") and rng.random() < 0.8:
        attributes["pads"] = np.minimum(rng.integers(0, 3, 4), np.tile(kernel, 2) - 1).tolist()
    if (op == "MaxPool" or (op == "Conv" and auto in ("NOTSET", ""))) and rng.random() < 0.3:
        attributes["dilations"] = rng.integers(1, 3, 2).tolist()
    if op != "Conv" and rng.random() < 0.3 and auto in ("NOTSET", ""):
        attributes["ceil_mode"] = 1
    inputs = [source, f"w{kernel[0]}{kernel[1]}"] if op == "Conv" else [source]
    return helper.make_node(op, inputs, [f"v{n}"], **attributes)


def random_model(seed: int) -> ModelProto:
    rng = np.random.default_rng(seed)
    nodes, values, windows = [], ["x"], {"x": 0}  # how many windows lie before a value: a few, or nothing is left
    for n in range(24):
        kind = rng.random()
        source = str(rng.choice([name for name in values if windows[name] < 3]))
        if kind < 0.75:
            nodes.append(window(rng, n, source))
        else:
            nodes.append(helper.make_node("Mul" if kind < 0.9 else "Max", [source, "one"], [f"v{n}"]))
        values.append(f"v{n}")
        windows[f"v{n}"] = windows[source] + (kind < 0.75)
    weights = [
        numpy_helper.from_array(np.ones((CHANNELS, CHANNELS, a, b), np.float32), f"w{a}{b}")
        for a in range(1, 4)
        for b in range(1, 4)
    ]
    weights.append(numpy_helper.from_array(np.ones((CHANNELS, 1, 1), np.float32), "one"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", CHANNELS, "H", "W"])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in values[1:]]
    graph = helper.make_graph(nodes, "g", [x], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize("seed", range(8))
def test_one_name_is_one_length(seed: int) -> None:
    model = random_model(seed)
    shapes = shapes_of(prepare(model).graph)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    named = shared = 0
    for h, w in ((31, 30), (40, 57), (64, 33)):
        lengths: dict[object, int] = {"N": 1, "H": h, "W": w}
        results = session.run(None, {"x": np.zeros((1, CHANNELS, h, w), np.float32)})
        for value, result in zip(session.get_outputs(), results, strict=True):
            for d, length in zip(shapes[value.name], np.asarray(result).shape, strict=True):
                named += isinstance(d, str)
                shared += d in lengths
                assert lengths.setdefault(d, length) == length if isinstance(d, str) else d == length, (value.name, d)
    assert shared > 0.3 * named, "hardly a name stands for two lengths"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Conv <pads = [1, 1, 1, 1]> (x, w)", ("H", "W")),
        ("y = Conv <dilations = [2, 2], pads = [3, 4, 1, 0]> (x, w)", ("H", "W")),
        ('y = Conv <auto_pad = "SAME_LOWER"> (x, w)', ("H", "W")),
        ("y = MaxPool <kernel_shape = [3, 1], pads = [1, 0, 1, 0]> (x)", ("H", "W")),
        ("y = MaxPool <kernel_shape = [1, 1], ceil_mode = 1> (x)", ("H", "W")),
        (
            "a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w) b = Conv <strides = [2, 2]> (x, v) y = Add (a, b)",
            1,
        ),
        ("a = MaxPool <kernel_shape = [2, 2]> (x) b = MaxPool <kernel_shape = [1, 1]> (x) y = Mul (a, x)", None),
    ],
)
def test_names(nodes: str, expected: object) -> None:
    """An input's, that of the first window, or one of its own."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 2, H, W] x, float[2, 2, 3, 3] w, float[2, 2, 1, 1] v) '
        f"=> (float[N, 2, P, Q] y) {{ {nodes} }}"
    )
    shapes = shapes_of(prepare(model).graph)
    if isinstance(expected, tuple):
        assert shapes["y"] == ("N", 2, *expected)
    elif expected:
        assert shapes["y"] == shapes["a"] == shapes["b"]
        assert not {"H", "W"} & set(shapes["y"])
    else:
        assert not {"H", "W"} & set(shapes["a"])
        assert shapes["b"][2:] == ("H", "W")


def test_residuals_of_images_of_any_size_sum_nothing() -> None:
    """As with lengths that are numbers; the gradient of a residual Add is the gradient of its sum."""
    graph = ob.training_graph(resnet.build(features=4), loss="softmax_cross_entropy", optimizer="sgd")
    operators = [node.op_type for node in graph.model.graph.node if node.name.startswith("Add_")]
    assert operators == ["Add"] * 8


def test_one_of_two_names_may_be_broadcast() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, H] x, float[N, K] z) => (float[N, P] y) { y = Add (x, z) }'
    )
    (n, width), h, k = shapes_of(prepare(model).graph)["y"], "H", "K"
    assert n == "N"
    assert width not in (h, k)


def test_contradictions_are_left_alone() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 2, H, W] x, float[2, 2, 3, 3] w) => (float[N, 2, P, Q] y) '
        "{ y = Conv <strides = [1, 1, 1], pads = [1, 1, 1, 1]> (x, w) }"
    )
    name_equal_lengths(model)
    assert shapes_of(model.graph)["y"] == ("N", 2, "P", "Q")


@pytest.mark.parametrize("seed", range(12))
def test_reshapes_and_products_keep_numbers_of_elements(seed: int) -> None:
    """Targets of an input's lengths, numbers and one -1, at random: lengths are those that onnxruntime runs with."""
    rng = np.random.default_rng(seed)
    parts = ["N", "T", 12, 64]
    lines, names = ["s = Shape(x)"], ["x"]
    numbers: dict[str, int] = {}
    for n in range(12):
        order = [
            [parts[k] for k in rng.permutation(4)],
            ["N", "T", 768],
            [768, "T", "N"],
            ["N", 4, 3, 64, "T"],
            ["N", 8, 96],
        ]
        target = list(order[int(rng.integers(len(order)))])
        left = int(rng.integers(len(target)))
        target[left] = -1
        entries = []
        for d in target:
            if isinstance(d, str):
                entries.append(f"{d}{n}")
                lines.append(f"{d}{n} = Slice(s, i{'NT'.index(d)}, i{'NT'.index(d) + 1})")
            else:
                entries.append(f"c{d}".replace("-", "_"))
                numbers[entries[-1]] = d
        lines += [f"t{n} = Concat <axis = 0> ({', '.join(entries)})", f"y{n} = Reshape({rng.choice(names)}, t{n})"]
        names.append(f"y{n}")
    outputs = ", ".join(f"float[] y{n}" for n in range(12))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[N, T, 768] x) => ({outputs}) {{ {" ".join(lines)} }}'
    )
    numbers |= {f"i{n}": n for n in range(3)}
    model.graph.initializer.extend(numpy_helper.from_array(np.array([v]), name) for name, v in numbers.items())
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    shapes = shapes_of(prepare(model).graph)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    known = 0
    for n, t in ((2, 4), (3, 8), (6, 2)):
        lengths: dict[object, int] = {"N": n, "T": t}
        results = session.run(None, {"x": np.zeros((n, t, 768), np.float32)})
        for value, result in zip(session.get_outputs(), results, strict=True):
            for d, length in zip(shapes[value.name], np.asarray(result).shape, strict=True):
                known += d in ("N", "T") or isinstance(d, int)
                assert lengths.setdefault(d, length) == length if isinstance(d, str) else d == length, (value.name, d)
    assert known > 0.6 * 3 * sum(len(shapes[f"y{n}"]) for n in range(12))


def test_heads_of_a_batch_of_any_size() -> None:
    """Of which both products, and what lies between them, know the number."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> m (float[N, 128, 768] x) => (float[A, B, C, D] y) {
            s = Shape(x) n = Slice(s, i0, i1) t = Concat <axis = 0> (n, rest)
            a = Reshape(x, t) q = Transpose <perm = [0, 2, 1, 3]> (a)
            b = Reshape(x, t) k = Transpose <perm = [0, 2, 3, 1]> (b)
            p = MatMul(q, k) y = Softmax(p)
        }"""
    )
    numbers = {"i0": [0], "i1": [1], "rest": [128, -1, 64]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(v), name) for name, v in numbers.items())
    shapes = shapes_of(prepare(model).graph)
    assert shapes["q"] == ("N", 12, 128, 64)
    assert shapes["p"] == shapes["y"] == ("N", 12, 128, 128)
