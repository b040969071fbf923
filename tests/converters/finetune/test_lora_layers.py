"""Adapters in whole models: transposed convolutions of every kind, tied tables, trained ones; what gets none is named."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.finetune.lora import lora
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropWarning
from tests.converters.finetune.test_lora import random_values, run, tensor


def model(text: str, **tensors: np.ndarray) -> ModelProto:
    result = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {text}')
    result.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return result


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(24))
def test_a_transposed_convolution_of_any_kind(seed: int) -> None:
    """Symbolic lengths; the adapted model is the merged one, in which the node has its weight alone."""
    rng = np.random.default_rng(seed)
    axes, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))

    def some(low: int, high: int, times: int = axes) -> list[int]:
        return rng.integers(low, high, times).tolist()

    strides, kernel, dilations = some(1, 4), some(1, 4), some(1, 3)
    attributes: dict[str, object] = {"group": groups, "strides": strides, "dilations": dilations}
    lengths = some(3, 6)
    kind = ("pads", "auto_pad", "output_shape")[seed % 3]
    if kind == "pads":
        attributes["pads"] = some(0, 2, 2 * axes)
        attributes["output_padding"] = [int(rng.integers(0, stride)) for stride in strides]
    elif kind == "auto_pad":
        attributes["auto_pad"] = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    else:
        attributes["output_shape"] = [(n - 1) * s + 1 for n, s in zip(lengths, strides, strict=True)]
    w = numbers(groups * int(rng.integers(1, 4)), int(rng.integers(1, 4)), *kernel)
    x = numbers(2, w.shape[0], *lengths)
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    symbols = ["N", w.shape[0], *(f"L{n}" for n in range(axes))]
    graph = helper.make_graph(
        [node],
        "up",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, symbols)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w")],
    )
    base = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    adapted = lora(base, ["w"], 2, alpha=3.0)
    np.testing.assert_array_equal(run(adapted.model, x=x), run(base, x=x))
    values = random_values(adapted)
    whole = run(adapted.model, x=x, **values)
    assert np.abs(whole - run(base, x=x)).max() > 0.1
    np.testing.assert_allclose(run(adapted.merge(values), x=x), whole, rtol=1e-4, atol=1e-4)


TIED = """
    tied (int64[N, T] ids) => (float[N, T, 7] y)
    {
        [embed] h = Gather(w, ids)
        r = Tanh(h)
        t = Transpose <perm = [1, 0]> (w)
        [head] y = MatMul(r, t)
    }
"""


@pytest.mark.parametrize("targets", [["embed"], ["head"], ["w"]])
def test_a_table_that_is_the_head_too(targets: list[str]) -> None:
    """Each way of reading it has an adapter of its own where it is chosen; merged, none is lost."""
    base = model(TIED, w=numbers(7, 4))
    ids = np.array([[0, 3, -1], [3, 6, 3]])
    adapted = lora(base, targets, 2)
    assert len(adapted.trainable) == (4 if targets == ["w"] else 2)
    np.testing.assert_array_equal(run(adapted.model, ids=ids), run(base, ids=ids))
    values = random_values(adapted)
    factors = list(values.values())
    w = tensor(base, "w")
    table = w if targets == ["head"] else w + factors[0] @ factors[1]
    head = w.T if targets == ["embed"] else w.T + factors[-2] @ factors[-1]
    expected = np.tanh(table[ids]) @ head
    np.testing.assert_allclose(run(adapted.model, ids=ids, **values), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(adapted.merge(values), ids=ids), expected, rtol=1e-4, atol=1e-4)


def test_a_square_weight_that_is_read_transposed_and_not() -> None:
    base = model(
        """g (float[N, 4] x) => (float[N, 4] y)
        { s = Transpose <perm = [0, 1]> (w) t = Transpose <perm = [1, 0]> (w) p = MatMul(x, s) y = MatMul(p, t) }""",
        w=numbers(4, 4),
    )
    x = numbers(3, 4, seed=1)
    adapted = lora(base, ["w"], 1)
    values = random_values(adapted)
    whole = run(adapted.model, x=x, **values)
    np.testing.assert_allclose(run(adapted.merge(values), x=x), whole, rtol=1e-4, atol=1e-4)


def test_one_tensor_in_two_places_of_one_node() -> None:
    base = model("g (float[T, N, 3] x) => (float y) { y, h = RNN <hidden_size = 3> (x, w, w) }", w=numbers(1, 3, 3))
    x = numbers(4, 2, 3, seed=1)
    adapted = lora(base, ["w"], 1)
    assert len(adapted.trainable) == 4
    values = random_values(adapted)
    merged = adapted.merge(values)
    np.testing.assert_allclose(run(merged, x=x), run(adapted.model, x=x, **values), rtol=1e-4, atol=1e-4)
    assert {t.name for t in merged.graph.initializer} == {"w.new", "w.new_2"}


VOICE = """
    voice (int64[N, T] ids) => (float[N, 2, L] y)
    {
        e = Gather(emb, ids)
        s = Transpose <perm = [1, 0, 2]> (e)
        r, last = LSTM <hidden_size = 4> (s, wi, wh)
        d = Squeeze(r, one)
        c = Transpose <perm = [1, 2, 0]> (d)
        u = ConvTranspose <group = 2, strides = [2], pads = [1, 1]> (c, up)
        y = Conv <pads = [1, 1]> (u, out)
    }
"""


def voice() -> ModelProto:
    """Nodes have no names."""
    shapes = {"emb": (9, 3), "wi": (1, 16, 3), "wh": (1, 16, 4), "up": (4, 3, 4), "out": (2, 6, 3)}
    tensors = {name: numbers(*shape, seed=n) / 2 for n, (name, shape) in enumerate(shapes.items())}
    return model(VOICE, one=np.array([1]), **tensors)


def test_training_a_voice() -> None:
    adapted = lora(voice(), ["*"], 2, alpha=4)
    assert {name.split(".")[0] for name in adapted.trainable} == {"emb", "wi", "wh", "up", "out"}
    graph = ob.training_graph(adapted.model, loss="mse", trainable=adapted.trainable, optimizer="adamw")
    trainer = ob.Trainer(graph, learning_rate=0.02)
    ids = np.random.default_rng(0).integers(0, 9, (4, 5))
    goal = np.tanh(run(voice(), ids=ids)[:, ::-1])
    losses = [trainer.step(ids=ids, target=goal) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    values = trainer.parameters()
    assert all(np.abs(values[name]).max() > 1e-3 for name in adapted.trainable)
    merged = run(adapted.merge(values), ids=ids)
    np.testing.assert_allclose(merged, run(adapted.model, ids=ids, **values), rtol=1e-4, atol=1e-5)
    assert np.isclose(((merged - goal) ** 2).mean(), trainer.step(ids=ids, target=goal), rtol=1e-3)
    report = ob.check_gradients(adapted.model, wrt=list(adapted.trainable), feeds={"ids": ids, **values})
    assert report.ok, str(report)


# name -> text, tensors, the end of the warning for ["*"], of which w of the Gemm gets an adapter
LEFT_OUT = {
    "einsum": (
        'p = Gemm(x, w) y = Einsum <equation = "ij,jk->ik"> (p, k)',
        {"k": numbers(4, 4)},
        r"stay frozen: 'k' of the Einsum 'y'. To train them whole: also=\['k'\]",
    ),
    "a weight that is normalised": (
        "p = Gemm(x, w) n = ReduceL2 <keepdims = 1> (v, one) q = Div(v, n) u = Mul(q, g) y = MatMul(p, u)",
        {"v": numbers(4, 4), "g": numbers(4, 1), "one": np.array([1])},
        r"'v' of the MatMul 'y'. To train them whole: also=\['v'\]",
    ),
    "a branch": (
        """p = Gemm(x, w) yes = Constant <value = bool {1}> ()
        y = If (yes) <then_branch = a () => (float[N, 4] b) { b = MatMul(p, k) },
                      else_branch = c () => (float[N, 4] d) { d = Identity(p) }>""",
        {"k": numbers(4, 4)},
        r"'k' of the MatMul 'b'",
    ),
    "integers": (
        "p = Gemm(x, w) q, s, z = DynamicQuantizeLinear(p) i = MatMulInteger(q, k) y = Cast <to = 1> (i)",
        {"k": np.ones((4, 4), np.int8)},
        r"'k' of the MatMulInteger 'i'$",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_pattern_names_and_no_adapter_goes_beside_is_named(name: str) -> None:
    text, tensors, sentence = LEFT_OUT[name]
    base = model(f"g (float[N, 4] x) => (float[N, 4] y) {{ {text} }}", w=numbers(4, 4), **tensors)
    with pytest.warns(OnnxBackpropWarning, match=sentence) as warned:
        adapted = lora(base, ["*"], 1)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert adapted.trainable == ("w.lora_A", "w.lora_B")
    assert lora(base, ["w"], 1).trainable == adapted.trainable, "without a warning"
    left = "k" if "k" in tensors else "v"
    with pytest.raises(
        InvalidArgumentError, match=rf"'{left}\*' names '{left}' of the \w*(Einsum|MatMul)\w* '.*no adapter"
    ):
        lora(base, [f"{left}*"], 1)
    if tensors[left].dtype == np.float32:
        assert lora(base, ["*"], 1, also=[left]).trainable == ("w.lora_A", "w.lora_B", left)


def test_biases_scales_and_indices_are_no_weights() -> None:
    base = model(
        """g (float[N, 4] x) => (float[N, 3, 4] y, float[3, 2, N, 2] r)
        { a = Gemm(x, w, c) n = LayerNormalization(a, s, c) m = Mul(n, rows) p = PRelu(m, s)
          e = Gather(table, places) q = Unsqueeze(p, one) y = Add(q, e)
          t = Transpose <perm = [1, 0, 2]> (y)
          r, last = GRU <hidden_size = 2, direction = "bidirectional"> (t, v, u, bias) }""",
        w=numbers(4, 4),
        c=numbers(4),
        s=numbers(4),
        rows=numbers(1, 4),
        table=numbers(3, 4),
        places=np.array([0, 2, 1]),
        one=np.array([1]),
        v=numbers(2, 6, 4),
        u=numbers(2, 6, 2),
        bias=numbers(2, 12),
    )
    adapted = lora(base, ["*"], 1)
    assert {name.split(".")[0] for name in adapted.trainable} == {"w", "table", "v", "u"}
    with pytest.raises(InvalidArgumentError, match="matches no initializer"):
        lora(base, ["m*", "PRelu*"], 1)


def test_a_product_of_two_weights_has_one_adapter() -> None:
    base = model(
        "g (float[N, 4] x) => (float y) { p = MatMul(k, w) y = MatMul(x, p) }", k=numbers(4, 4), w=numbers(4, 4)
    )
    with pytest.warns(OnnxBackpropWarning, match="frozen: 'k' of the MatMul 'p'. To"):
        assert lora(base, ["*"], 1).trainable == ("w.lora_A", "w.lora_B")


BOUNDS = {
    "y = ConvTranspose <group = 4> (x, w)": ((8, 5, 50), 2 * 50),
    "y = MatMul(x, w)": ((7, 30, 5), 30),
    "y, h = RNN <hidden_size = 11> (x, w, v)": ((1, 11, 40), 40),
}


@pytest.mark.parametrize("text", BOUNDS)
def test_what_an_adapter_begins_with(text: str) -> None:
    shape, inputs = BOUNDS[text]
    base = model(f"g (float[N, M, K] x) => (float y) {{ {text} }}", w=numbers(*shape), v=numbers(1, 11, 11))
    adapted = lora(base, ["w"], 4)
    a, b = (tensor(adapted.model, name) for name in adapted.trainable)
    assert 0.9 < np.abs(a).max() * inputs**0.5 <= 1
    assert not b.any()


def test_a_table_begins_with_zeros() -> None:
    base = model("g (int64[N] i) => (float y) { y = Gather(w, i) }", w=numbers(90, 80))
    a, b = (tensor(m := lora(base, ["w"], 9).model, f"w.lora_{factor}") for factor in "AB")
    assert not a.any()
    assert abs(b.std() - 1) < 0.1
    assert m == lora(base, ["w"], 9).model


def test_a_packed_table_that_is_read_along_its_columns_has_none() -> None:
    packed = {"q": np.zeros((4, 16), np.uint8), "s": np.ones((4, 2), np.float32)}
    text = "y = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16, gather_axis = 1> (q, i, s)"
    with pytest.raises(InvalidArgumentError, match="'q' names 'q' of the GatherBlockQuantized 'y'"):
        lora(model(f"g (int64[N] i) => (float y) {{ {text} }}", **packed), ["q"], 1)
