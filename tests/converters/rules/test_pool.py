"""Gradients of pooling, against onnxruntime's own pools."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

import onnx_backprop as ob
from tests.support.adjoint import forward_session, run
from tests.support.gradient_checks import LINEAR, PIECEWISE, SMOOTH, VARIANTS, Case, build, case, check_cases

WINDOWS = [  # x, attributes
    ((2, 2, 6), "kernel_shape = [3]"),
    ((2, 2, 7), "kernel_shape = [3], strides = [2]"),
    ((1, 2, 7), "kernel_shape = [2], strides = [3]"),
    ((2, 3, 4, 5), "kernel_shape = [2, 3]"),
    ((2, 3, 4, 5), "kernel_shape = [2, 2], strides = [2, 2]"),
    ((1, 2, 5, 6), "kernel_shape = [3, 2], strides = [1, 2], pads = [1, 0, 1, 1]"),
    ((1, 2, 5, 6), "kernel_shape = [3, 3], strides = [2, 2], pads = [0, 1, 2, 1]"),
    ((1, 1, 3, 3, 4), "kernel_shape = [2, 1, 3], strides = [1, 2, 1], pads = [1, 0, 0, 0, 0, 2]"),
    ((2, 1, 3, 3), "kernel_shape = [3, 3]"),
    ((0, 2, 4, 4), "kernel_shape = [2, 2]"),
]
# onnx's shape inference counts a last window that begins in the padding behind x; onnxruntime, rightly, does not, and
# so refuses such a model when its shapes are written in
MISCOUNTED = ("static", "half")
CEIL = [  # x, attributes, variants that onnxruntime does not run
    ((1, 2, 6), "kernel_shape = [3], strides = [2]", ()),
    ((1, 2, 7), "kernel_shape = [2], strides = [3]", ()),
    ((1, 2, 6, 7), "kernel_shape = [3, 2], strides = [2, 4]", MISCOUNTED),
    ((1, 2, 4, 6), "kernel_shape = [3, 3], strides = [2, 3], pads = [1, 1, 1, 1]", ()),
    ((1, 2, 5, 5), "kernel_shape = [2, 2], strides = [3, 2], pads = [0, 1, 1, 0]", MISCOUNTED),
    ((1, 1, 2, 3), "kernel_shape = [2, 2], strides = [2, 2], pads = [0, 0, 1, 1]", MISCOUNTED),
]
DILATED = [
    ((1, 2, 7), "kernel_shape = [2], dilations = [3]"),
    ((1, 2, 7), "kernel_shape = [3], dilations = [2], pads = [2, 1], strides = [2]"),
    ((1, 2, 6, 7), "kernel_shape = [2, 3], dilations = [2, 2], pads = [1, 0, 0, 2]"),
    ((1, 2, 6, 7), "kernel_shape = [2, 2], dilations = [3, 1], strides = [2, 2], ceil_mode = 1"),
]
SAME = [
    ((1, 2, 5), "kernel_shape = [3], strides = [2]"),
    ((1, 2, 7), "kernel_shape = [2], strides = [3]"),
    ((1, 2, 6, 7), "kernel_shape = [3, 4], strides = [2, 3]"),
    ((1, 2, 5, 5), "kernel_shape = [2, 4]"),
]


def ints(**values: list[int]) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


def pools(op: str, oracle: Any, extras: tuple[str, ...], since: int) -> list[Case]:
    """Every window with every extra attribute; dilations from `since` on."""
    return [
        *(
            case(f"y = {op} <{attributes}{extra}> (x)", x=x, oracle=oracle)
            for (x, attributes), extra in itertools.product(WINDOWS, extras)
        ),
        *(
            case(f"y = {op} <{attributes}, ceil_mode = 1{extra}> (x)", x=x, oracle=oracle, skips=skips)
            for (x, attributes, skips), extra in itertools.product(CEIL, extras)
        ),
        *(
            case(f"y = {op} <{attributes}{extra}> (x)", x=x, oracle=oracle, since=since)
            for (x, attributes), extra in itertools.product(DILATED, extras)
        ),
        *(
            case(f'y = {op} <{attributes}, auto_pad = "{auto_pad}"{extra}> (x)', x=x, oracle=oracle)
            for (x, attributes), extra in itertools.product(SAME, extras)
            for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
        ),
    ]


CASES = [
    *(
        case(
            f"y = Col2Im {attributes} (x, image, block)",
            oracle=LINEAR,
            x=x,
            constants={"image": np.array(image), "block": np.array(block)},
        )
        for attributes, x, image, block in [
            ("", (2, 8, 12), [4, 5], [2, 2]),
            ("<strides = [2, 3], pads = [1, 0, 0, 2]>", (1, 6, 6), [4, 7], [2, 3]),
            ("<dilations = [2, 1]>", (1, 4, 12), [6, 4], [2, 2]),
            ("", (2, 6, 3), [5], [3]),
        ]
    ),
    *pools("MaxPool", PIECEWISE, ("",), since=18),
    *pools("AveragePool", LINEAR, ("", ", count_include_pad = 1"), since=19),
    *pools("LpPool", SMOOTH, ("", ", p = 1", ", p = 3"), since=18),
    *(  # onnxruntime 1.31 has no kernel for version 22
        case(f"y = GlobalLpPool <p = {p}> (x)", x=x, oracle=SMOOTH, until=21)
        for p in (1, 2, 3)
        for x in [(2, 3, 4), (2, 2, 3, 2), (1, 2, 2, 3, 2), (2, 2, 1, 1)]
    ),
    *(
        case(f"y = Col2Im {attributes} (x, image, block)", x=x, constants=ints(image=image, block=block), oracle=LINEAR)
        for attributes, x, image, block in [
            ("", (1, 4, 6), [3, 4], [2, 2]),
            ("<strides = [2, 1]>", (2, 12, 4), [4, 3], [2, 2]),
            ("<pads = [1, 0, 0, 2]>", (1, 6, 15), [3, 5], [2, 3]),
            ("<dilations = [2, 1], pads = [1, 1, 1, 1]>", (1, 4, 12), [3, 3], [2, 2]),
            ("<strides = [2]>", (2, 6, 3), [7], [3]),
            ("", (1, 8, 4), [2, 3, 3], [2, 2, 2]),
        ]
    ),
    case("y = MaxPool <kernel_shape = [2, 2], storage_order = 1> (x)", x=(1, 2, 4, 3), oracle=PIECEWISE),
    case("y, i = MaxPool <kernel_shape = [2, 2]> (x)", x=(1, 2, 4, 3), oracle=PIECEWISE, op="MaxPool"),
    case("y = MaxPool <kernel_shape = [3], dilations = [3], pads = [2, 2]> (x)", x=(1, 2, 4), oracle=PIECEWISE),
    *(
        case(f"y = {op}(x)", x=x, oracle=oracle)
        for op, oracle in [("GlobalAveragePool", LINEAR), ("GlobalMaxPool", PIECEWISE)]
        for x in [(2, 3, 4), (2, 2, 3, 2), (1, 2, 2, 3, 2), (2, 2, 1, 1)]
    ),
]


@pytest.mark.parametrize(
    ("attributes", "emitted"),
    [
        ("", True),
        ("pads = [1, 0], count_include_pad = 1, ", True),
        ("ceil_mode = 1, ", True),
        ('auto_pad = "SAME_LOWER", count_include_pad = 1, ', True),
        ("dilations = [1], ", True),
        # the last window is then divided by less than all of its cells
        ("ceil_mode = 1, count_include_pad = 1, ", False),
        ("dilations = [2], ", False),
        # onnxruntime's own padding
        ('auto_pad = "SAME_UPPER", strides = [3], ', False),
    ],
)
def test_what_avg_pool_backward_is_for(attributes: str, emitted: bool) -> None:
    text = f"y = AveragePool <{attributes}kernel_shape = [2]> (x)"
    model, _, wrt = build(case(text, x=(1, 2, 7)), opset=19)
    assert [f.name for f in ob.backward(model, wrt=wrt).functions] == ["AvgPoolBackward"] * emitted
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    assert not ob.backward(model, wrt=wrt).functions


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


SINCE = {"MaxPool": {"ceil_mode": 10, "dilations": 10}, "LpPool": {"ceil_mode": 18, "dilations": 18}}
SINCE["AveragePool"] = {"ceil_mode": 10, "dilations": 19, "count_include_pad": 7}


def drawn(op: str, rank: int, opset: int, rng: np.random.Generator) -> NodeProto:
    """One of the pools that onnxruntime runs at an opset, most with ceil_mode; none that is refused."""
    kernel, strides, gaps = (rng.integers(1, most, rank).tolist() for most in (4, 4, 3))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    more = {"ceil_mode": int(rng.random() < 0.8), "count_include_pad": int(rng.random() < 0.6), "dilations": gaps}
    since = SINCE[op]
    attributes |= {
        k: v for k, v in more.items() if since.get(k, 99) <= opset and (k != "dilations" or rng.random() < 0.3)
    }
    auto_pad = rng.choice(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
    if auto_pad == "NOTSET":
        attributes["pads"] = [int(rng.integers(k)) for k in kernel * 2]
    elif auto_pad == "VALID":
        attributes["auto_pad"] = "VALID"
    else:  # those that leave out pixels: `test_gradients_of_pixels_that_same_leaves_out`
        attributes |= {"auto_pad": str(auto_pad), "strides": np.minimum(kernel, strides).tolist()}
    return helper.make_node(op, ["x"], ["y"], **attributes)


def pool_model(nodes: list[NodeProto], shape: tuple[int, ...], opset: int) -> ModelProto:
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for node in nodes for name in node.output]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "pools", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [10, 18, 19, 22])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op", SINCE)
def test_pools_with_static_shapes(op: str, rank: int, opset: int) -> None:
    """Where inference counts a window that onnxruntime does not run, its constant folding believes inference."""
    rng = np.random.default_rng(opset)
    shape = (1, 1, *(6, 5, 4)[:rank])
    nodes = [drawn(op, rank, opset, rng) for _ in range(6)]
    if rank == 2 and "ceil_mode" in SINCE[op] and SINCE[op]["ceil_mode"] <= opset:  # AvgPool2d of PyTorch
        attributes = {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}
        nodes.append(helper.make_node(op, ["x"], ["y"], pads=[1, 1, 1, 1], **attributes))
        nodes.append(helper.make_node(op, ["x"], ["y"], auto_pad="VALID", **attributes))
        if op == "AveragePool":
            nodes.append(helper.make_node(op, ["x"], ["y"], pads=[1, 1, 1, 1], count_include_pad=1, **attributes))
            # without ceil_mode onnxruntime does not run it before opset 19
            attributes |= {"auto_pad": "SAME_LOWER", "strides": [2, 4]}
            nodes.append(helper.make_node(op, ["x"], ["y"], count_include_pad=1, **attributes))
    for n, node in enumerate(nodes):
        node.output[0] = f"y{n}"
    model = pool_model(nodes, shape, opset)
    x = (rng.permutation(np.prod(shape)) / 4 + 1).reshape(shape).astype(np.float32)
    v = rng.uniform(-0.1, 0.1, shape).astype(np.float32)
    plain = forward_session(model)
    y, above, below = (run(plain, {"x": one}) for one in (x, x + v, x - v))
    session = ob.session(ob.vjp(model, ["x"], [node.output[0] for node in nodes]))
    dy = {f"y{n}_grad": np.zeros_like(value) for n, value in enumerate(y)}
    for n, node in enumerate(nodes):
        seed = rng.standard_normal(y[n].shape).astype(np.float32)
        same, dx = map(np.asarray, session.run([f"y{n}", "x_grad"], {"x": x, **dy, f"y{n}_grad": seed}))
        np.testing.assert_allclose(same, y[n], rtol=1e-6, err_msg=str(node), strict=True)
        expected = ((above[n].astype(np.float64) - below[n]) * seed).sum() / 2
        np.testing.assert_allclose((dx * v).sum(), expected, rtol=2e-3, atol=2e-3, err_msg=str(node))
