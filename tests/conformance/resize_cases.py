"""Which Resize nodes the conformance grid has: modes, coordinates, roundings, policies, lengths 1 … 9, ranks 1 to 5.

Some let the run decide everything, so that one session serves many of them; the others are of images, with lengths and
scales known at conversion as far as the case says.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
KINDS: tuple[dict[str, Any], ...] = (
    *({"mode": "nearest", "nearest_mode": m} for m in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    {"mode": "linear"},
    {"mode": "linear", "antialias": 1},
    {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    {"mode": "cubic"},
    {"mode": "cubic", "exclude_outside": 1},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    {"mode": "cubic", "antialias": 1},
    {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
    {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5},
)
# Starts and ends along one axis, in units of I - 1: all of it, inside, beyond both ends, backwards, one point.
REGIONS = ((0.0, 1.0), (0.25, 0.75), (0.2, 0.8), (-0.3, 1.2), (0.9, 0.1), (0.5, 0.5), (0.0, 1.5), (-1.0, -0.5))
SCALES = (0.25, 0.3, 0.5, 0.6, 0.75, 0.9, 1.1, 1.2, 1.25, 1.5, 5 / 3, 1.7, 2.0, 2.5, 3.0)
KNOWN = ("nothing", "lengths", "scales", "all")  # at conversion; the run decides the rest
STATIC_CASES = 4000

Floats = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One node. `values` are its scales or sizes; `extra` the other attributes, sorted, so that cases can be compared."""

    shape: tuple[int, ...]
    how: str
    values: tuple[float, ...]
    extra: tuple[tuple[str, Any], ...]
    roi: Floats | None = None
    known: str = "nothing"
    opset: int = 19

    def __str__(self) -> str:
        roi = "" if self.roi is None else f", roi={list(self.roi)}"
        attributes = ", ".join(f"{k}={v}" for k, v in self.extra)
        return (
            f"Resize-{self.opset}({list(self.shape)}, {self.how}={list(self.values)}{roi}, {attributes}) "
            f"knowing {self.known}"
        )

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return dict(self.extra)

    @property
    def family(self) -> str:
        more = [name for name in ("antialias", "exclude_outside") if self.attributes.get(name)]
        return ", ".join([self.attributes["mode"], *more])

    @property
    def listed(self) -> list[int]:
        rank = len(self.shape)
        return [axis % rank for axis in self.attributes.get("axes", range(rank))]

    @property
    def is_basis(self) -> bool:
        """Whether X is the identity: the first axis keeps its length, which is the product of the others."""
        first = dict(zip(self.listed, self.values, strict=True)).get(0, self.neutral)
        return first == self.neutral and self.shape[0] == math.prod(self.shape[1:])

    @property
    def neutral(self) -> float:
        """What leaves the first axis alone; a policy would give it the scale of the others."""
        if "keep_aspect_ratio_policy" in self.attributes:
            return math.nan if 0 in self.listed else 1
        return 1 if self.how == "scales" or 0 not in self.listed else self.shape[0]

    def x(self) -> np.ndarray:
        if self.is_basis:
            return np.eye(self.shape[0], dtype=np.float32).reshape(self.shape)
        return self._random("x").standard_normal(self.shape).astype(np.float32)

    def dy(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._random("dy").standard_normal(shape).astype(np.float32)

    def _random(self, what: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{what} {self}".encode()))

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The scales or sizes, and the roi."""
        given = {self.how: np.array(self.values, np.float32 if self.how == "scales" else np.int64)}
        return given if self.roi is None else given | {"roi": np.array(self.roi, np.float32)}

    @property
    def run_time_parameters(self) -> bool:
        return self.known in ("nothing", "lengths")

    def feeds(self, tag: str = "") -> dict[str, np.ndarray]:
        """What the part named with `tag` is fed."""
        fed = {"x": self.x()} | (self.parameters if self.run_time_parameters else {})
        return {name + tag: value for name, value in fed.items()}

    def part(self, tag: str = "") -> tuple[list[ValueInfoProto], list[Any], NodeProto, ValueInfoProto]:
        """Graph inputs, initializers, the node and its output; names end in `tag`."""
        symbolic = self.known in ("nothing", "scales")
        dims = [f"x{axis}{tag}" for axis in range(len(self.shape))] if symbolic else self.shape
        inputs = [helper.make_tensor_value_info(f"x{tag}", TensorProto.FLOAT, dims)]
        initializers = []
        for name, value in self.parameters.items():
            if self.run_time_parameters:
                element = helper.np_dtype_to_tensor_dtype(value.dtype)
                inputs.append(helper.make_tensor_value_info(name + tag, element, value.shape))
            else:
                initializers.append(numpy_helper.from_array(value, name + tag))
        names = ["x", *(name if name in self.parameters else "" for name in ("roi", "scales", "sizes"))]
        if self.opset < 13 and "" in names:  # nothing is optional: empty tensors
            initializers.append(numpy_helper.from_array(np.zeros(0, np.float32), f"none{tag}"))
            names = [name or "none" for name in names[:3]] + names[3:]
        while not names[-1]:
            names.pop()
        node = helper.make_node(
            "Resize", [name and name + tag for name in names], [f"y{tag}"], name=f"node{tag}", **self.attributes
        )
        output = helper.make_tensor_value_info(f"y{tag}", TensorProto.FLOAT, [None] * len(self.shape))
        return inputs, initializers, node, output


def cases() -> Iterator[Case]:
    """All of them, in a fixed order."""
    for kind, coordinates in itertools.product(KINDS, COORDINATES):
        rng = random.Random(f"{kind} {coordinates}")
        attributes = kind | {"coordinate_transformation_mode": coordinates}
        yield from one_axis(attributes, rng)
        yield from policies(attributes, rng)
        yield from several_axes(attributes, rng)
    rng = random.Random("static")
    for _ in range(STATIC_CASES):
        yield static_case(rng)


def one_axis(attributes: dict[str, Any], rng: random.Random) -> Iterator[Case]:
    """Every length 1 … 9 to every other by sizes and by scales, ties and all, and some longer ones."""
    lengths = list(itertools.product(range(1, 10), repeat=2))
    lengths += [(rng.randint(1, 64), rng.randint(1, 64)) for _ in range(12)]
    for number, (length, out) in enumerate(lengths):
        for how in ("sizes", "scales"):
            value = out if how == "sizes" else np.float32(_some_scale(rng, length, out)).item()
            yield finish((length, length), how, [value], attributes | {"axes": [1]}, rng, number)


def _some_scale(rng: random.Random, length: int, out: int) -> float:
    """One that leads there, just beyond, or anywhere; never to nothing."""
    scale = rng.choice((out / length, (out + 0.3) / length, (out + 0.9) / length, rng.choice(SCALES)))
    return scale if int(np.float32(length) * np.float32(scale)) else out / length


def policies(attributes: dict[str, Any], rng: random.Random) -> Iterator[Case]:
    """Two axes that share a scale."""
    for number in range(24):
        h, w = rng.randint(1, 6), rng.randint(1, 6)
        policy = {"keep_aspect_ratio_policy": ("not_larger", "not_smaller")[number % 2]}
        sizes = [rng.randint(1, 9), rng.randint(1, 9)]
        axes = rng.choice(([2, 3], [3, 2]))  # onnxruntime reads negative ones as none
        yield finish((h * w, 1, h, w), "sizes", sizes, attributes | policy | {"axes": axes}, rng, number)


def several_axes(attributes: dict[str, Any], rng: random.Random) -> Iterator[Case]:
    """Ranks 1 to 5, with and without axes, the first axis among them; layouts that onnxruntime may refuse, too."""
    for layout in range(8):
        rank = rng.randint(1, 5)
        if attributes["mode"] == "nearest" or rank < 3:
            moving = sorted(rng.sample(range(rank), rng.randint(1, min(rank, 3))))
        else:
            last = rng.random() < 0.3 and attributes["coordinate_transformation_mode"] != "tf_crop_and_resize"
            moving = [1, 2] if last and rank == 4 else list(range(rank - 2, rank))
        if rng.random() < 0.05:
            moving = sorted({0, *moving})
        how = rng.choice(("sizes", "scales"))
        listed = moving if rng.random() < 0.5 else list(range(rank))
        axes = {} if len(listed) == rank else {"axes": [a - rank if rng.random() < 0.3 else a for a in listed]}
        for number in range(5):
            shape = [rng.randint(1, 5) for _ in range(rank)]
            if 0 not in moving and math.prod(shape[1:]) <= 100:
                shape[0] = math.prod(shape[1:])
            values: list[float] = []
            for axis in listed:
                if axis not in moving:
                    values.append(1.0 if how == "scales" else shape[axis])
                elif how == "sizes":
                    values.append(rng.randint(1, 7))
                else:
                    values.append(np.float32(_some_scale(rng, shape[axis], rng.randint(1, 7))).item())
            yield finish(tuple(shape), how, values, attributes | axes, rng, layout + number)


def static_case(rng: random.Random) -> Case:
    """One node of images of which conversion knows at least the lengths or the scales, in any opset."""
    attributes = rng.choice(KINDS) | {"coordinate_transformation_mode": rng.choice(COORDINATES)}
    h, w = rng.randint(1, 6), rng.randint(1, 6)
    how = rng.choice(("sizes", "scales"))
    outs = [rng.choice((rng.randint(1, 9), 2 * length)) for length in (h, w)]
    if how == "scales":
        values: list[float] = [np.float32(_some_scale(rng, i, o)).item() for i, o in zip((h, w), outs, strict=True)]
        if rng.random() < 0.25:
            values = [float(rng.randint(1, 3))] * 2
    else:
        values = list(outs)
    shape, first = (h * w, 1, h, w), [1.0, 1.0] if how == "scales" else [h * w, 1]
    opset = rng.choice((11, 13, 18, 19, 19, 19))
    if "antialias" in attributes:
        opset = max(opset, 18)
    if attributes["coordinate_transformation_mode"] == "half_pixel_symmetric":
        opset = 19
    if opset >= 18 and rng.random() < 0.5:
        attributes |= {"axes": [2, 3]}
        first = []
        if how == "sizes" and rng.random() < 0.4:
            attributes["keep_aspect_ratio_policy"] = rng.choice(("not_larger", "not_smaller"))
    elif rng.random() < 0.2:  # channels last
        shape, values = (h * w, h, w, 1), [first[0], *values, first[1]]
        first = []
    known = rng.choice(("all", "all", "scales", "lengths"))
    return finish(shape, how, [*first, *values], attributes, rng, rng.randrange(8), known=known, opset=opset)


def finish(
    shape: tuple[int, ...],
    how: str,
    values: Sequence[float],
    attributes: dict[str, Any],
    rng: random.Random,
    number: int,
    *,
    known: str = "nothing",
    opset: int = 19,
) -> Case:
    """Add a region of interest where one is needed."""
    roi = None
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        regions = [REGIONS[(number + n) % len(REGIONS)] for n in range(len(values))]
        roi = (*(r[0] for r in regions), *(r[1] for r in regions))
        if "axes" in attributes and rng.random() < 0.3:
            attributes = attributes | {"extrapolation_value": 0.5}
    frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in attributes.items()))
    return Case(shape, how, tuple(values), frozen, roi, known, opset)
