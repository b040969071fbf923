"""Files of torch.export whose optimizer repeated or transposed parameters: which rows are one parameter."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.torch_files import W, X, exported, names_of, with_operations


def test_what_was_transposed_is_the_parameter() -> None:
    file = exported("y = MatMul(x, val_1)", {"val_1": W}, "fc.weight", folded={"val_1": ["fc.weight"]})
    graph = ob.training_graph(file, loss="mse", frozen=[])
    assert list(graph.parameters) == ["val_1"]
    assert list(names_of(graph)) == ["fc.weight"]
    with pytest.raises(ob.InvalidArgumentError, match="trainable: frozen leaves nothing|no float initializer"):
        ob.training_graph(file, loss="mse", frozen=["fc.*"])


def test_a_transposed_copy_of_a_parameter_is_tied_to_it() -> None:
    """An embedding and the head that a module ties: both uses give to one gradient."""
    table = W.T.copy()  # (4, 3)
    file = exported(
        "e = Gather(emb.weight, ids) a = Add(e, x) y = MatMul(a, val_1)",
        {"emb.weight": table, "val_1": W, "ids": np.array([1, 3])},
        "emb.weight",
        folded={"val_1": ["emb.weight"]},
        x="float[2,3] x",
    )
    graph = ob.training_graph(file, loss="mse")
    assert list(graph.parameters) == ["emb.weight"]
    feeds = {"x": X, "target": np.ones((2, 4), np.float32), **graph.initial_values()}
    (gradient,) = ob.session(graph.model).run([graph.parameters["emb.weight"]], feeds)
    a = table[[1, 3]] + X
    dy = 2 * (a @ table.T - 1) / 8
    expected = dy.T @ a
    expected[[1, 3]] += dy @ table
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-4, atol=1e-6)


def test_repeated_rows_are_one_parameter() -> None:
    """A class token that a fixed batch repeats: one parameter, whose gradient is the sum over the batch."""
    token = np.float32([[0.3, -0.4, 0.9]])
    file = exported(
        "a = Add(x, expand) y = MatMul(a, fc.weight)",
        {"expand": np.repeat(token, 2, axis=0), "fc.weight": W},
        "token fc.weight",
        folded={"expand": ["token", "val_3"]},
        x="float[2,3] x",
    )
    graph = ob.training_graph(file, loss="mse")
    assert names_of(graph)["token"].shape == (1, 3)
    feeds = {"x": X, "target": np.ones((2, 4), np.float32), **graph.initial_values()}
    (gradient,) = ob.session(graph.model).run([graph.parameters["token"]], feeds)
    dy = 2 * ((X + token) @ W - 1) / 8
    np.testing.assert_allclose(np.asarray(gradient), (dy @ W.T).sum(0, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("offset", [["add", "arange", "expand", "val_3"], ["arange_5", "sub_1"]])
def test_positions_that_a_batch_repeats_are_rows_of_one_table(offset: list[str]) -> None:
    """BART: embedding(positions + 2), folded with a row for each example; a position's gradient is the batch's sum."""
    rows = np.float32([[0.3, -0.4, 0.9], [0.1, 0.2, -0.7]])
    file = exported(
        "a = Add(x, embedding_1) y = MatMul(a, fc.weight)",
        {"embedding_1": np.stack([rows, rows]), "fc.weight": W},
        "positions.weight fc.weight",
        folded={"embedding_1": [*offset, "positions.weight"]},
        x="float[2,2,3] x",
    )
    graph = ob.training_graph(file, loss="mse")
    assert names_of(graph)["positions.weight"].shape == (1, 2, 3)
    x = np.stack([X, 1 - X])
    feeds = {"x": x, "target": np.ones((2, 2, 4), np.float32), **graph.initial_values()}
    (gradient,) = ob.session(graph.model).run([graph.parameters["positions.weight"]], feeds)
    dy = 2 * ((x + rows) @ W - 1) / 16
    np.testing.assert_allclose(np.asarray(gradient), (dy @ W.T).sum(0, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(("name", "steps"), [("embedding", ["add"]), ("add_1", ["arange", "embedding"])])
def test_a_sum_that_no_position_is_computed_with_is_doubtful(name: str, steps: list[str]) -> None:
    """embedding(ids, weight + 1), embedding(positions, weight) + 1."""
    rows = np.stack([X, X])
    body = f"a = Add(x, {name}) y = MatMul(a, fc.weight)"
    folded = {name: [*steps, "w"]}
    file = exported(body, {name: rows, "fc.weight": W}, "w fc.weight", folded=folded, x="float[2,2,3] x")
    with pytest.warns(ob.OnnxBackpropWarning, match=f"does not say for sure.*'w' \\({name}\\)"):
        graph = ob.training_graph(file, loss="mse")
    assert graph.initial_values()[name].shape == rows.shape


@pytest.mark.parametrize(("kept", "other"), [("expand", "expand_1"), ("expand_1", "expand_2"), ("repeat", "tile")])
def test_equal_tokens_that_were_repeated_are_two_of_one_row(kept: str, other: str) -> None:
    """Class and distillation tokens of zeros: one constant of a fixed batch is left of both."""
    file = exported(
        f"c = Concat<axis=1>({kept}, {kept}, x) y = MatMul(c, fc.weight)",
        {kept: np.zeros((2, 1, 3), np.float32), "fc.weight": W},
        "e.cls e.dist fc.weight",
        folded={kept: ["e.cls", "val_6"]},
        modules={"c": "e"},
        x="float[2,4,3] x",
    )
    with_operations(file, {"c": f"[%{kept}, %{other}, %x], 1"})
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'e\.cls' \(the exporter.*'e\.dist' \(the exporter"):
        graph = ob.training_graph(file, loss="mse")
    assert {name: value.shape for name, value in names_of(graph).items() if "fc" not in name} == {
        "e.cls": (1, 1, 3),
        "e.dist": (1, 1, 3),
    }


def test_a_token_that_is_repeated_twice_is_one_parameter() -> None:
    """Of numbers that differ: no other parameter has them, though its module has one that nothing reads."""
    file = exported(
        "c = Concat<axis=1>(expand, expand, x) y = MatMul(c, fc.weight)",
        {"expand": np.float32([[[1, 2, 3]], [[1, 2, 3]]]), "fc.weight": W},
        "e.cls e.unused fc.weight",
        folded={"expand": ["e.cls", "val_6"]},
        modules={"c": "e"},
        x="float[2,4,3] x",
    )
    with_operations(file, {"c": "[%expand, %expand_1, %x], 1"})
    with pytest.warns(ob.OnnxBackpropWarning, match=r"no tensor for these parameters of the module: 'e\.unused'"):
        graph = ob.training_graph(file, loss="mse")
    assert sorted(names_of(graph)) == ["e.cls", "fc.weight"]


def test_a_parameter_that_a_batch_repeats_twice_is_one() -> None:
    """As the seeds of a pooling by attention, once for the queries and once beside them."""
    row = W[:1, :3] + 1
    file = exported(
        "a = Mul(x, repeat) y = Add(a, expand_1)",
        {"repeat": np.repeat(row, 2, 0), "expand_1": np.repeat(row, 2, 0)},
        "s",
        folded={"repeat": ["s", "val_0"], "expand_1": ["s", "val_0", "val_1"]},
        x="float[2,3] x",
    )
    graph = ob.training_graph(file, loss="mse")
    assert {name: value.shape for name, value in names_of(graph).items()} == {"s": (1, 3)}


def test_equal_rows_that_indices_take_are_several() -> None:
    rows = np.repeat(W[:1, :3], 2, 0)
    file = exported(
        "y = Mul(x, embedding)",
        {"embedding": rows},
        "e.weight",
        buffers="classes",
        folded={"embedding": ["e.weight", "classes"]},
        x="float[2,3] x",
    )
    with pytest.warns(ob.OnnxBackpropWarning, match="embedding"):
        graph = ob.training_graph(file, loss="mse")
    assert {name: value.shape for name, value in graph.initial_values().items()} == {"embedding": (2, 3)}
