"""The way back: scales from data, what shares a scale, what is refused, what is said."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.quantized import records
from onnx_backprop.converters.quantized.numbers import packed
from tests.converters.quantized.form import F32, f32, ints, other_names, real, scale
from tests.converters.quantized.forms import FORMS
from tests.converters.quantized.test_forms import again, changed, run, tensors

STATIC = FORMS["a Relu that is gone"]


def model(nodes: str, arrays: dict[str, np.ndarray], x: str = "float[N, 4] x", y: str = "float[N, M] y") -> ModelProto:
    """A model with some constants."""
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> m ({x}) => ({y}) {{ {nodes} }}'
    )
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    return proto


def put(floats: ModelProto, **arrays: np.ndarray) -> ModelProto:
    """A model with other numbers in some tensors."""
    result = ModelProto()
    result.CopyFrom(floats)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(arrays[tensor.name], F32), tensor.name))
    return result


def test_scales_of_values_come_from_the_data() -> None:
    """s = (max - min) / 255 with 0 in between, z making 0 exact; behind a Relu from 0 on; and the file is near again."""
    original = replace(STATIC, tensors=dict(STATIC.tensors) | {"zu": np.array(100, np.uint8)}).model()
    floats = ob.dequantize(original)
    x = np.array([[-3.0, 6.5, 0, 0.1, 1, 2], [9.2, -1, 0.5, 0, 3, 1]], F32)  # beyond what the file's scales reach
    weight = real(tensors(original)["w_quantized"], 0.01) * 3
    trained = put(floats, w=weight)
    back = ob.requantize(trained, original, calibration=[{"x": x[:1], "target": np.zeros(3)}, (x[1:],)])
    arrays = tensors(back)
    np.testing.assert_allclose(arrays["sx"], (9.2 + 3.0) / 255, rtol=1e-6)
    assert arrays["zu"].dtype == np.uint8
    assert arrays["zu"] == round(3.0 / float(arrays["sx"]))
    behind = np.maximum(x.astype(np.float64) @ weight, 0)
    np.testing.assert_allclose(arrays["sy"], behind.max() / 255, rtol=1e-5)
    assert arrays["zr"] == -128
    y = -np.maximum(x.astype(np.float64) @ real(arrays["w_quantized"], arrays["sw"]), 0)
    bound = float(np.abs(weight).sum(axis=0).max() * arrays["sx"] / 2 + arrays["sy"] / 2)
    np.testing.assert_allclose(run(back, x), y, rtol=0, atol=bound * 1.001)
    assert np.abs(run(again(trained, original), x) - y).max() > 4 * bound  # which the file's scales cut


def test_a_symmetric_range_stays_symmetric() -> None:
    """The zero point in the middle is kept: s = max |x| / 127."""
    original = model(
        "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w_quantized, sw) y = MatMul(d, v)",
        {"s": scale(0.01), "z": np.array(0, np.int8), "sw": scale(0.01), "w_quantized": ints("int8", 4, 2)},
    )
    x = np.array([[0.3, -2.0, 1.0, 0.0]], F32)
    arrays = tensors(ob.requantize(ob.dequantize(original), original, calibration={"x": x}))
    np.testing.assert_allclose(arrays["s"], 2.0 / 127, rtol=1e-6)
    assert arrays["z"] == 0


def test_the_integers_that_a_clip_leaves() -> None:
    """s = (max - min) / 127 where a tool has limited eight bits to seven."""
    form = FORMS["seven bits by Clip"]
    original = form.model()
    arrays = tensors(ob.requantize(ob.dequantize(original), original, calibration={"x": form.x}))
    np.testing.assert_allclose(arrays["s"], (form.x.max() - form.x.min()) / 127, rtol=1e-6)


def test_a_single_number() -> None:
    """Of no axis, with a zero point at the end of its range: it keeps both, and its scale where it has not changed."""
    given = {"c_quantized": np.array(127, np.int8), "s": scale(0.002), "z": np.array(-128, np.int8)}
    original = model("c = DequantizeLinear(c_quantized, s, z) y = Mul(x, c)", given)
    floats = ob.dequantize(original)
    assert tensors(floats)["c"].shape == ()
    np.testing.assert_allclose(tensors(floats)["c"], 0.51, rtol=1e-6)
    for name, array in tensors(ob.requantize(floats, original)).items():
        np.testing.assert_allclose(array.astype(float), given[name].astype(float), rtol=1e-6)
    arrays = tensors(ob.requantize(put(floats, c=np.array(0.255)), original))
    np.testing.assert_allclose(arrays["s"], 0.001, rtol=1e-6)
    assert (arrays["c_quantized"], arrays["z"]) == (127, -128)


def test_without_data_it_says_that_scales_stay() -> None:
    original = STATIC.model()
    with pytest.warns(ob.OnnxBackpropWarning, match=r"the scales of values .* stay .*\(2\): 'x', 'h'\..*calibration="):
        back = ob.requantize(ob.dequantize(original), original)
    assert tensors(back)["sx"] == tensors(original)["sx"]


def test_runs_that_compute_scales_need_no_data() -> None:
    """No warning (which would be an error), and calibration changes nothing."""
    form = FORMS["MatMulInteger"]
    original = form.model()
    trained = changed(ob.dequantize(original), form)
    without, with_data = (ob.requantize(trained, original, calibration=c) for c in (None, {"x": form.x}))
    assert without.SerializeToString(deterministic=True) == with_data.SerializeToString(deterministic=True)


def test_floats_that_the_file_rounds_itself() -> None:
    """QuantizeLinear of a weight: the floats are those of `trained`, the scales fit them."""
    original = FORMS["a float weight"].model()
    w = f32(6, 4, size=3)
    floats = ob.dequantize(original)
    np.testing.assert_array_equal(tensors(floats)["w"], tensors(original)["w"])
    arrays = tensors(ob.requantize(put(floats, w=w), original))
    np.testing.assert_array_equal(arrays["w"], w)
    np.testing.assert_allclose(arrays["sw"], np.abs(w).max(axis=0) / 127, rtol=1e-6)
    np.testing.assert_array_equal(arrays["zw"], np.zeros(4, np.int8))


def test_a_training_that_rounding_undoes() -> None:
    original = FORMS["MatMulInteger"].model()
    floats = ob.dequantize(original)
    w = tensors(floats)["w"]
    moved = put(floats, w=w + np.where(np.abs(w) < 0.9, 0.001, 0))  # a tenth of a step, the largest number stays
    with pytest.warns(ob.OnnxBackpropWarning, match=r"by (\d\.\de-04) .* by \1: much of it may be lost"):
        back = ob.requantize(moved, original)
    np.testing.assert_array_equal(tensors(back)["w_quantized"], tensors(original)["w_quantized"])


def _two(w: str, v: str) -> ModelProto:
    """Two weights, of what two DequantizeLinear read: one scale, or one tensor of integers with two scales."""
    q, zero = ints("int8", 4, 4), np.array(0, np.int8)
    given = {"w_quantized": q, "v_quantized": q.T.copy(), "s": scale(0.01), "t": scale(0.02), "z": zero, "u": zero}
    read = {name for names in (w, v) for name in names.split(", ")}
    return model(
        f"a = DequantizeLinear({w}) h = MatMul(x, a) b = DequantizeLinear({v}) y = MatMul(h, b)",
        {name: array for name, array in given.items() if name in read},
    )


ONE_TENSOR = ("w_quantized, s", "w_quantized, t")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("zeros", [("", ""), (", z", ", z"), (", z", ", u")])
def test_a_shared_scale_fits_the_largest(zeros: tuple[str, str], order: int) -> None:
    """Whether the zero point is one tensor too, two equal ones, or none."""
    w, v = (f"{name}, s{zero}" for name, zero in zip(("w_quantized", "v_quantized")[::order], zeros, strict=True))
    original = _two(w, v)
    floats = ob.dequantize(original)
    new = {name: tensors(floats)[name] * factor for name, factor in (("w", 3), ("v", 0.5))}
    arrays = tensors(ob.requantize(put(floats, **new), original))
    np.testing.assert_allclose(arrays["s"], 0.03, rtol=1e-6)
    for name, array in new.items():
        assert np.abs(real(arrays[f"{name}_quantized"], arrays["s"]) - array).max() <= 0.5001 * 0.03


@pytest.mark.parametrize("names", ["as they are", "constants"])
def test_shared_integers_part(names: str) -> None:
    """One tensor of integers that stood for two weights becomes two where these differ."""
    original = _two(*ONE_TENSOR) if names == "as they are" else other_names(_two(*ONE_TENSOR), names)
    floats = ob.dequantize(original)
    weights = sorted(name for name, array in tensors(floats).items() if array.shape == (4, 4))
    assert len(weights) == 2
    new = {name: f32(4, 4) for name in weights}
    back = ob.requantize(put(floats, **new), original)
    onnx.checker.check_model(back, full_check=True)
    assert {t.name for t in back.graph.initializer if t.data_type == TensorProto.INT8} >= {"w_quantized_2"}
    now = tensors(ob.dequantize(back))
    parts = sorted((now[n] for n in now if now[n].shape == (4, 4)), key=lambda a: float(a[0, 0]))
    for got, array in zip(parts, sorted(new.values(), key=lambda a: float(a[0, 0])), strict=True):
        assert np.abs(got - array).max() <= 0.51 * np.abs(array).max() / 127


def test_a_bias_that_would_not_fit_32_bits() -> None:
    """The weight's scale grows until the bias does."""
    original = model(
        "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w_quantized, sw) "
        "c = DequantizeLinear(b_quantized, sb) y = Gemm(d, v, c)",
        {"s": scale(1e-3), "z": np.array(0, np.int8), "w_quantized": ints("int8", 4, 2), "sw": scale(1e-5)}
        | {"b_quantized": np.array([5, -7], np.int32), "sb": scale(1e-8)},
    )
    floats = ob.dequantize(original)
    arrays = tensors(again(put(floats, b=np.array([90.0, -50.0])), original))
    np.testing.assert_allclose(real(arrays["b_quantized"], arrays["sb"]), [90, -50], rtol=1e-6)
    np.testing.assert_allclose(arrays["sb"], arrays["s"] * arrays["sw"], rtol=1e-6)


def test_weights_in_branches() -> None:
    """Of an If: the weight is a parameter, trains, and goes back where it was."""
    inner = "then () => (float[N, M] t) { w = DequantizeLinear(w_quantized, s) t = MatMul(x, w) }"
    other = "other () => (float[N, M] e) { e = Identity(x) }"
    original = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (float[N, 4] x) => (float[N, M] y) '
        f"{{ c = ReduceSum <keepdims = 0> (x) z = Constant <value_float = -1e9> () b = Greater(c, z) "
        f"y = If (b) <then_branch = {inner}, else_branch = {other}> }}"
    )
    then = next(a.g for a in original.graph.node[-1].attribute if a.name == "then_branch")
    q = ints("int8", 4, 4)
    then.initializer.extend([numpy_helper.from_array(q, "w_quantized"), numpy_helper.from_array(scale(0.01), "s")])
    floats = ob.dequantize(original)
    weight = next(name for name, array in tensors(floats).items() if array.shape == (4, 4))
    np.testing.assert_allclose(tensors(floats)[weight], real(q, 0.01), rtol=1e-6)
    x = f32(3, 4)
    np.testing.assert_allclose(run(floats, x), run(original, x), rtol=0, atol=1e-5)
    graph = ob.training_graph(floats, loss="mse")
    assert weight in graph.parameters
    new = f32(4, 4)
    back = ob.requantize(put(floats, **{weight: new}), original)
    np.testing.assert_allclose(run(back, x), x @ new, rtol=0, atol=4 * np.abs(x).max() * np.abs(new).max() / 127)


def test_paths_and_other_floats(tmp_path: Path) -> None:
    """Files by their paths; floats of the original are those of the trained model; the files stay as they are."""
    form = FORMS["MatMulInteger"]
    onnx.save(form.model(), tmp_path / "original.onnx")
    floats = ob.dequantize(tmp_path / "original.onnx")
    onnx.save(put(floats, b=np.arange(4)), tmp_path / "trained.onnx")
    before = (tmp_path / "original.onnx").read_bytes()
    back = ob.requantize(str(tmp_path / "trained.onnx"), tmp_path / "original.onnx")
    np.testing.assert_array_equal(tensors(back)["b"], np.arange(4))
    assert (tmp_path / "original.onnx").read_bytes() == before


def test_other_types() -> None:
    """16 bits, and float16 scales: the float model has weights of that type."""
    q = ints("int8", 4, 2).astype(np.int16) * 200
    original = model(
        "v = DequantizeLinear(w_quantized, s) y = MatMul(x, v)",
        {"w_quantized": q, "s": np.array(2**-12, np.float16)},
        "float16[N, 4] x",
        "float16[N, M] y",
    )
    floats = ob.dequantize(original)
    assert tensors(floats)["w"].dtype == np.float16
    np.testing.assert_allclose(tensors(floats)["w"], q * 2.0**-12, rtol=1e-3)
    integers = tensors(ob.requantize(floats, original))["w_quantized"]
    assert integers.dtype == np.int16
    assert (
        np.abs(integers.astype(int) * float(tensors(ob.requantize(floats, original))["s"]) - q * 2.0**-12).max() < 4e-3
    )


def test_outputs_and_inputs_of_integers() -> None:
    """An output of integers becomes one of floats under its name; an input of integers stays."""
    original = model(
        "d = DequantizeLinear(x, s, z) v = DequantizeLinear(w_quantized, sw) p = MatMul(d, v) y = QuantizeLinear(p, sy, z)",
        {"s": scale(0.1), "z": np.array(3, np.uint8), "w_quantized": ints("int8", 4, 2), "sw": scale(0.01)}
        | {"sy": scale(0.05)},
        "uint8[N, 4] x",
        "uint8[N, M] y",
    )
    floats = ob.dequantize(original)
    assert floats.graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    assert [v.name for v in floats.graph.output] == ["y"]
    assert floats.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    x = np.arange(8, dtype=np.uint8).reshape(2, 4)
    expected = real(x, 0.1, 3) @ real(ints_of(original, "w_quantized"), 0.01)
    np.testing.assert_allclose(run(floats, x), expected, rtol=1e-5)
    with pytest.warns(ob.OnnxBackpropWarning, match="8 of the 9 numbers"):  # the other one is the input's scale
        graph = ob.training_graph(floats, loss="mse", optimizer="sgd")
    assert list(graph.parameters) == ["w"]
    back = again(graph.inference_model(), original)
    assert back.graph.output[0].type.tensor_type.elem_type == TensorProto.UINT8
    np.testing.assert_array_equal(run(back, x), run(original, x))


def ints_of(given: ModelProto, name: str) -> np.ndarray:
    return tensors(given)[name]


REFUSED = {
    "no batch": (lambda f: f, {"calibration": []}, "at least one batch"),
    "no x": (lambda f: f, {"calibration": [{"u": np.zeros((1, 6), F32)}]}, "'x' is missing"),
    "not finite": (lambda f: f, {"calibration": [{"x": np.full((1, 6), np.inf, F32)}]}, "'x' is not finite"),
    "NaN in the second": (
        lambda f: f,
        {"calibration": [{"x": np.ones((1, 6), F32)}, {"x": np.full((1, 6), np.nan, F32)}]},
        "'x' is not finite on it, in batch 1",
    ),
    "another name": (lambda f: _renamed(f), {"calibration": {"x": np.ones((1, 6), F32)}}, "'w' is missing"),
    "another shape": (lambda f: put(f, w=np.ones((6, 3))), {"calibration": {"x": np.ones((1, 6), F32)}}, "shape"),
}


def _renamed(floats: ModelProto) -> ModelProto:
    result = put(floats)
    next(t for t in result.graph.initializer if t.name == "w").name = "v"
    return result


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, given, sentence = REFUSED[name]
    original = STATIC.model()
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        ob.requantize(change(ob.dequantize(original)), original, **given)


@pytest.mark.parametrize("call", [ob.dequantize, lambda m: ob.requantize(m, m)])
def test_a_float_model_is_refused(call: object) -> None:
    floats = ob.dequantize(STATIC.model())
    assert callable(call)
    with pytest.raises(ob.InvalidArgumentError, match=r"quantised"):
        call(floats)


def test_a_warning_is_of_the_line_that_calls() -> None:
    original = STATIC.model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.requantize(ob.dequantize(original), original)
    assert [Path(w.filename).name for w in caught] == [Path(__file__).name]


def test_fractional_zero_points_give_the_same_bytes() -> None:
    """Of an untrained model: 7.5 as the zero point of four bits."""
    rng = np.random.default_rng(0)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", n]) for name, n in (("x", 32), ("y", 5)))
    node = helper.make_node(
        "MatMulNBits", ["x", "w_Q4", "s", "z"], ["y"], domain="com.microsoft", K=32, N=5, bits=4, block_size=16
    )
    arrays = {
        "w_Q4": rng.integers(0, 256, (5, 2, 8)).astype(np.uint8),
        "s": np.full((5, 2), 0.1, F32),
        "z": np.full((5, 2), 7.5, F32),
    }
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in arrays.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    original = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    back = tensors(ob.requantize(ob.dequantize(original), original))
    np.testing.assert_array_equal(back["w_Q4"], arrays["w_Q4"])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_that_are_unpacked_apart_are_those_unpacked_together(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """(q - z) · s of 40 columns in blocks of 16, each row with other scales and zero points."""
    rng = np.random.default_rng(bits)
    q = rng.integers(0, 1 << bits, (7, 48)).astype(np.uint8)
    z, s = rng.integers(0, 1 << bits, (7, 3)).astype(np.uint8), rng.random((7, 3), F32) + F32(0.1)
    arrays = {"w": packed(q, bits, 48 * bits // 8).reshape(7, 3, -1), "s": s}
    arrays["z"] = packed(z, bits, -(-3 * bits // 8))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", n]) for name, n in (("x", 40), ("y", 7)))
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s", "z"], ["y"], domain="com.microsoft", K=40, N=7, bits=bits, block_size=16
    )
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in arrays.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    original = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    monkeypatch.setattr(records, "_AT_ONCE", 80)  # two rows
    (weight,) = (array for array in tensors(ob.dequantize(original)).values() if array.shape == (40, 7))
    expected = (q.astype(np.float64) - np.repeat(z, 16, axis=1)) * np.repeat(s, 16, axis=1)
    np.testing.assert_array_equal(weight, expected[:, :40].T.astype(F32))


BRANCH = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x, bool c) => (float[N, 4] y) {
    y = If (c) <
        then_branch = t () => (float[N, 4] o1) {
            a = Mul(x, wf) q1 = QuantizeLinear(a, s, z) o1 = DequantizeLinear(q1, s, z) },
        else_branch = e () => (float[N, 4] o2) { o2 = Mul(x, wf) }
    > }"""


def test_scales_inside_branches_that_stay_are_named() -> None:
    original = parser.parse_model(BRANCH)
    arrays = {"s": np.float32(0.05), "z": np.int8(0), "wf": np.ones(4, F32)}
    original.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in arrays.items())
    floats = ob.dequantize(original)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"the scales of values .* stay .*\(1\).* inside branches"):
        ob.requantize(floats, original, calibration=[{"x": np.full((2, 4), 100, F32), "c": np.array(True)}])


def test_a_value_that_is_zero_on_all_data_keeps_its_zero_point() -> None:
    original = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 4] y) {
        q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }""")
    arrays = {"s": np.float32(0.05), "z": np.uint8(100)}
    original.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in arrays.items())
    stored = tensors(ob.requantize(ob.dequantize(original), original, calibration={"x": np.zeros((2, 4), F32)}))
    assert (stored["s"], stored["z"]) == (np.float32(0.05), 100)


def layer(dtype: type, size: float) -> ModelProto:
    """y = x·w, whose largest integer is 46 of 127."""
    original = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({"float16" if dtype is np.float16 else "float"}[N, 4] x) => (
        {"float16" if dtype is np.float16 else "float"}[N, 4] y) {{
        w = DequantizeLinear(w_quantized, s) y = MatMul(x, w) }}""")
    arrays = {"s": np.asarray(size, dtype), "w_quantized": (46 * np.eye(4)).astype(np.int8)}
    original.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in arrays.items())
    return original


def test_a_layer_that_training_has_not_moved_keeps_its_integers() -> None:
    original = layer(np.float32, 0.013)
    assert ob.requantize(ob.dequantize(original), original).SerializeToString() == original.SerializeToString()


def test_scales_that_a_half_type_does_not_hold_are_refused() -> None:
    original = layer(np.float16, 2e-7)
    floats = ob.dequantize(original)
    small = put(floats, w=tensors(floats)["w"] * np.float16(0.1))
    with pytest.raises(ob.InvalidArgumentError, match="'s' of type float16 cannot hold the scale"):
        ob.requantize(small, original)


@pytest.mark.parametrize("calibration", [5, "data.npz", [None], [np.ones((1, 6), F32)]])
def test_what_is_no_calibration_is_refused(calibration: object) -> None:
    original = STATIC.model()
    with pytest.raises(ob.InvalidArgumentError, match="calibration: expected batches"):
        ob.requantize(ob.dequantize(original), original, calibration=calibration)


@pytest.mark.parametrize(
    "end", ["y = QuantizeLinear(p, sy, z)", "q = QuantizeLinear(p, sy, z) y = DequantizeLinear(q, sy, z)"]
)
def test_the_scale_of_an_output_comes_from_the_data(end: str) -> None:
    """Its value has another name in the float model than behind its node; the other scales are those of their values."""
    original = model(
        "c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) v = DequantizeLinear(w_quantized, sw) "
        f"p = MatMul(d, v) {end}",
        {"s": scale(0.1), "z": np.array(0, np.int8), "w_quantized": ints("int8", 4, 2), "sw": scale(0.01)}
        | {"sy": scale(0.05)},
        y="int8[N, M] y" if end.startswith("y") else "float[N, M] y",
    )
    floats = ob.dequantize(original)
    x = np.array([[3.0, -6, 1, 0], [1, 2, 5, -4]], F32)
    changed = tensors(ob.requantize(floats, original, calibration={"x": x}))
    y = x.astype(np.float64) @ real(tensors(original)["w_quantized"], 0.01)
    np.testing.assert_allclose(changed["s"], 6.0 / 127, rtol=1e-6)
    np.testing.assert_allclose(changed["sy"], np.abs(y).max() / 127, rtol=1e-5)
