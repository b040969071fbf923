"""The row of an embedding that torch does not train, by what torch.export writes, and by its zeros."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, StringStringEntryProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.origins import FX

IDS = np.array([[0, 2, 1], [1, 0, 4]])
TABLE = np.random.default_rng(5).standard_normal((5, 3)).astype(np.float32)
BODY = "rows = Gather(table, ids) y = Mul(rows, rows)"


def padded(row: int) -> np.ndarray:
    table = TABLE.copy()
    table[row] = 0
    return table


def file_of(table: np.ndarray, body: str = BODY, fx: str = "") -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (int64[2,3] ids) => (float[2,3,3] y) {{ {body} }}'
    )
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    if fx:
        node = next(node for node in model.graph.node if node.op_type == "Gather")
        node.metadata_props.append(StringStringEntryProto(key=FX, value=fx))
    return model


def gradient_of(file: ModelProto) -> tuple[np.ndarray, str]:
    """dL/dtable of L = Σ (t - y)² / n by a step of SGD, and what is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(file, loss="mse", optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=1.0)
    before = trainer.parameters()["table"].copy()
    trainer.step(ids=IDS, target=np.ones((2, 3, 3), np.float32))
    return before - trainer.parameters()["table"], "\n".join(str(w.message) for w in caught)


def expected(table: np.ndarray, row: int | None) -> np.ndarray:
    w = table.astype(np.float64)
    result = np.zeros_like(w)
    for i in IDS.ravel():
        result[i] += 2 * (w[i] ** 2 - 1) * 2 * w[i] / (IDS.size * w.shape[1])
    if row is not None:
        result[row] = 0
    return result


def called(row: str) -> str:
    return f"%e : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%p_e, %ids{row}), k"


@pytest.mark.parametrize(
    ("table", "fx", "row", "warned"),
    [
        (TABLE, called(", 1"), 1, False),  # by the file, whatever is in it, as of a trained model
        (TABLE, called(", 0, False, True"), 0, False),
        (padded(2), called(""), None, False),  # the file says that there is none
        (padded(2), called(", -1"), None, False),
        (padded(2), called(f", {'9' * 5000}"), None, False),
        (padded(0), "", 0, True),
        (padded(4), "", 4, True),
        (TABLE, "", None, False),
        (np.vstack([padded(0)[:4], np.zeros((1, 3), np.float32)]), "", None, False),  # two rows of zeros
    ],
)
def test_the_row_of_padding_gets_no_gradient(table: np.ndarray, fx: str, row: int | None, warned: bool) -> None:
    body = BODY.replace("y = Mul(rows, rows)", "s = Add(rows, rows) h = Mul(s, rows) y = Mul(h, half)")
    file = file_of(table, body, fx)
    file.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "half"))
    got, text = gradient_of(file)
    np.testing.assert_allclose(got, expected(table, row), rtol=1e-5, atol=1e-7)
    assert (f"{row} of 'table'" in text) is warned


@pytest.mark.filterwarnings("ignore:these rows of tables are all zeros")
def test_a_tied_head_trains_the_row_all_the_same() -> None:
    """As in torch: what the embedding gives gets no gradient, the product with the table does."""
    body = "rows = Gather(table, ids) m = ReduceMean<keepdims=0>(table, zero) s = Add(rows, m) y = Mul(s, s)"
    file = file_of(padded(0), body)
    file.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    graph = ob.training_graph(file, loss="mse", optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=1.0)
    trainer.step(ids=IDS, target=np.ones((2, 3, 3), np.float32))
    assert np.abs(trainer.parameters()["table"][0]).min() > 1e-3


@pytest.mark.parametrize(
    "body",
    [
        "rows = Gather(table, places) b = Cast<to=1>(ids) u = Unsqueeze(b, last) y = Mul(rows, u)",  # positions
        "rows = Gather<axis=1>(table, ids) t = Transpose<perm=[1,2,0]>(rows) s = Slice(t, zero, three, last) y = Mul(s, s)",
    ],
)
def test_what_is_no_embedding_of_the_input(body: str) -> None:
    table = np.vstack([np.zeros((1, 3), np.float32), TABLE[:4]]) if "places" in body else padded(0)[:, [0, 1, 2, 0, 1]]
    file = file_of(table, body)
    tensors = {"places": np.arange(3), "last": np.array([-1]), "zero": np.array([0]), "three": np.array([3])}
    file.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tensors.items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(file, loss="mse")
    assert not any("all zeros" in str(w.message) for w in caught)


def test_a_guess_is_said_of_a_table_that_is_asked_for() -> None:
    with pytest.warns(ob.OnnxBackpropWarning, match="0 of 'table'.* get no gradient"):
        ob.training_graph(file_of(padded(0)), loss="mse", trainable=["table"])


@pytest.mark.parametrize(
    "places",
    [
        "s = Shape(x) n = Gather(s, zero) ids = Range(zero, n, unit)",  # positions
        "ids = ArgMin<axis=1, keepdims=0>(x)",  # of the nearest entry of a codebook
    ],
)
def test_rows_that_no_label_chooses_are_trained(places: str) -> None:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[4,5] x) => (float[4,3] y) {{ {places} '
        "rows = Gather(table, ids) y = Sin(rows) }"
    )
    arrays = {"table": padded(0), "zero": np.array(0), "unit": np.array(1)}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items() if n in read)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"), learning_rate=1.0)
    trainer.step(x=np.eye(4, 5, dtype=np.float32)[:, ::-1].copy(), target=np.ones((4, 3), np.float32))
    assert np.abs(trainer.parameters()["table"][0]).min() > 0.1  # where cos 0 is 1
    assert not any("get no gradient" in str(w.message) for w in caught)


def test_a_stated_row_of_places_that_the_file_has() -> None:
    """As torch has it: nothing of that row is trained, whatever computes the places."""
    file = file_of(TABLE, "rows = Gather(table, places) b = Cast<to=1>(ids) u = Unsqueeze(b, last) y = Mul(rows, u)")
    file.graph.node[0].metadata_props.append(StringStringEntryProto(key=FX, value=called(", 1")))
    tensors = {"places": IDS, "last": np.array([-1])}
    file.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tensors.items())
    got, warned = gradient_of(file)
    assert not got[1].any()
    assert np.abs(got[2]).min() > 1e-3
    assert "all zeros" not in warned
