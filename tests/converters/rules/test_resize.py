"""Gradients of Resize are the adjoint of onnxruntime's own forward."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from tests.support.adjoint import Adjoint, adjoint_mismatches, check_adjoints, forward_session

SAMPLES = 300
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resize(
    shape: list[int] | list[str] | list[int | str],
    *,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    opset: int = 19,
    **attributes: object,
) -> ModelProto:
    """One Resize with constant scales or sizes, or both, which is wrong."""
    parameter = np.float32(scales) if scales is not None else np.array(sizes, np.int64)
    inputs = ["x", "", "parameter"] if scales is not None else ["x", "", "", "parameter"]
    if scales is not None and sizes is not None:
        inputs.append("parameter_2")
    node = helper.make_node("Resize", inputs, ["y"], name="node", **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
        [
            numpy_helper.from_array(parameter, "parameter"),
            numpy_helper.from_array(np.array(sizes or [], np.int64), "parameter_2"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def chosen(model: ModelProto) -> str:
    """The gradient operator that conversion picked."""
    graph = ob.backward(model, wrt=["x"])
    return next((n.op_type for n in graph.graph.node if n.domain == ob.DOMAIN), "Identity")


def random_case(rng: random.Random) -> tuple[list[int], dict[str, object]]:
    batch, channels = rng.randint(1, 2), rng.randint(1, 3)
    shape = [batch, channels, rng.randint(1, 9), rng.randint(1, 9)]
    wanted = [batch, channels, rng.randint(1, 9), rng.randint(1, 9)]
    mode = rng.choice(["nearest", "linear"])
    settings: dict[str, object] = {"mode": mode, "coordinate_transformation_mode": rng.choice(COORDINATES)}
    if mode == "nearest":
        settings["nearest_mode"] = rng.choice(ROUNDINGS)
    kind = rng.choice(["sizes", "sizes", "ratio", "whole", "any", "policy"])
    if kind == "sizes":
        settings["sizes"] = wanted
    elif kind == "policy":
        settings |= {"sizes": wanted[2:], "axes": [2, 3]}
        settings["keep_aspect_ratio_policy"] = rng.choice(["not_larger", "not_smaller"])
    else:
        pick = {
            "ratio": lambda i, o: o / i,
            "whole": lambda _i, _o: float(rng.randint(1, 4)),
            "any": lambda _i, _o: rng.uniform(0.4, 3.0),
        }[kind]
        settings["scales"] = [1.0, 1.0, *(pick(i, o) for i, o in zip(shape[2:], wanted[2:], strict=True))]
    return shape, settings


def test_random_configurations_against_the_forward() -> None:
    """With the lengths known and with all of them symbolic."""
    verdicts: Counter[str] = Counter()
    problems = []
    for seed in range(SAMPLES):
        rng = random.Random(seed)
        shape, settings = random_case(rng)
        symbolic = seed % 3 == 0
        model = resize([*"NCHW"] if symbolic else shape, **settings)
        x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        try:
            y = np.asarray(forward_session(model).run(None, {"x": x})[0])
        except Exception:  # noqa: BLE001 - onnxruntime refuses: not a case
            continue
        if y.size == 0:
            continue
        problems.append(Adjoint(f"{shape} {settings} symbolic={symbolic}", model, {"x": x}, ["x"], seed))
        verdicts[f"{chosen(model)}, symbolic" if symbolic else chosen(model)] += 1
    check_adjoints(problems)
    print(dict(verdicts))
    assert verdicts["ResizeGrad"] >= 100
    assert verdicts["ResizeGrad, symbolic"] >= 50


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_any_rank_and_any_axis(rank: int) -> None:
    """Batch and channel axes are resized as well."""
    shape = [3, 4, 2, 3, 2][:rank]
    for axis in range(rank):
        sizes = list(shape)
        sizes[axis] += 2
        model = resize(shape, sizes=sizes, mode="nearest", nearest_mode="round_prefer_ceil")
        x = np.random.default_rng(axis).standard_normal(shape).astype(np.float32)
        assert not adjoint_mismatches(model, {"x": x}, ["x"])


@pytest.mark.parametrize(
    ("shape", "settings", "operator"),
    [
        # what PyTorch exports
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "nearest", "nearest_mode": "floor",
                              "coordinate_transformation_mode": "asymmetric"}, "ResizeGrad"),
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "linear",
                              "coordinate_transformation_mode": "pytorch_half_pixel"}, "ResizeGrad"),
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "linear",
                              "coordinate_transformation_mode": "align_corners"}, "ResizeGrad"),
        ([1, 3, 5, 7], {"sizes": [1, 3, 1, 4], "mode": "linear",
                        "coordinate_transformation_mode": "pytorch_half_pixel"}, "ResizeGrad"),
        # ties
        ([1, 1, 4, 4], {"sizes": [1, 1, 2, 2], "mode": "nearest"}, "ResizeGrad"),
        ([1, 1, 4, 4], {"sizes": [1, 1, 2, 2], "mode": "nearest", "nearest_mode": "round_prefer_ceil"}, "ResizeGrad"),
        ([1, 1, 4, 4], {"sizes": [1, 1, 8, 8], "mode": "nearest"}, "ResizeGrad"),
        # the given scale is not O / I
        ([1, 1, 10, 10], {"scales": [1, 1, 1.28, 1.28], "mode": "linear"}, "ResizeGrad"),
        (["N", 1, "H", "W"], {"scales": [1, 1, 0.7, 0.7], "mode": "linear"}, "ResizeGrad"),
        (["N", 1, "H", "W"], {"scales": [1, 1, 2.5, 2.5], "mode": "linear",
                              "coordinate_transformation_mode": "asymmetric"}, "ResizeGrad"),
        ([2, 3, 4], {"scales": [1, 1, 1], "mode": "linear"}, "Identity"),
        # onnxruntime copies where every length is kept, whatever the scale; known or not
        ([1, 1, 4], {"scales": [1, 1, 1.2], "mode": "linear"}, "Identity"),
        (["N", 1, 4], {"scales": [1, 1, 1.2], "mode": "linear"}, "Identity"),
        (["N", 1, "H", 4], {"scales": [1, 1, 1.3, 1.2], "mode": "linear"}, "ResizeGrad"),
        (["N", 1, "H", 2], {"scales": [1, 1, 1.3, 1.2], "mode": "linear"}, "ResizeGrad"),
        ([1, 1, 4, 5], {"sizes": [1, 1, 8, 3], "mode": "cubic"}, "ResizeGrad"),
        ([1, 1, 8, 5], {"sizes": [1, 1, 3, 3], "mode": "linear", "antialias": 1}, "ResizeGrad"),
        (["N", 1, "H", "W"], {"scales": [1, 1, 2, 0.5], "mode": "cubic", "exclude_outside": 1}, "ResizeGrad"),
        ([1, 1, 5, 7], {"sizes": [1, 1, 3, 4], "mode": "linear", "coordinate_transformation_mode":
                        "tf_crop_and_resize"}, "ResizeGrad"),
        # scales of nearest whose taps depend on the lengths, and a policy that takes its scale from them
        (["N", 1, "H", "W"], {"scales": [1, 1, 0.5, 0.5], "mode": "nearest"}, "ResizeGrad"),
        (["N", 1, "H", "W"], {"sizes": [7, 7], "axes": [2, 3], "mode": "linear",
                              "keep_aspect_ratio_policy": "not_larger"}, "ResizeGrad"),
        ([1, 1, 3], {"scales": [1, 1, 0.3], "mode": "linear"}, "ResizeGrad"),
    ],
)  # fmt: skip
def test_the_gradient_is_a_copy_or_one_ResizeGrad(
    shape: list, settings: dict, operator: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = resize(shape, **settings)
    with caplog.at_level(logging.INFO, "onnx_backprop"):
        assert chosen(model) == operator
    assert f"Resize 'node' ({settings['mode']}" in caplog.text
    assert ("which is a copy; so is its gradient" in caplog.text) == (operator == "Identity")
    numbers = [d if isinstance(d, int) else {"N": 2, "H": 5, "W": 6}[d] for d in shape]
    x = np.random.default_rng(0).standard_normal(numbers).astype(np.float32)
    assert not adjoint_mismatches(model, {"x": x}, ["x"])


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners"])
def test_sizes_computed_in_the_graph(coordinates: str) -> None:
    """A U-Net resizes to the size of its skip connection, which only the run knows."""
    nodes = [
        helper.make_node("Shape", ["like"], ["sizes"]),
        helper.make_node(
            "Resize",
            ["x", "", "", "sizes"],
            ["y"],
            name="node",
            mode="linear",
            coordinate_transformation_mode=coordinates,
        ),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, ["N", 2, "H", "W"]), info("like", TensorProto.FLOAT, ["N", 2, "P", "Q"])],
        [info("y", TensorProto.FLOAT, ["N", 2, "P", "Q"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)
    rng = np.random.default_rng(0)
    for small, large in (((3, 5), (7, 9)), ((8, 8), (3, 5)), ((1, 4), (4, 1))):
        feeds = {
            "x": rng.standard_normal((2, 2, *small)).astype(np.float32),
            "like": np.zeros((2, 2, *large), np.float32),
        }
        assert not adjoint_mismatches(model, feeds, ["x"])


@pytest.mark.parametrize("how", ["scales", "sizes"])
def test_a_tangent_is_resized_likewise(how: str) -> None:
    """J·v = W·v: the gradient of ResizeGrad is the Resize, whatever the coordinates, of lengths that nobody knows."""
    x, v = np.random.default_rng(0).standard_normal((2, 1, 2, 5, 6)).astype(np.float32)
    values = {"scales": {"scales": [1, 1, 1.7, 0.6]}, "sizes": {"sizes": [1, 2, 8, 3]}}[how]
    for coordinates in COORDINATES:
        for mode in ("nearest", "linear"):
            model = resize([*"NCHW"], mode=mode, coordinate_transformation_mode=coordinates, **values)
            tangent = ob.jvp(model, wrt=["x"])
            assert [node.op_type for node in tangent.graph.node] == ["Resize", "Resize"], coordinates
            (expected,) = forward_session(model).run(None, {"x": v})
            names = ob.derivatives(tangent)[-1]
            feeds = {"x": x, names.seeds["x"]: v}
            (got,) = forward_session(tangent).run([names.results["y"]], feeds)
            np.testing.assert_array_equal(got, expected, err_msg=coordinates)


def parametric(shape: list[int] | None, inputs: dict[str, int], opset: int = 19, **attributes: object) -> ModelProto:
    """One Resize that takes roi, scales or sizes, of the given numbers of entries, from the run; all lengths unknown.

    Without a shape X has no known rank either: it comes from a Reshape.
    """
    info, names = helper.make_tensor_value_info, ["x", "roi", "scales", "sizes"]
    kinds = {"roi": TensorProto.FLOAT, "scales": TensorProto.FLOAT, "sizes": TensorProto.INT64}
    given = [info(name, kinds[name], [count]) for name, count in inputs.items()]
    connected = [name if name in ("x", *inputs) else "" for name in names]
    while not connected[-1]:
        connected.pop()
    nodes = [helper.make_node("Resize", connected, ["y"], name="node", **attributes)]
    if shape is None:
        nodes[0].input[0] = "unranked"
        nodes.insert(0, helper.make_node("Reshape", ["x", "shape"], ["unranked"]))
        given.append(info("shape", TensorProto.INT64, ["rank"]))
    x = info("x", TensorProto.FLOAT, [f"x{axis}" for axis in range(len(shape or "four"))])
    graph = helper.make_graph(nodes, "g", [x, *given], [info("y", TensorProto.FLOAT, [None] * len(shape or "four"))])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("ranked", [True, False], ids=["rank known", "rank unknown"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "nearest"},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 2.0},
        {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn"},
    ],
    ids=lambda a: "-".join(map(str, a.values())),
)
def test_everything_of_the_run(attributes: dict[str, object], ranked: bool) -> None:
    """Many runs at once: scales, sizes and roi are inputs, and no length is known."""
    rng = np.random.default_rng(0)
    shape = [2, 3, 5, 4]
    crops = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    roi = {"roi": np.float32([0, 0, 0.2, -0.3, 1, 1, 0.7, 1.2])} if crops else {}
    feeds = {"x": rng.standard_normal(shape).astype(np.float32)}
    if not ranked:
        feeds["shape"] = np.array(shape, np.int64)
    for how, runs in (
        ("scales", [[1, 1, 2, 0.5], [1, 1, 1.7, 1.2], [1, 1, 1.1, 1.2], [1, 1, 1, 1]]),
        ("sizes", [[2, 3, 7, 9], [2, 3, 1, 4], [2, 3, 5, 4], [2, 3, 2, 2]]),
    ):
        count = {"roi": 8} | {how: 4} if crops else {how: 4}
        model = parametric(shape if ranked else None, count, **attributes)
        assert chosen(model) == "ResizeGrad"
        given = [np.float32(values) if how == "scales" else np.array(values, np.int64) for values in runs]
        check_adjoints([Adjoint(f"{how} {a}", model, feeds | roi | {how: a}, ["x"]) for a in given])


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_aspect_ratio_of_sizes_of_the_run(policy: str) -> None:
    model = parametric([0] * 4, {"sizes": 2}, mode="linear", axes=[2, 3], keep_aspect_ratio_policy=policy)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    for sizes in ([7, 9], [2, 8], [1, 1], [5, 4]):
        assert not adjoint_mismatches(model, {"x": x, "sizes": np.array(sizes, np.int64)}, ["x"])


def test_a_region_for_every_axis_beside_axes() -> None:
    """Onnxruntime also takes a roi of all axes where scales are of the listed ones."""
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    crop = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "axes": [1]}
    model = parametric([0] * 2, {"roi": 4, "sizes": 1}, **crop)
    sizes = np.array([7], np.int64)
    assert not adjoint_mismatches(model, {"x": x, "sizes": sizes, "roi": np.float32([0.4, 0.1, 0.5, 0.8])}, ["x"])


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_types_of_the_region(element: int) -> None:
    roi = np.array([0, 0.25, 1, 0.75], helper.tensor_dtype_to_np_dtype(element))
    node = helper.make_node(
        "Resize", ["x", "roi", "", "sizes"], ["y"], mode="linear", coordinate_transformation_mode="tf_crop_and_resize"
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 9])],
        [numpy_helper.from_array(roi, "roi"), numpy_helper.from_array(np.array([2, 9], np.int64), "sizes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)
    dy = np.random.default_rng(0).standard_normal((2, 9)).astype(np.float32)
    # onnxruntime 1.31 refuses a forward with a roi other than float32, so onnx itself evaluates
    graph = ob.backward(model, wrt=["x"])
    del graph.functions[:]
    for node in graph.graph.node:
        node.overload = ""
    evaluator = ReferenceEvaluator(graph, new_ops=ob.reference_ops())
    (dx,) = evaluator.run(["x_grad"], {"x": np.zeros((2, 5), np.float32), "y_grad": dy})
    # x of the nine pixels: 1, 1.25, … 3
    w = np.maximum(0, 1 - np.abs(np.arange(5) - np.linspace(1, 3, 9)[:, None]))
    np.testing.assert_allclose(np.asarray(dx), dy @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sizes": [1, 1], "mode": "linear"}, ob.InvalidModelError, "sizes: expected 3 values, got [1, 1]"),
        ({"sizes": [1, 1, 8], "scales": [1, 1, 2], "mode": "linear"}, ob.InvalidModelError, "got both"),
        ({"sizes": [1, 1, 8], "mode": "smooth"}, ob.InvalidModelError,
         "attribute mode: expected one of nearest, linear, cubic, got 'smooth'"),
        ({"sizes": [1, 1, 8], "mode": "nearest", "antialias": 1}, ob.InvalidModelError,
         "attribute antialias: expected mode linear or cubic, got nearest"),
        # onnxruntime reads the policy as if no axis were listed
        ({"sizes": [8], "axes": [-1], "mode": "linear", "keep_aspect_ratio_policy": "not_larger"},
         ob.UnsupportedError, "keep_aspect_ratio_policy with negative axes"),
    ],
)  # fmt: skip
def test_refusals(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as e:
        ob.backward(resize([1, 1, 4], **settings), wrt=["x"])
    assert "Resize 'node'" in str(e.value)


@pytest.mark.parametrize(
    "attributes", [{"mode": "linear", "antialias": 1}, {"mode": "cubic"}], ids=["antialias", "cubic"]
)
def test_a_forward_that_overwrites_other_pixels_is_refused(attributes: dict[str, object]) -> None:
    """Onnxruntime 1.31 fills (N, H, W, C) as if it were (N, C, H, W); a roi inside the image is all right."""
    x = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)

    def model(start: float, end: float, axes: list[int]) -> ModelProto:
        crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "axes": axes, "extrapolation_value": 9.0}
        result = resize([2, 4, 4, 3], sizes=[6, 8], opset=19, **crop, **attributes)
        roi = np.float32([start, start, end, end])
        result.graph.initializer.append(numpy_helper.from_array(roi, "roi"))
        result.graph.node[0].input[1] = "roi"
        return result

    outside = np.asarray(forward_session(model(0, 2, [1, 2])).run(None, {"x": x})[0])
    # x of the rows is 0, 1.2, 2.4 … and of the columns 0, 0.86, 1.7, 2.6 …: as many lie inside the image
    assert (outside[:, :3, :4] == 9).any(), "a later version fills the right pixels: nothing to refuse any more"
    with pytest.raises(ob.UnsupportedError, match="onnxruntime writes extrapolation_value to other pixels"):
        ob.backward(model(0, 2, [1, 2]), wrt=["x"])
    assert not adjoint_mismatches(model(0.1, 0.9, [1, 2]), {"x": x}, ["x"])
    assert not adjoint_mismatches(model(0, 2, [2, 3]), {"x": x}, ["x"])


@pytest.mark.parametrize("opset", [10, 13, 18, 19])
@pytest.mark.parametrize("behind", [[], ["Neg"], ["Conv"], ["Neg", "Conv"]], ids="-".join)
def test_a_scale_that_two_libraries_read_differently(behind: list[str], opset: int) -> None:
    """5/3 as float32 times 3 is 4.99999990 in float64 and 5 in float32: onnx infers 4 pixels, onnxruntime makes 5."""
    model = resize([1, 1, 3], scales=[1, 1, 5 / 3], opset=opset, mode="linear")
    if opset == 10:
        del model.graph.node[0].input[1]
    for number, op_type in enumerate(behind):
        model.graph.node.append(helper.make_node(op_type, [model.graph.output[0].name], [f"after{number}"]))
        if op_type == "Conv":
            model.graph.node[-1].input.append("w")
            model.graph.node[-1].attribute.append(helper.make_attribute("pads", [1, 1]))
            model.graph.initializer.append(numpy_helper.from_array(np.float32([[[1, 2, 3]]]), "w"))
        model.graph.output[0].name = f"after{number}"
    x = np.random.default_rng(0).standard_normal((1, 1, 3)).astype(np.float32)
    assert np.asarray(forward_session(model).run(None, {"x": x})[0]).shape == (1, 1, 5)
    assert not adjoint_mismatches(model, {"x": x}, ["x"])
    stated = ModelProto()
    stated.CopyFrom(model)
    stated.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, 1, None))
    assert not adjoint_mismatches(stated, {"x": x}, ["x"])
    if opset >= 12:
        del model.graph.initializer[0]
        model.graph.node.insert(0, helper.make_node("Constant", [], ["parameter"], value_floats=[1.0, 1.0, 5 / 3]))
        assert not adjoint_mismatches(model, {"x": x}, ["x"])


def test_scales_beside_trainable_weights_are_left_alone() -> None:
    """Scales are a float initializer too; a Resize that only they reach needs no gradient."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[1,1,4] x) => (float[1,1,8] y) <float[3] s = {1,1,2}, float[1] w = {3}> {
            [skip] r = Resize <mode="cubic"> (x, , s)
            y = Mul (r, w)
        }""")
    assert [o.name for o in ob.backward(model).graph.output] == ["y", "w_grad"]
    with pytest.raises(ob.InvalidArgumentError, match="'s' does not influence y .*Resize 'skip' stops it"):
        ob.backward(model, wrt=["s"])
    assert chosen(model) == "ResizeGrad"
