"""Parquet and Arrow files as rows: their values, the order of an epoch, who reads what, and what is refused."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop.training.data import columns, order
from onnx_backprop.training.data.order import BlockOrder
from onnx_backprop.training.data.rows import StoredRows
from onnx_backprop.training.data.stored import read_rows
from tests.onnx_backprop.distributed.threads import Threads, on_ranks

pa, feather, parquet = map(import_module, ("pyarrow", "pyarrow.feather", "pyarrow.parquet"))
Arrays = dict[str, np.ndarray]
ROWS, BLOCK = 23, 4


def arrays(rng: np.random.Generator, rows: int = ROWS) -> Arrays:
    x = rng.standard_normal((rows, 2, 3)).astype(np.float32)
    return {
        "tensor": x,
        "fixed": x[:, 0].copy(),
        "lists": x.astype(np.float64),
        "labels": rng.integers(0, 9, rows),
        "flags": rng.random((rows, 3)) < 0.5,
        "half": x[:, 1, :1].astype(np.float16),
        "codes": rng.integers(5, 7, rows).astype(np.int16),
    }


def fixed(array: np.ndarray) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), int(np.prod(array.shape[1:])))


def table_of(given: Arrays) -> Any:
    x = given["tensor"]
    stored = {name: pa.array(array) for name, array in given.items() if array.ndim == 1}
    stored |= {name: fixed(given[name]) for name in ("fixed", "flags", "half")}
    stored["tensor"] = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), x.shape[1:]), fixed(x))
    stored["lists"] = pa.array(given["lists"].tolist(), pa.list_(pa.large_list(pa.float64())))
    stored["codes"] = stored["codes"].dictionary_encode()
    return pa.table(stored | {"text": ["nobody asks for it"] * len(x)})


def write(path: Path, table: Any, block: int = BLOCK) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=block)
    else:
        feather.write_feather(
            table, path, compression="lz4" if path.suffix == ".feather" else "uncompressed", chunksize=block
        )


@pytest.mark.parametrize("suffix", columns.SUFFIXES)
def test_rows_are_those_of_the_columns(rng: np.random.Generator, tmp_path: Path, suffix: str) -> None:
    """In files of several lengths, one of them empty."""
    given = arrays(rng)
    for n, (start, end) in enumerate(itertools.pairwise((0, 9, 9, 16, ROWS))):
        write(tmp_path / f"part{n}{suffix}", table_of({name: array[start:end] for name, array in given.items()}))
    rows = read_rows(tmp_path)
    assert {*rows} == {*given, "text"}
    for name, array in given.items():
        assert (rows[name].shape, rows[name].dtype) == (array.shape, array.dtype)
        for wanted in ([22, 0, 4, 3, 22], slice(2, 20, 3), []):
            np.testing.assert_array_equal(rows[name][wanted], array[wanted])
    write(tmp_path / f"one{suffix}", table_of(given))
    np.testing.assert_array_equal(read_rows(tmp_path / f"one{suffix}")["lists"][:], given["lists"])


@pytest.mark.parametrize(("lanes", "size", "whole"), [(1, 5, False), (2, 5, True), (3, 7, False), (6, 6, False)])
def test_an_epoch_has_every_row_once(lanes: int, size: int, whole: bool) -> None:
    starts = np.array([0, 4, 8, 9, 16, 16 + BLOCK, ROWS])
    epochs = []
    for epoch in (0, 1, 0):
        chosen = BlockOrder(starts, size, lanes, seed=3, epoch=epoch)
        epochs.append([chosen.batch(n).tolist() for n in range(ROWS // size if whole else -(-ROWS // size))])
    assert epochs[0] == epochs[2] != epochs[1]
    assert [len(batch) for batch in epochs[0]] == [size] * (ROWS // size) + [ROWS % size] * (not whole)
    drawn = [row for batch in epochs[0] for row in batch]
    assert len({*drawn}) == len(drawn)
    assert {*drawn} <= {*range(ROWS)}


def test_batches_mix_blocks_and_ranks_read_their_own(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is decoded once an epoch, and by few ranks; their rows together are those of one process."""
    rows, block, size = 240, 10, 12
    given = {"x": rng.standard_normal((rows, 4)).astype(np.float32), "labels": np.arange(rows)}
    write(tmp_path / "a.parquet", pa.table({"x": fixed(given["x"]), "labels": given["labels"]}), block)
    decoded: list[int] = []
    decode = columns._File.column

    def counted(self: columns._File, name: str, n: int) -> np.ndarray:
        decoded.extend([n] if name == "x" else [])
        return decode(self, name, n)

    def loader(**more: Any) -> ob.Batches:
        stored = read_rows(tmp_path / "a.parquet")
        result = ob.Batches({name: stored[name] for name in given}, size, seed=5, **more)
        decoded.clear()
        return result

    monkeypatch.setattr(columns._File, "column", counted)
    monkeypatch.setattr(order, "_MOST_STREAMS", 4)
    alone = list(loader())
    assert rows // block - 1 <= len(decoded) <= rows // block + 4  # the first was known; lanes meet within a block
    for batch in alone:
        np.testing.assert_array_equal(batch["x"], given["x"][batch["labels"]])
        assert len({*(batch["labels"] // block).tolist()}) >= 3
    np.testing.assert_array_equal([b["labels"] for b in loader().since(7)], [b["labels"] for b in alone[7:]])
    shards = []
    for rank in range(4):
        shards.append(list(loader().shards(rank, 4)))
        assert len({*decoded}) <= rows // block // 4 + 2
    for n, batch in enumerate(alone):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([shard[n][name] for shard in shards]), array)
    in_order = [batch["labels"] for batch in loader(shuffle=False)]
    np.testing.assert_array_equal(np.concatenate(in_order), given["labels"])


def test_what_is_held_stays_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": np.arange(100.0)}), 10)
    monkeypatch.setattr(columns, "_HELD", 3 * 80)
    x = read_rows(tmp_path / "a.parquet")["x"]
    assert isinstance(x, columns.BlockRows)
    for wanted in (np.arange(99, -1, -1), [5, 95, 15, 25, 35]):
        np.testing.assert_array_equal(x[wanted], np.asarray(wanted, float))
        assert len(x._held) == 3


def test_training_resumes_in_the_middle_of_an_epoch(rng: np.random.Generator, tmp_path: Path) -> None:
    """Bit for bit on as many ranks, within rounding on others."""
    image = rng.standard_normal((22, 1, 8, 8)).astype(np.float32)
    tensors = {"image": image, "target": (image > 0.3).astype(np.float32)}
    kind = pa.fixed_shape_tensor(pa.float32(), (1, 8, 8))
    write(
        tmp_path / "a.parquet",
        pa.table({name: pa.ExtensionArray.from_storage(kind, fixed(a)) for name, a in tensors.items()}),
    )
    graph = ob.training_graph(unet_resize.build(features=2), loss="mse", optimizer=ob.optimizers.SGD())
    path = tmp_path / "c.safetensors"

    def trained(communicator: Threads | None, *, stop: int = 99, resume: bool = False) -> Arrays:
        trainer = ob.Trainer(graph, kernels="onnx", learning_rate=0.1, communicator=communicator)
        if resume:
            trainer.load(path)
        stored = read_rows(tmp_path / "a.parquet")
        loader = ob.Batches({name: stored[name] for name in tensors}, 5, seed=1)
        trainer.fit(loader, 2, callbacks=[lambda _, record: record.step == stop], checkpoint=path)
        return trainer.state()

    expected = on_ranks(2, trained)[0]
    on_ranks(2, lambda c: trained(c, stop=6))
    kept = path.read_bytes()
    path.write_bytes(kept)
    again = on_ranks(2, lambda c: trained(c, resume=True))[1]
    path.write_bytes(kept)
    alone = trained(None, resume=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
        np.testing.assert_allclose(alone[name], value, atol=3e-7, err_msg=name)


def refused(path: Path, table: Any, name: str, words: str) -> None:
    write(path, table)
    with pytest.raises(ob.InvalidArgumentError, match=words):
        read_rows(path)[name][:]


@pytest.mark.parametrize("suffix", columns.SUFFIXES)
def test_what_is_no_array_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    for values, words in (
        ([1.0, None], "'x' has rows without a value. Fill them"),
        ([[1.0, None], [2.0, 3.0]], "without a value"),
        ([[1.0], None], "without a value"),
        ([[1.0], [2.0, 3.0]], "expected lists of one length, got 1 and 2. Pad them"),
        ([[[1.0], [2.0]], [[1.0, 1.0], [2.0]]], "expected lists of one length"),
        (["a", "b"], "expected numbers or lists of them, got string"),
        ([{"a": 1}, {"a": 2}], "expected numbers or lists of them, got struct"),
        ([], "has no rows"),
    ):
        refused(path, pa.table({"x": pa.array(values, pa.null() if not values else None)}), "x", words)
    lists = pa.array([[1.0]] * BLOCK + [[1.0, 2.0]] * BLOCK)
    refused(path, pa.table({"x": lists}), "x", r"expected rows of float64\[1\], as in .*, got float64\[2\]")
    turned = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0])
    stored = fixed(np.ones((2, 6), np.float32))
    refused(path, pa.table({"x": pa.ExtensionArray.from_storage(turned, stored)}), "x", "in row-major order")
    with ob.limits(npz_bytes=100):
        write(path, pa.table({"x": np.ones(40)}), 40)
        with pytest.raises(ob.InvalidArgumentError, match=r"a block of 320 bytes.*smaller row groups.*npz_bytes"):
            read_rows(path)["x"]


def test_files_that_are_damaged_or_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write(path, pa.table({"x": np.arange(2000.0)}), 2000)
    content = path.read_bytes()
    x = read_rows(path)["x"]
    for damaged in (b"", b"PAR1", content[:-20], b"\0" * len(content)):
        path.write_bytes(damaged)
        with pytest.raises(ob.InvalidArgumentError, match=r"data: .*a\.parquet: it cannot be read"):
            read_rows(path)
    write(path, pa.table({"x": np.arange(9.0)}), 9)
    assert isinstance(x, columns.BlockRows)
    x._held.clear()
    with pytest.raises(ob.InvalidArgumentError, match="has become another"):
        x[[3]]
    write(tmp_path / "b.parquet", pa.table({"y": np.arange(9.0)}))
    with pytest.raises(ob.InvalidArgumentError, match=r"b\.parquet: expected a column 'x', got 0"):
        read_rows(tmp_path)["x"]
    (tmp_path / "c.npz").touch()
    with pytest.raises(ob.InvalidArgumentError, match=r"got \.npz and \.parquet"):
        read_rows(tmp_path)
    (tmp_path / "c.npz").unlink()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ob.InvalidArgumentError, match=r"read by pyarrow.*pip install 'onnx-backprop\[parquet\]'"):
        read_rows(tmp_path)


def test_the_order_of_rows_that_lie_in_memory_is_a_permutation_of_numpy(rng: np.random.Generator) -> None:
    """Which checkpoints rely on."""
    loader = ob.Batches({"x": np.arange(ROWS)}, 5, seed=4)
    loader.set_epoch(2)
    expected = np.random.default_rng([4, 2]).permutation(ROWS)
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in loader]), expected)


@pytest.mark.parametrize("count", [2, 3, 16, 17, 1000])
def test_the_order_of_very_many_rows_is_computed_by_parts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Every row once, in an order of every epoch's own, which looks like no other."""
    monkeypatch.setattr(order, "_LISTED", 1)
    loader = ob.Batches({"x": np.arange(count)}, 7, seed=4)
    epochs = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        epochs.append(np.concatenate([batch["x"] for batch in loader]))
        assert sorted(epochs[-1]) == [*range(count)]
        np.testing.assert_array_equal(
            np.concatenate([b["x"] for b in loader.since(1)]) if count > 7 else [], epochs[-1][7:]
        )
    if count == 1000:
        for a, b in itertools.combinations([np.arange(count), *epochs], 2):
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # five standard deviations
            assert (a == b).sum() < 10
        assert all((np.abs(np.diff(epoch)) == 1).sum() < 15 for epoch in epochs)


def test_as_many_blocks_are_mixed_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of up to 30 rows: 30 · (4 · (2 + 3) + 8) bytes for the longest block of both arrays; single rows count nothing."""

    class Rows(StoredRows):
        def __init__(self, width: int, starts: Sequence[int] | None) -> None:
            self.dtype, self.shape = np.dtype(np.float32), (40, width)
            self.starts = None if starts is None else np.array(starts)

        def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
            raise NotImplementedError

    arrays = [Rows(2, [0, 10, 40]), Rows(3, [0, 20, 40]), Rows(1000, None)]
    for room, expected in ((839, 1), (840, 1), (1679, 1), (1680, 2), (8400, 10), (10**6, 50)):
        monkeypatch.setattr(order, "_OPEN", room)
        assert order.streams(arrays, 50) == expected, room
    monkeypatch.setattr(order, "_OPEN", 10**9)
    assert order.streams(arrays, 1000) == 64
