"""What the command writes for CasADi and for simulators."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import onnx
import pytest

from onnx_backprop.command import main as command

FAMILY = ["adj_out.onnx", "fwd_adj_out.onnx", "fwd_out.onnx", "out.onnx"]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "small.onnx")


def test_family(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert = ["convert", "small.onnx", "-o", "out.onnx", "--mode", "family", "--wrt", "x"]
    for more, message in (
        (["--of", "y"], "--of, --batched, --axes and"),
        (["--batched"], "--of, --batched, --axes and"),
    ):
        assert command.main([*convert, *more]) == 2
        assert message in capsys.readouterr().err
        assert files(folder) == []
    assert command.main(convert) == 0
    assert files(folder) == FAMILY
    assert [value.name for value in onnx.load("fwd_adj_out.onnx").graph.output] == ["fwd_adj_x"]
    Path("out.onnx").unlink()
    assert command.main(convert) == 2
    assert "fwd_out.onnx exists" in capsys.readouterr().err
    assert files(folder) == FAMILY[:-1]
    assert command.main([*convert, "--force"]) == 0


def test_fmu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = ["fmu", "small.onnx", "-o", "small.fmu", "--no-runtime"]
    for more, message in (
        (["--lengths", "N=0"], "--lengths: expected NAME=N with N of 1 or more"),
        (["--lengths", "N=2", "--states", "x"], "--states: expected INPUT=OUTPUT, as x=dx, got 'x'"),
        (["--lengths", "N=2", "--target", "amiga"], "--target: expected"),
    ):
        assert command.main([*write, *more]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert files(folder) == []
    assert command.main([*write, "--lengths", "N=2"]) == 0
    with ZipFile("small.fmu") as archive:
        assert {"modelDescription.xml", "resources/f.onnx", "resources/jvp.onnx"} <= {*archive.namelist()}
