"""Writing models: complete or not there, external data beyond the limit, readable refusals."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare.writing.files import ALIGNMENT, save_model

LIMIT = 20_000  # bytes, in place of protobuf's 2 GB


def model_of(arrays: dict[str, np.ndarray]) -> ModelProto:
    """A model with an output per array; the even ones keep their values in raw bytes, the odd in typed fields."""
    tensors = [
        numpy_helper.from_array(array, name)
        if n % 2 == 0
        else helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.ravel())
        for n, (name, array) in enumerate(arrays.items())
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in arrays],
        "constants",
        [],
        [helper.make_tensor_value_info(f"{t.name}_out", t.data_type, t.dims) for t in tensors],
        tensors,
        doc_string="many constants",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10, producer_name="test")
    helper.set_model_props(model, {"key": "value"})
    return model


def large_model() -> ModelProto:
    rng = np.random.default_rng(3)
    return model_of(
        {
            "a": rng.standard_normal((50, 60)).astype(np.float32),
            "b": rng.standard_normal((30, 50)).astype(np.float32),
            "tiny": np.array([1.0, 2.0], np.float32),
            "half": rng.standard_normal((40, 40)).astype(np.float16),
            "ints": rng.integers(0, 9, (300,)),
        }
    )


def names(folder: Path) -> list[str]:
    return sorted(re.sub(r"\.[0-9a-f]{16}\.data", ".HASH.data", path.name) for path in folder.iterdir())


def test_small_model_is_one_file(tmp_path: Path) -> None:
    model = large_model()
    save_model(model, tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx"]
    assert onnx.load(tmp_path / "m.onnx") == model


def test_large_model_gets_external_data(tmp_path: Path) -> None:
    model = large_model()
    before = model.SerializeToString()
    save_model(model, tmp_path / "m.onnx", limit=LIMIT)
    assert model.SerializeToString() == before
    assert names(tmp_path) == ["m.onnx", "m.onnx.HASH.data"]
    assert (tmp_path / "m.onnx").stat().st_size < LIMIT
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)

    references = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    external = {t.name: t for t in references.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert set(external) == {"a", "b", "half", "ints"}
    for tensor in external.values():
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert int(entries["offset"]) % ALIGNMENT == 0
    assert references.producer_name == "test"
    assert references.graph.doc_string == "many constants"
    assert [(entry.key, entry.value) for entry in references.metadata_props] == [("key", "value")]

    loaded = onnx.load(tmp_path / "m.onnx")
    for got, expected in zip(loaded.graph.initializer, model.graph.initializer, strict=True):
        assert got.name == expected.name
        np.testing.assert_array_equal(numpy_helper.to_array(got), numpy_helper.to_array(expected), strict=True)
    session = ob.session(tmp_path / "m.onnx", kernels=None)
    np.testing.assert_array_equal(session.run(["half_out"], {})[0], numpy_helper.to_array(model.graph.initializer[3]))


def test_existing_files_are_replaced(tmp_path: Path) -> None:
    for name in ("m.onnx", f"m.onnx.{16 * '0'}.data"):
        (tmp_path / name).write_text("old")
    save_model(large_model(), tmp_path / "m.onnx", limit=LIMIT)
    assert len(onnx.load(tmp_path / "m.onnx").graph.initializer) == 5
    assert names(tmp_path) == ["m.onnx", "m.onnx.HASH.data"]


def test_tensors_have_a_name_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads between the two renamings, or after a process was killed there, finds the old model whole."""
    one, other = large_model(), large_model()
    other.graph.initializer[0].raw_data = one.graph.initializer[0].raw_data[::-1]
    save_model(one, tmp_path / "m.onnx", limit=LIMIT)
    replace, read = Path.replace, []

    def watched(path: Path, target: Path) -> Path:
        result = replace(path, target)
        values = onnx.load(tmp_path / "m.onnx").graph.initializer[0].raw_data
        read.append([model for model in (one, other) if values == model.graph.initializer[0].raw_data])
        return result

    monkeypatch.setattr(Path, "replace", watched)
    save_model(other, tmp_path / "m.onnx", limit=LIMIT)
    assert read == [[one], [other]]
    assert names(tmp_path) == ["m.onnx", "m.onnx.HASH.data"]
    save_model(one, tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx"]


def test_tensors_that_somebody_else_has_written_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = large_model(), large_model()
    other.graph.initializer[0].raw_data = one.graph.initializer[0].raw_data[::-1]
    save_model(one, tmp_path / "m.onnx", limit=LIMIT)
    fsync, first = os.fsync, []

    def late(file: int) -> None:
        if not first:
            first.append(file)
            save_model(one, tmp_path / "m.onnx", limit=LIMIT)
        fsync(file)

    monkeypatch.setattr(os, "fsync", late)
    save_model(other, tmp_path / "m.onnx", limit=LIMIT)
    assert len(names(tmp_path)) == 3
    onnx.load(tmp_path / "m.onnx")


def test_the_file_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    save_model(large_model(), tmp_path / "m.onnx")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ordinary", "m.onnx")}
    assert len(modes) == 1


def test_a_link_keeps_pointing_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "m.onnx").write_text("old")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "there" / "m.onnx")
    save_model(large_model(), tmp_path / "link.onnx")
    assert (tmp_path / "link.onnx").is_symlink()
    assert len(onnx.load(tmp_path / "there" / "m.onnx").graph.initializer) == 5


@pytest.mark.parametrize("limit", [LIMIT, 2**31 - 1], ids=["external", "one file"])
@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, limit: int
) -> None:
    (tmp_path / "m.onnx").write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ob.InvalidArgumentError, match=r"cannot write .*m\.onnx: No space left on device"):
        save_model(large_model(), tmp_path / "m.onnx", limit=limit)
    assert names(tmp_path) == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "old"


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_model(large_model(), tmp_path / "m.onnx", limit=LIMIT)
    assert names(tmp_path) == []


def test_a_signal_between_two_names_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file of weights beside an old model would be read as if they belonged together."""
    replace, done = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        done.append(replace(path, target))
        signal.raise_signal(signal.SIGINT)
        return target

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(large_model(), tmp_path / "m.onnx", limit=LIMIT)
    assert len(done) == 2
    assert names(tmp_path) == ["m.onnx", "m.onnx.HASH.data"]


def test_unusable_paths(tmp_path: Path) -> None:
    model = large_model()
    (tmp_path / "file").touch()
    with pytest.raises(ob.InvalidArgumentError, match=r"there is no folder .*missing. Make it first"):
        save_model(model, tmp_path / "missing" / "m.onnx")
    with pytest.raises(ob.InvalidArgumentError, match="there is no folder"):
        save_model(model, tmp_path / "file" / "m.onnx")
    with pytest.raises(ob.InvalidArgumentError, match="it is a folder"):
        save_model(model, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ob.InvalidArgumentError, match="not a regular file"):
        save_model(model, tmp_path / "pipe")
    assert names(tmp_path) == ["file", "pipe"]
