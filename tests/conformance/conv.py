"""Thousands of Conv and ConvTranspose nodes: their gradients against onnxruntime's own forward.

A convolution is linear in X and in W, so for every dy, with F(x, w) the output without its bias,

    <F(x, w), dy> = <x, dx> = <w, dw>,   db = Σ dy over all axes but the channels.

Nodes are checked in batches, as independent parts of one model, through the whole converter. `python -m
tests.conformance.conv [route]` checks all of them and prints the counts.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, checker, helper

import onnx_backprop as ob
from tests.conformance.grid import Report, check_batch, reason, session_on, show

OPERATORS = ("Conv", "ConvTranspose")
RANDOM_CASES = 4400  # per operator, besides the grid over one axis
REASON = 120  # characters of one
TOLERANCE = 2e-5  # of the sum of the magnitudes
# Nodes per model. A session costs more than a node; the many small nodes of the bodies in standard operators take
# onnxruntime a time that grows faster than their number.
BATCHES = {"onnx": 32}
OTHERWISE = 64
# How much of the shapes is known at conversion: everything; all but X's batch and spatial lengths; all but those and
# the kernel's lengths; nothing, not even the ranks of X and W.
KNOWN = ("all", "weights", "channels", "nothing")
CHANNELS = ((1, 1, 1), (1, 2, 3), (2, 1, 2), (3, 1, 1), (2, 2, 1))  # groups, channels per group of X and Y

Pads = list[int]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """One node: the shapes of its inputs, its attributes, the model's opset and what is known at conversion."""

    op_type: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    bias: bool
    attributes: dict[str, Any]
    opset: int
    known: str

    def __str__(self) -> str:
        attributes = ", ".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op_type}-{self.opset}(x{list(self.x)}, w{list(self.w)}{', b' * self.bias}, {attributes}) knowing {self.known}"

    @property
    def channels(self) -> int:
        return self.w[0] if self.op_type == "Conv" else self.w[1] * self.attributes["group"]

    def arrays(self) -> Arrays:
        """What the node is fed; the same for the same case in every process."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        shapes = {"x": self.x, "w": self.w} | ({"b": (self.channels,)} if self.bias else {})
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def feeds(self, tag: str) -> Arrays:
        """The arrays by the names that `part` gives its graph inputs."""
        fed = {name + tag: array for name, array in self.arrays().items()}
        if self.known == "nothing":
            fed |= {f"{name}_shape{tag}": np.array(getattr(self, name), np.int64) for name in "xw"}
        return fed

    def part(self, tag: str) -> tuple[list[NodeProto], list[ValueInfoProto], ValueInfoProto]:
        """The node with its graph inputs and output, their names ending in `tag`."""
        known: dict[str, Sequence[int | str] | None] = {"x": self.x, "w": self.w, "b": (self.channels,)}
        if self.known in ("weights", "channels"):
            known["x"] = [d if axis == 1 else f"x{axis}{tag}" for axis, d in enumerate(self.x)]
        if self.known == "channels":
            known["w"] = [d if axis < 2 else f"w{axis}{tag}" for axis, d in enumerate(self.w)]
        names = ["x", "w", "b"] if self.bias else ["x", "w"]
        inputs = [helper.make_tensor_value_info(n + tag, TensorProto.FLOAT, known[n]) for n in names]
        nodes = []
        if self.known == "nothing":  # a graph input must have a rank, what a Reshape makes need not
            for name in names[:2]:
                shape = f"{name}_shape{tag}"
                inputs.append(helper.make_tensor_value_info(shape, TensorProto.INT64, [f"{name}_rank{tag}"]))
                nodes.append(helper.make_node("Reshape", [name + tag, shape], [f"{name}_hidden{tag}"]))
            names[:2] = ["x_hidden", "w_hidden"]
        output = helper.make_tensor_value_info(f"y{tag}", TensorProto.FLOAT, [None] * len(self.x))
        nodes.append(
            helper.make_node(self.op_type, [n + tag for n in names], [f"y{tag}"], name=f"node{tag}", **self.attributes)
        )
        return nodes, inputs, output


# ----- Which nodes --------------------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """All of them, in a fixed order."""
    for op_type in OPERATORS:
        yield from grid(op_type)
        rng = random.Random(f"{op_type} 1")
        for _ in range(RANDOM_CASES):
            yield random_case(op_type, rng)


def grid(op_type: str) -> Iterator[Case]:
    """One spatial axis: lengths 1 … 9 with kernels, strides, dilations and every kind of padding."""
    rng = random.Random(f"{op_type} 0")
    paddings: list[str | Pads] = ["VALID", "SAME_UPPER", "SAME_LOWER", [0, 0], [1, 0], [0, 2], [2, 1]]
    for length, k, s, d, padding in itertools.product(range(1, 10), range(1, 5), range(1, 4), (1, 2), paddings):
        extent = (k - 1) * d + 1
        if op_type == "Conv":
            if isinstance(padding, str) and padding.startswith("SAME"):
                if d > 1:
                    continue  # onnxruntime refuses; the random cases have some
            elif length + (sum(padding) if isinstance(padding, list) else 0) < extent:
                continue
        attributes: dict[str, Any] = {"strides": [s], "dilations": [d]}
        if op_type == "ConvTranspose":
            extra = rng.randrange(s)
            attributes |= {"output_padding": [extra]} if rng.random() < 0.7 else {}
            if isinstance(padding, list) and s * (length - 1) + extent - sum(padding) < 1:
                continue
        attributes |= {"auto_pad": padding} if isinstance(padding, str) else {"pads": padding}
        yield finish(op_type, rng, [length], [k], attributes)


def random_case(op_type: str, rng: random.Random) -> Case:
    """One to three spatial axes, attributes drawn independently for each; a few that onnxruntime refuses."""
    axes = rng.choice((1, 2, 2, 2, 3, 3))
    longest = (9, 9, 5)[axes - 1]
    padding = rng.choice(("pads", "pads", "pads", "none", "VALID", "SAME_UPPER", "SAME_LOWER"))
    shaped = op_type == "ConvTranspose" and rng.random() < 0.3
    per_axis: list[tuple[int, int, int, int, int, int, int, int]] = []
    while len(per_axis) < axes:
        k, s, d = rng.randint(1, 4), rng.randint(1, 3), rng.choice((1, 1, 2, 3))
        if op_type == "Conv" and padding.startswith("SAME") and rng.random() < 0.98:
            d = 1
        length, extent = rng.randint(1, longest), (k - 1) * d + 1
        begin, end = (rng.randint(0, 3), rng.randint(0, 3)) if padding == "pads" else (0, 0)
        extra = rng.randrange(s + (rng.random() < 0.01)) if op_type == "ConvTranspose" else 0
        full = s * (length - 1) + extent
        if op_type == "Conv" and not padding.startswith("SAME") and length + begin + end < extent:
            continue
        if op_type == "ConvTranspose" and full + extra - begin - end < 1:
            continue
        out = rng.randint(1, full + s - 1 + (rng.random() < 0.02))
        per_axis.append((length, k, s, d, begin, end, extra, out))
    lengths, kernel, strides, dilations, begins, ends, extras, outs = (list(v) for v in zip(*per_axis, strict=True))
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations}
    if padding == "pads":
        attributes["pads"] = begins + ends
    elif padding != "none":
        attributes["auto_pad"] = padding
    if shaped:
        attributes["output_shape"] = outs
    if op_type == "ConvTranspose" and rng.random() < 0.5:
        attributes["output_padding"] = extras
    return finish(op_type, rng, lengths, kernel, attributes)


def finish(op_type: str, rng: random.Random, lengths: list[int], kernel: list[int], attributes: dict[str, Any]) -> Case:
    """Draw what does not depend on the geometry: channels, bias, opset, what is known."""
    group, per_x, per_y = rng.choice(CHANNELS)
    weights = (group * per_y, per_x) if op_type == "Conv" else (group * per_x, per_y)
    if rng.random() < 0.2:
        attributes["kernel_shape"] = kernel
    known = rng.choice(("all", "all", "weights", "channels", "nothing"))
    opset = 18 if known == "nothing" else rng.choice((1, 10, 11, 18, 22))
    attributes["group"] = group
    if known == "nothing" and rng.random() < 0.5 and "pads" in attributes and "output_shape" not in attributes:
        # onnxruntime runs negative pads where it does not know the ranks beforehand
        axis = rng.randrange(2 * len(lengths))
        attributes["pads"] = [-1 if n == axis else p for n, p in enumerate(attributes["pads"])]
    return Case(
        op_type,
        (rng.choice((1, 1, 1, 2, 2, 2, 2, 0)), group * per_x, *lengths),
        (*weights, *kernel),
        rng.random() < 0.5,
        attributes,
        opset,
        known,
    )


# ----- Checking -----------------------------------------------------------------------------------------------------


def model_of(parts: Sequence[Case]) -> ModelProto:
    """One model of independent nodes, all of one opset; the names of the n-th end in n."""
    nodes, inputs, outputs = zip(*(case.part(str(n)) for n, case in enumerate(parts)), strict=True)
    opset = parts[0].opset
    assert all(case.opset == opset for case in parts)
    return helper.make_model(
        helper.make_graph(
            [n for some in nodes for n in some], "conformance", [i for some in inputs for i in some], list(outputs)
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10 if opset > 10 else 4,
    )


@lru_cache(maxsize=1024)
def forward(case: Case) -> np.ndarray | str:
    """What onnxruntime computes, or why it does not."""
    try:
        session = session_on(model_of([case]))
        return np.asarray(session.run(None, case.feeds("0"))[0])
    except Exception as e:  # noqa: BLE001 - whatever onnxruntime raises is its refusal
        return reason(str(e), REASON)


def gradients(chosen: Sequence[Case], kernels: str) -> list[tuple[np.ndarray, np.ndarray, Arrays]]:
    """Y, dy and the gradients by x, w and b of every node, from one run of one model."""
    model = model_of(chosen)
    wrt = [i.name for i in model.graph.input if "shape" not in i.name]
    graph = ob.backward(model, wrt=wrt, kernels=kernels)
    checker.check_model(graph, full_check=True)
    session = session_on(graph, ours=True)
    fed = {name: array for n, case in enumerate(chosen) for name, array in case.feeds(str(n)).items()}
    accepted = [i.name for i in session.get_inputs()]
    dys = []
    for n, case in enumerate(chosen):
        y = cast("np.ndarray", forward(case))
        rng = np.random.default_rng(zlib.crc32(f"dy {case}".encode()))
        seeded = f"y{n}_grad" not in accepted  # a single element gets 1
        assert not seeded or y.size == 1
        dys.append(np.ones_like(y) if seeded else rng.standard_normal(y.shape).astype(np.float32))
        if not seeded:
            fed[f"y{n}_grad"] = dys[-1]
    answers = dict(zip([o.name for o in session.get_outputs()], session.run(None, fed), strict=True))
    results = []
    for n, (case, dy) in enumerate(zip(chosen, dys, strict=True)):
        grads = {name: np.asarray(answers[f"{name}{n}_grad"]) for name in case.arrays()}
        results.append((np.asarray(answers[f"y{n}"]), dy, grads))
    return results


def verdict(case: Case, y: np.ndarray, dy: np.ndarray, grads: Arrays) -> str | None:
    """What is wrong with the gradients of a node, None when nothing is."""
    given, expected = case.arrays(), cast("np.ndarray", forward(case))
    if y.shape != expected.shape or not np.array_equal(y, expected):
        return f"the forward changed: {expected.shape} became {y.shape}"
    for name, array in given.items():
        if grads[name].shape != array.shape:
            return f"d{name} has shape {grads[name].shape}"
        if not np.isfinite(grads[name]).all():
            return f"d{name} is not finite"
    rest = tuple(axis for axis in range(y.ndim) if axis != 1)
    linear = y.astype(np.float64)
    if case.bias:
        linear -= given["b"].reshape(-1, *[1] * (y.ndim - 2))
        want = dy.sum(axis=rest, dtype=np.float64)
        if not np.allclose(grads["b"], want, rtol=0, atol=TOLERANCE * np.abs(dy).sum()):
            return f"db is {grads['b'].tolist()}, expected {want.tolist()}"
    pushed = linear * dy
    for name in ("x", "w"):
        pulled = given[name].astype(np.float64) * grads[name]
        scale = max(np.abs(pushed).sum(), np.abs(pulled).sum(), 1e-30)
        if not abs(pushed.sum() - pulled.sum()) <= TOLERANCE * scale:
            return f"<F, dy> = {pushed.sum():.7g} but <{name}, d{name}> = {pulled.sum():.7g}"
    return None


def report(kernels: str, chosen: Iterable[Case] | None = None) -> dict[str, Report]:
    """Check the chosen cases (default: all) on a route; one report per operator."""
    reports = {op_type: Report() for op_type in OPERATORS}
    waiting: dict[int, list[Case]] = defaultdict(list)
    size = BATCHES.get(kernels, OTHERWISE)
    for case in cases() if chosen is None else chosen:
        ran = forward(case)
        if isinstance(ran, str):
            reports[case.op_type].not_run[ran] += 1
            continue
        waiting[case.opset].append(case)
        if len(waiting[case.opset]) == size:
            _check_batch(waiting.pop(case.opset), kernels, reports)
    for rest in waiting.values():
        _check_batch(rest, kernels, reports)
    return reports


def _check_batch(batch: list[Case], kernels: str, reports: dict[str, Report]) -> None:
    def verdicts(some: Sequence[Case]) -> list[str | None]:
        return [verdict(case, *result) for case, result in zip(some, gradients(some, kernels), strict=True)]

    check_batch(batch, verdicts, reports, "op_type", REASON)


if __name__ == "__main__":
    print(show(report(sys.argv[1] if len(sys.argv) > 1 else "numpy")))
