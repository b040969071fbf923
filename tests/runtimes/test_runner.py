"""`make runtimes` says "trains" of what trains, and of nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnx_backprop.opset.functions.overloads import NEEDED, NEEDS_DOMAIN
from tests.runtimes import __main__ as runtimes
from tests.runtimes.cases import CASES, FORMS

PYTHON = Path(sys.executable)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtimes")
    CASES[-1].write(folder / "0")
    return folder


def test_it_trains(written: Path) -> None:
    for form in FORMS:
        assert runtimes.trained(PYTHON, written / "0", form)["outcome"] == "trains"
        assert runtimes.expected(written, 0, form, "1.18") == ["trains"]


def test_other_losses_and_errors_are_told(written: Path, tmp_path: Path) -> None:
    for name in ("inlined.onnx", "inlined.disabled", "case.json"):
        (tmp_path / name).write_bytes((written / "0" / name).read_bytes())
    with np.load(written / "0" / "case.npz") as file:
        arrays = dict(file)
    arrays["losses"][-1] *= 1.01
    np.savez(tmp_path / "case.npz", **arrays)
    assert runtimes.trained(PYTHON, tmp_path, "inlined")["outcome"] == "losses off by 0.01"
    text = f"""<ir_version: 8, opset_import: ["": 18, "{NEEDS_DOMAIN}": 1]>
        g (float[1] x) => (float[1] y) {{ y = {NEEDS_DOMAIN}.{NEEDED}(x) }}"""
    onnx.save(parser.parse_model(text), tmp_path / "inlined.onnx")
    assert runtimes.trained(PYTHON, tmp_path, "inlined")["outcome"] == "needs 1.27"
    (tmp_path / "inlined.onnx").unlink()
    assert "NO_SUCHFILE" in runtimes.trained(PYTHON, tmp_path, "inlined")["outcome"]


def test_files_with_overloads_are_to_refuse_before_1_27(tmp_path: Path) -> None:
    CASES[0].write(tmp_path / "0")
    assert runtimes.expected(tmp_path, 0, "default", "1.26") == ["needs 1.27"]
    for form, version in (("default", "1.27"), ("default", "1.100"), ("inlined", "1.18")):
        assert runtimes.expected(tmp_path, 0, form, version) == ["trains"]
