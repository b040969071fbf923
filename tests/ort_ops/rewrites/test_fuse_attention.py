"""Attention between products becomes a pair of operators in a training graph, with the same gradients; or stays."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.walk import attributes_of
from onnx_backprop.ort_ops.native_graph import lower

PAIR = ["AttentionForwardTraining", "AttentionBackward"]
HEADS, SIZE, LENGTH = 3, 8, 70
SCALED = "c = Constant<value_float = 0.35>() t = Mul(s, c)"
MASKED = f"{SCALED} m = Add(t, mask)"
NEVER = "n = Constant<value_float = -inf>()"


def model(
    steps: str = SCALED, *, length: object = LENGTH, dropped: str = "p", more: str = "", extra: str = ""
) -> ModelProto:
    """(batch, length, width) -> the same, through heads; `steps` lead from the product s to m, which softmax reads."""
    width = HEADS * SIZE
    last = "m" if "m = " in steps else "t" if "t = " in steps else "s"
    result = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[B, {length}, {width}] x, float[B, 1, {length}, {length}] mask, bool[{length}, {length}] hidden)
        => (float[B, {length}, {width}] y {extra}) {{
            a = MatMul(x, w) q, k, v = Split<axis = -1, num_outputs = 3>(a)
            q4 = Reshape(q, apart) k4 = Reshape(k, apart) v4 = Reshape(v, apart)
            qt = Transpose<perm = [0, 2, 1, 3]>(q4) kt = Transpose<perm = [0, 2, 3, 1]>(k4)
            vt = Transpose<perm = [0, 2, 1, 3]>(v4)
            s = MatMul(qt, kt) {steps} p = Softmax<axis = -1>({last}) {more} o = MatMul({dropped}, vt)
            ot = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(ot, joined)
        }}""")
    rng = np.random.default_rng(0)
    tensors = {
        "w": rng.standard_normal((width, 3 * width), np.float32) / 4,
        "apart": np.array([0, 0, HEADS, SIZE]),
        "joined": np.array([0, 0, width]),
        "own": rng.standard_normal((HEADS, LENGTH, LENGTH), np.float32),
        "follows": ~np.tri(LENGTH, dtype=bool),
        "soon": ~np.tri(LENGTH, k=1, dtype=bool),
    }
    result.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return result


def feeds(batch: int = 2) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(1), (batch, LENGTH, HEADS * SIZE)
    hidden = ~np.tri(LENGTH, dtype=bool)
    mask = np.where(np.tri(LENGTH, k=-3, dtype=bool) | np.eye(LENGTH, dtype=bool), 0, -np.inf)
    x, target = rng.standard_normal((2, *shape), np.float32)
    return {"x": x, "target": target, "mask": np.tile(np.float32(mask), (batch, 1, 1, 1)), "hidden": hidden}


def lowered(given: ModelProto, **settings: object) -> tuple[ob.TrainingGraph, ModelProto]:
    graph = ob.training_graph(given, loss="mse", prediction="y", wrt_inputs=["x"], **settings)
    return graph, lower(copied(graph.model), "native", [graph.loss]).model


def operators(lowered_model: ModelProto) -> list[str]:
    names = [node.op_type.removeprefix("OnnxBackprop_") for node in lowered_model.graph.node]
    return [name for name in names if name in (*PAIR, "Softmax")]


STEPS = {
    "plain": "",
    "scaled": SCALED,
    "divided": "c = Constant<value_float = 3.0>() t = Div(s, c)",
    "masked": MASKED,
    "masked twice": f"{SCALED} m2 = Add(mask, t) m = Add(m2, mask)",
    "hidden": f"{SCALED} {NEVER} m = Where(hidden, n, t)",
    "seen": f"{SCALED} {NEVER} seen = Not(hidden) m = Where(seen, t, n)",
    "both": f"{SCALED} {NEVER} m2 = Add(t, mask) m = Where(hidden, n, m2)",
}


LOWEST = (
    f"{SCALED} z = Constant<value_float = 0.0>() low = Constant<value_float = -3.4e38>() l = Where(follows, low, z)"
)
CONSTANTS = {
    "what follows": f"{SCALED} {NEVER} m = Where(follows, n, t)",
    "what follows, by the lowest number": f"{LOWEST} m = Add(t, l)",
    "a little less": f"{SCALED} {NEVER} m = Where(soon, n, t)",
}
GUARD = "gone = IsNaN(p) zero = Constant<value_float = 0.0>() d = Where(gone, zero, p)"  # of PyTorch's exporter


@pytest.mark.parametrize(
    ("steps", "length"),
    [
        *((steps, length) for steps in STEPS.values() for length in (LENGTH, "S")),
        *((steps, LENGTH) for steps in CONSTANTS.values()),
    ],
    ids=[*(f"{name}-{length}" for name in STEPS for length in (LENGTH, "S")), *CONSTANTS],
)
@pytest.mark.parametrize("guarded", [False, True])
def test_the_same_loss_and_gradients(steps: str, guarded: bool, length: object) -> None:
    guard = {"more": GUARD, "dropped": "d"} if guarded else {}
    graph, native = lowered(model(steps, length=length, **guard))
    assert operators(native) == PAIR
    written = [n.op_type for n in native.graph.node if "Attention" in n.op_type]
    assert written == [f"OnnxBackprop_{name}" for name in PAIR]  # no functions, whose nodes onnxruntime puts last
    names = [graph.loss, *graph.parameters.values(), *graph.input_gradients.values()]
    given = {name: array for name, array in feeds().items() if name in (*graph.inputs, "target")}
    expected, got = (
        ob.session(one, kernels=kernels).run(names, given)
        for one, kernels in ((graph.model, "onnx"), (native, None))
    )  # fmt: skip
    for name, ours, theirs in zip(names, got, expected, strict=True):
        scale = np.abs(np.asarray(theirs)).max()
        assert scale > 0
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=2e-6 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("steps", "causal"),
    [
        *((steps, name != "a little less") for name, steps in CONSTANTS.items()),
        (STEPS["hidden"], False),
        (f"{LOWEST} m2 = Add(t, l) m = Add(m2, mask)", False),
    ],
    ids=[*CONSTANTS, "hidden by an input", "added to an input"],
)
def test_which_masks_are_not_read(steps: str, causal: bool) -> None:
    pair = [n for n in lowered(model(steps))[1].graph.node if n.op_type.removeprefix("OnnxBackprop_") in PAIR]
    assert [(len(n.input), attributes_of(n).get("is_causal", 0)) for n in pair] == (
        [(3, 1), (6, 1)] if causal else [(4, 0), (7, 0)]
    )


STAYS = {
    "a low number": f"{SCALED} n = Constant<value_float = -1e9>() m = Where(hidden, n, t)",
    "a mask that is trained": f"{SCALED} m = Add(t, own)",
    "scaled behind the mask": "t2 = Add(s, mask) c = Constant<value_float = 0.35>() t = Mul(t2, c)",
}


@pytest.mark.parametrize("steps", STAYS.values(), ids=STAYS)
def test_what_stays(steps: str) -> None:
    assert "Softmax" in operators(lowered(model(steps))[1])


def test_probabilities_that_others_read_stay() -> None:
    dropout = "r = Constant<value_float = 0.5>() yes = Constant<value = bool {1}>() d = Dropout(p, r, yes)"
    assert "Softmax" in operators(lowered(model(more=dropout, dropped="d"))[1])
    given = model(extra=f", float[B, {HEADS}, {LENGTH}, {LENGTH}] p")
    assert "Softmax" in operators(lowered(given)[1])


@pytest.mark.parametrize("number", ["1.0", "0.0"])
def test_a_guard_that_is_none_stays(number: str) -> None:
    """It puts another number than 0 in the place of NaN, or somebody else asks where that is."""
    guard = GUARD.replace("0.0", number)
    extra = f", bool[B, {HEADS}, {LENGTH}, {LENGTH}] gone" if number == "0.0" else ""
    assert "Softmax" in operators(lowered(model(more=guard, dropped="d", extra=extra))[1])


def test_queries_that_see_no_key() -> None:
    """They put out 0, and gradients are those of the loss in float64: differences along a direction."""
    graph, native = lowered(model(MASKED, more=GUARD, dropped="d"))
    given = {name: array for name, array in feeds().items() if name in (*graph.inputs, "target")}
    given["mask"][:, :, :2] = -np.inf  # of two queries
    assert operators(native) == PAIR
    names = [graph.loss, graph.parameters["w"], graph.input_gradients["x"]]
    loss, dw, dx = map(np.asarray, ob.session(native, kernels=None).run(names, given))
    w, rng = numpy_helper.to_array(next(t for t in native.graph.initializer if t.name == "w")), np.random.default_rng(2)
    along = [rng.standard_normal(array.shape) for array in (w, given["x"])]

    def at(step: float) -> float:
        return _loss(w + step * along[0], given["x"] + step * along[1], given["mask"], given["target"])

    np.testing.assert_allclose(loss, at(0), rtol=2e-6)
    slope = sum(np.vdot(way, grad) for way, grad in zip(along, (dw, dx), strict=True))
    np.testing.assert_allclose(slope, (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-5)


def _loss(w: np.ndarray, x: np.ndarray, mask: np.ndarray, target: np.ndarray) -> float:
    """The loss of `model(MASKED)` in float64."""
    parts = np.split(x @ w, 3, axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], HEADS, SIZE).transpose(0, 2, 1, 3) for part in parts)
    scores = 0.35 * q @ k.transpose(0, 1, 3, 2) + mask
    powers = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e30))
    out = powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300) @ v
    return float(np.mean((out.transpose(0, 2, 1, 3).reshape(x.shape) - target) ** 2))


def test_few_keys_stay() -> None:
    assert operators(lowered(model(length=16))[1]) == ["Softmax"]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("causal", "masked"), [(1, False), (0, True), (1, True)])
def test_the_forward_pass_of_attention_is_shared(joined: bool, causal: int, masked: bool) -> None:
    """ONNX's Attention, by heads or with its heads side by side: its gradient would compute it again."""
    width, by_heads = HEADS * SIZE, f"q_num_heads = {HEADS}, kv_num_heads = {HEADS}, " if joined else ""
    apart = "".join(f"{x}r = Reshape({x}, apart) {x}t = Transpose<perm = [0, 2, 1, 3]>({x}r) " for x in "qkv")
    mask = ", keep" if masked else ""
    attend = f"y = Attention<{by_heads}is_causal = {causal}>(q, k, v{mask})"
    if not joined:
        attend = f"{apart} o = Attention<is_causal = {causal}>(qt, kt, vt{mask}) ot = Transpose<perm = [0, 2, 1, 3]>(o)"
        attend += " y = Reshape(ot, joined)"
    given = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 23]>
        g (float[B, S, {width}] x, bool[S, S] hidden) => (float[B, S, {width}] y) {{
            a = MatMul(x, w) q, k, v = Split<axis = -1, num_outputs = 3>(a) keep = Not(hidden) {attend} }}""")
    given.graph.initializer.extend(model().graph.initializer)
    graph, native = lowered(given)
    assert [n.op_type for n in native.graph.node if "Attention" in n.op_type] == [
        f"OnnxBackprop_{name}" for name in PAIR
    ]
    names = [graph.loss, *graph.parameters.values(), *graph.input_gradients.values(), "y"]
    fed = {name: array for name, array in feeds().items() if name in (*graph.inputs, "target")}
    expected, got = (ob.session(m, kernels=k).run(names, fed) for m, k in ((graph.model, "onnx"), (native, None)))
    for name, ours, theirs in zip(names, got, expected, strict=True):
        scale = np.abs(np.asarray(theirs)).max()
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=2e-6 * scale, err_msg=name)
