"""The bodies of the interpolation gradients in standard operators, in sessions that know no other ones.

The references in float64 are the oracle. `KNOWLEDGE` says what a model tells of the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, checker, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset.maths.interpolation import Taps, matrix, onednn_taps, resample_taps
from onnx_backprop.opset.maths.resize import (
    COORDINATES,
    NEAREST_MODES,
    ResizeAxis,
    policy_length,
    policy_scale,
    resize_taps,
)
from tests.declarations.declaration import Example
from tests.declarations.registry import EXAMPLES
from tests.opset.bodies.body_models import (
    KNOWLEDGE,
    answer,
    assert_right,
    floats,
    int32s,
    int64s,
    model_of,
    plain_session,
    run,
)
from tests.support import single_op
from tests.support.batch import check_each, together
from tests.support.checks import evaluate

f32 = np.float32
OPS = ("InterpolateBackward", "InterpolateBackprop", "ResampleGrad", "ResizeGrad")
PUBLISHED = [example for example in EXAMPLES if example.op in OPS]
LENGTHS = range(1, 10)
Shape = tuple[int, ...]


# ----- the published examples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(single_op.ELEMENT_TYPES))
def test_worked_examples(dtype: str) -> None:
    """The model and its body pass onnx's checker and strict inference too."""
    tolerance = {"f32": 1e-6, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]

    def model(example: Example) -> ModelProto:
        return single_op.model(example.op, example.attributes, example.arrays(), dtype=dtype)

    def check(example: Example, answers: list[np.ndarray]) -> None:
        with_body, expected = ob.use_kernels(model(example), "onnx"), f32(example.expected)
        with_body.graph.output[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
        for axis in range(expected.ndim):  # full_check asks for a shape
            with_body.graph.output[0].type.tensor_type.shape.dim.add().dim_param = f"out_{axis}"
        checker.check_model(with_body, full_check=True)
        shape_inference.infer_shapes(with_body, check_type=True, strict_mode=True, data_prop=True)
        np.testing.assert_allclose(answers[0], expected, rtol=tolerance, atol=1e-7, strict=True)

    def run_each(examples: Sequence[Example]) -> list[list[np.ndarray]]:
        """Alone: in one session onnxruntime takes more than twice as long to inline these bodies, which have branches."""
        return [[run(plain_session(model(e)), e.op, e.arrays())] for e in examples]

    check_each(PUBLISHED, run_each, check)


@pytest.mark.parametrize("constants", [True, False])
def test_worked_examples_of_static_models(constants: bool) -> None:
    def model(example: Example) -> ModelProto:
        return model_of(example.op, example.attributes, example.arrays(), "static", constants)

    def check(example: Example, answers: list[np.ndarray]) -> None:
        np.testing.assert_allclose(answers[0], f32(example.expected), rtol=1e-6, atol=1e-7, strict=True)

    def run_all(examples: Sequence[Example]) -> list[list[np.ndarray]]:
        feeds = [single_op.feeds(example.op, example.arrays()) for example in examples]
        return together([model(example) for example in examples], feeds, plain_session)()

    check_each(PUBLISHED, run_all, check)


def test_bodies_use_standard_operators_only() -> None:
    for op in OPS:
        example = next(e for e in EXAMPLES if e.op == op)
        for function in ob.use_kernels(single_op.model(op, example.attributes, example.arrays()), "onnx").functions:
            assert [o.domain for o in function.opset_import] == [""]
            assert {n.domain for n in function.node} == {""}


# ----- matrices: with dy the identity, dx is W ---------------------------------------------------------------------


def assert_matrix(got: np.ndarray, taps: Taps, atol: float, what: object) -> None:
    np.testing.assert_allclose(got, matrix(taps).astype(f32), rtol=0, atol=atol, err_msg=str(what), strict=True)


@pytest.mark.parametrize(("mode", "coordinates"), list(product(("nearest", "linear"), ("half_pixel", "align_corners"))))
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_spec_matrices(mode: str, coordinates: str, data_format: str) -> None:
    """Every pair of lengths, those that tie among them, as constants and worked out by one session."""
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "data_format": data_format}
    last = data_format == "NXC"
    op, pairs = "InterpolateBackward", list(product(LENGTHS, LENGTHS))
    given: list[list[np.ndarray]] = []
    for length, out in pairs:
        source, identity = np.zeros((out, 1, length), f32), np.eye(out, dtype=f32)[:, None]
        given.append([np.moveaxis(source, 1, 2), np.moveaxis(identity, 1, 2)] if last else [source, identity])
    dynamic = plain_session(model_of(op, attributes, given[0], "symbolic", False))
    models = [model_of(op, attributes, arrays, "static", False) for arrays in given]
    static = together(models, [single_op.feeds(op, arrays) for arrays in given], plain_session)()
    for (length, out), arrays, (known,) in zip(pairs, given, static, strict=True):
        taps = onednn_taps(mode, coordinates, length, out)
        for got, what in ((known, "static"), (run(dynamic, op, arrays), "dynamic")):
            assert_matrix(got.reshape(out, length), taps, 0, (length, out, what))


RESAMPLES = [
    ([], [], []),
    ([0.3], [0.25], [1.0]),
    ([1.5], [0.5], [-0.5]),
    ([5 / 3], [0.0], [0.0]),
    ([1.0], [0.5], [-3.0]),
]


@pytest.mark.parametrize("mode", ["NEAREST_NEIGHBOR", "LINEAR"])
@pytest.mark.parametrize("numbers", RESAMPLES, ids=str)
def test_resample_matrices(mode: str, numbers: tuple[list[float], ...]) -> None:
    """The first axis is of scale 1, so that dy can be the identity."""
    given = [[*first, *rest] if rest else [] for first, rest in zip(([1.0], [0.5], [-0.5]), numbers, strict=True)]
    names = ("scales", "input_pixel_offsets", "output_pixel_offsets")
    attributes = {"interpolation_mode": mode} | dict(zip(names, given, strict=True))
    scale, first, second = (float(f32(n[0])) if n else d for n, d in zip(numbers, (None, 0.5, -0.5), strict=True))
    op, pairs = "ResampleGrad", list(product(range(1, 16), range(1, 18)))
    given_arrays = {(length, out): [np.eye(out, dtype=f32), int32s([out, length])] for length, out in pairs}
    dynamic = plain_session(model_of(op, attributes, given_arrays[pairs[0]], "symbolic", False))
    known = {pair: arrays for pair, arrays in given_arrays.items() if pair[0] % 3 == pair[1] % 3}
    models = [model_of(op, attributes, arrays, "static", True) for arrays in known.values()]
    answers = together(models, [single_op.feeds(op, arrays) for arrays in known.values()], plain_session)()
    static = dict(zip(known, answers, strict=True))
    assert scale is None or isinstance(scale, float)
    assert first is not None
    assert second is not None
    for (length, out), arrays in given_arrays.items():
        taps = resample_taps(mode, length, out, scale, first, second)
        for got in (run(dynamic, op, arrays), *static.get((length, out), ())):
            assert_matrix(got, taps, 0, (length, out))


RESIZES = [
    *({"mode": "nearest", "nearest_mode": mode} for mode in NEAREST_MODES),
    {"mode": "linear"},
    {"mode": "linear", "antialias": 1},
    {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    {"mode": "cubic"},
    {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
    {"mode": "cubic", "antialias": 1},
]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("attributes", RESIZES, ids=str)
def test_resize_matrices(coordinates: str, attributes: dict[str, Any]) -> None:
    """Every pair of lengths by sizes, and scales that are not O/I; one session works all of them out."""
    crops = coordinates == "tf_crop_and_resize"
    roi = floats([0.2, 1.3]) if crops else None
    given = attributes | {"coordinate_transformation_mode": coordinates, "axes": [1]}
    common = {"coordinates": coordinates} | ({"roi": (float(f32(0.2)), float(f32(1.3)))} if crops else {})
    common |= {k: bool(v) if k in ("antialias", "exclude_outside") else v for k, v in attributes.items()}
    by_size = [(i, o, None) for i, o in product(LENGTHS, LENGTHS)]
    scales = [float(f32(s)) for s in (0.3, 0.45, 0.7, 1.2, 1.3, 2.6)]
    by_scale = [(i, int(f32(i) * f32(s)), s) for i, s in product(LENGTHS, scales) if int(f32(i) * f32(s))]
    sessions: dict[bool, onnxruntime.InferenceSession] = {}
    for length, out, scale in by_size + by_scale:
        source, identity = np.zeros((out, length), f32), np.eye(out, dtype=f32)
        sized = scale is None
        arrays = [identity, source, roi, None if sized else floats([scale]), int64s([out]) if sized else None]
        if sized not in sessions:
            sessions[sized] = plain_session(model_of("ResizeGrad", given, arrays, "symbolic", False))
        axis = ResizeAxis(length, out, scale or float(f32(out) / f32(length)), **common)
        copied = length == out
        taps = Taps(np.arange(out)[:, None], np.ones((out, 1)), length) if copied else resize_taps(axis)
        got = run(sessions[sized], "ResizeGrad", arrays)
        assert_matrix(got, taps, 0 if attributes["mode"] == "nearest" else 3e-7, (length, out, scale))


# ----- ranks, axes, layouts, what is known --------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["InterpolateBackward", "InterpolateBackprop"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolate(op: str, data_format: str, mode: str, rng: np.random.Generator) -> None:
    for knowledge, axes, coordinates in product(KNOWLEDGE, (1, 2, 3), ("half_pixel", "align_corners")):
        source, out = (tuple(int(v) for v in rng.integers(1, 8, axes)) for _ in range(2))
        shapes = [(2, 3, *s) if data_format == "NCX" else (2, *s, 3) for s in (source, out)]
        arrays: list[np.ndarray | None] = [
            np.zeros(shapes[0], f32),
            rng.standard_normal(shapes[1]).astype(f32),
            int32s(out) if rng.random() < 0.5 else None,
        ]
        attributes: dict[str, Any] = {"mode": mode, "data_format": data_format}
        attributes["coordinate_transformation_mode"] = coordinates
        given = rng.choice(["sizes", "scales", "none"])
        if given == "sizes":
            attributes["sizes"] = list(out)
        elif given == "scales":
            attributes["scales"] = [o / i for i, o in zip(source, out, strict=True)]
        assert_right(op, attributes, arrays, knowledge, constants=bool(rng.random() < 0.5))


@pytest.mark.parametrize("mode", ["NEAREST_NEIGHBOR", "LINEAR"])
def test_resample(mode: str, rng: np.random.Generator) -> None:
    for knowledge, rank, where in product(KNOWLEDGE[:-1], (1, 2, 4), ("attribute", "input", "both")):
        source, out = (tuple(int(v) for v in rng.integers(1, 5, rank)) for _ in range(2))
        numbers = {
            "scales": rng.choice([0.5, 0.75, 1, 1.5, 2], rank).tolist(),
            "input_pixel_offsets": rng.choice([-0.5, 0, 0.25, 0.5], rank).tolist(),
            "output_pixel_offsets": rng.choice([-0.5, 0, 0.25, 0.5], rank).tolist(),
        }
        attributes: dict[str, Any] = {"interpolation_mode": mode}
        attributes |= {k: v if rng.random() < 0.5 else [] for k, v in numbers.items()}
        if where != "input":
            attributes["output_sizes"] = list(source)
        sizes = None if where == "attribute" else int32s(source)
        arrays = [rng.standard_normal(out).astype(f32), sizes]
        assert_right("ResampleGrad", attributes, arrays, knowledge, constants=bool(rng.random() < 0.5))


def resize_call(rng: np.random.Generator) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """A random call of ResizeGrad: attributes and inputs."""
    rank = int(rng.integers(1, 5))
    lengths = [int(v) for v in rng.integers(1, 9, rank)]
    outs, listed = list(lengths), list(range(rank))
    attributes: dict[str, Any] = {
        "mode": str(rng.choice(["nearest", "linear", "cubic"])),
        "coordinate_transformation_mode": str(rng.choice(COORDINATES)),
        "nearest_mode": str(rng.choice(NEAREST_MODES)),
        "exclude_outside": int(rng.integers(2)),
    }
    if attributes["mode"] != "nearest":
        attributes["antialias"] = int(rng.integers(2))
    if rng.random() < 0.5:
        listed = [int(a) for a in rng.permutation(rank)[: rng.integers(1, rank + 1)]]
        attributes["axes"] = [a - rank if rng.random() < 0.5 else a for a in listed]
    scales = sizes = roi = None
    if rng.random() < 0.5:
        scales = rng.choice([1, 1, 0.5, 2, 1.2, rng.uniform(0.5, 2.5)], len(listed)).astype(f32)
        for axis, scale in zip(listed, scales, strict=True):
            outs[axis] = int(f32(lengths[axis]) * scale)
    else:
        sizes = np.where(rng.random(len(listed)) < 0.3, [lengths[a] for a in listed], rng.integers(1, 10, len(listed)))
        attributes["keep_aspect_ratio_policy"] = str(rng.choice(["stretch", "not_larger", "not_smaller"]))
        ratios = [f32(s) / f32(lengths[a]) for a, s in zip(listed, sizes, strict=True)]
        for axis, size in zip(listed, sizes, strict=True):
            outs[axis] = int(size)
            if attributes["keep_aspect_ratio_policy"] != "stretch":
                scale = policy_scale(attributes["keep_aspect_ratio_policy"], ratios)
                outs[axis] = policy_length(float(scale), lengths[axis])
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize" and rng.random() < 0.8:
        entries = rank if rng.random() < 0.3 else len(listed)
        roi = np.concatenate([rng.uniform(-0.3, 0.5, entries), rng.uniform(0.4, 1.3, entries)]).astype(f32)
    return attributes, [rng.standard_normal(outs).astype(f32), np.zeros(lengths, f32), roi, scales, sizes]


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_resize(knowledge: str, constants: bool, rng: np.random.Generator) -> None:
    """All attributes at random; with no constants, absent inputs may also be empty ones that only the run tells."""
    for _ in range(40):
        attributes, arrays = resize_call(rng)
        if rng.random() < 0.5:
            arrays[3:] = [
                floats([]) if arrays[3] is None else arrays[3],
                int64s([]) if arrays[4] is None else arrays[4],
            ]
        if knowledge == "nothing" and ("axes" in attributes or not constants):
            with pytest.raises(ob.KernelError, match="needs to know the rank"):
                answer("ResizeGrad", attributes, arrays, knowledge, constants=constants)
            continue
        assert_right("ResizeGrad", attributes, arrays, knowledge, constants=constants)


CROPS = {"coordinate_transformation_mode": "tf_crop_and_resize"}
# attributes, X, dY, roi, scales, sizes: what the random calls meet rarely
SPECIAL: list[tuple[dict[str, Any], Shape, Shape, list[float], list[float], list[int]]] = [
    # an axis of scale 1.2 that keeps its length 4: copied beside a resized axis 1 of rank 4 if cubic, or with antialias
    ({"mode": "cubic"}, (1, 4, 4, 2), (1, 8, 4, 2), [], [1, 2, 1.2, 1], []),
    ({"mode": "cubic"}, (1, 2, 4, 4), (1, 2, 4, 8), [], [1, 1, 1.2, 2], []),
    ({"mode": "linear", "antialias": 1}, (4, 4), (4, 8), [], [1.2, 2], []),
    ({"mode": "linear"}, (4, 4), (4, 8), [], [1.2, 2], []),
    # an axis of scale 0.875 that keeps its length 3
    ({"mode": "linear", "antialias": 1, "keep_aspect_ratio_policy": "not_larger"}, (3, 8), (3, 7), [], [], [3, 7]),
    ({"mode": "cubic", "antialias": 1, "keep_aspect_ratio_policy": "not_larger"}, (3, 8), (3, 7), [], [], [3, 7]),
    # copied, but for what lies outside the region
    (CROPS | {"mode": "linear", "antialias": 1}, (4, 4), (4, 8), [-0.3, 0, 0.8, 1], [1.2, 2], []),
    # a region of the listed axes, and of every axis
    (CROPS | {"mode": "linear", "axes": [2, 1]}, (2, 5, 4), (2, 7, 3), [0.1, -0.2, 0.9, 0.7], [], [3, 7]),
    (CROPS | {"mode": "cubic", "axes": [2, 1]}, (2, 5, 4), (2, 7, 3), [0, -0.2, 0.1, 1, 0.7, 0.9], [], [3, 7]),
    # every length is kept: a copy, whatever the scales
    ({"mode": "linear"}, (4, 3), (4, 3), [], [1.2, 1.3], []),
]


@pytest.mark.parametrize("knowledge", KNOWLEDGE[:-1])
@pytest.mark.parametrize("case", SPECIAL, ids=[f"{n}-{c[0]['mode']}" for n, c in enumerate(SPECIAL)])
def test_resize_special(
    case: tuple[dict[str, Any], Shape, Shape, list[float], list[float], list[int]],
    knowledge: str,
    rng: np.random.Generator,
) -> None:
    attributes, source, out, roi, scales, sizes = case
    arrays = [
        rng.standard_normal(out).astype(f32),
        np.zeros(source, f32),
        floats(roi) if roi else None,
        floats(scales) if scales else None,
        int64s(sizes) if sizes else None,
    ]
    for constants in (True, False):
        assert_right("ResizeGrad", attributes, arrays, knowledge, constants=constants)
        with_count = model_of("ResizeGrad", attributes, arrays, knowledge, constants)
        for value in with_count.graph.input:  # numbers known to the run, how many to the model
            if value.name in ("roi", "scales", "sizes"):
                count = len({"roi": roi, "scales": scales, "sizes": sizes}[value.name])
                value.type.tensor_type.shape.dim[0].dim_value = count
        expected = evaluate("ResizeGrad", attributes, arrays)
        got = run(plain_session(with_count), "ResizeGrad", arrays)
        np.testing.assert_allclose(got, expected, rtol=4e-6, atol=1e-5, strict=True)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_are_rounded_once(dtype: str, rng: np.random.Generator) -> None:
    """600 values into one pixel: what float32 sums up is rounded when the sum is ready."""
    dy = rng.integers(1, 4, (1, 1, 600)).astype(f32)
    for op, attributes, arrays in (
        ("InterpolateBackward", {"mode": "nearest", "data_format": "NCX"}, [np.zeros((1, 1, 1), f32), dy]),
        ("ResampleGrad", {"interpolation_mode": "LINEAR", "output_sizes": [1, 1, 1]}, [dy]),
        ("ResizeGrad", {"mode": "linear"}, [dy, np.zeros((1, 1, 1), f32), None, None, int64s([1, 1, 600])]),
    ):
        if op == "ResampleGrad":
            attributes |= {"scales": [], "input_pixel_offsets": [], "output_pixel_offsets": []}
        got = run(plain_session(single_op.model(op, attributes, arrays, dtype=dtype)), op, arrays)
        expected = evaluate(op, attributes, arrays, dtype).astype(f32)
        np.testing.assert_array_equal(got, expected, strict=True)
