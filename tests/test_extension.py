"""A package from outside, examples/extension: installed, it works behind every door; uninstalled, it leaves nothing."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import onnx
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "extension"
ROOT = EXAMPLE.parents[1]
FACTS = """
import onnx, onnx_backprop as ob
ob.supported_ops()
print([op for op in ob.supported_ops() if op.domain == "acme"], onnx.defs.has("SquaredRelu", "acme"))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has this environment's packages, and others of its own."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (site / "parent.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def call(*command: object, folder: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_works_when_installed_and_is_gone_when_uninstalled(python: Path, tmp_path: Path) -> None:
    before = call(python, "-c", FACTS, folder=tmp_path)
    assert before.strip() == "[] False"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    source = tmp_path / "extension"
    for path in EXAMPLE.rglob("*"):
        if path.suffix in (".py", ".toml"):
            (source / path.relative_to(EXAMPLE)).parent.mkdir(parents=True, exist_ok=True)
            (source / path.relative_to(EXAMPLE)).write_bytes(path.read_bytes())
    call(*pip, "install", "--no-deps", source, folder=tmp_path)
    tests = source / "tests"
    output = call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, folder=tmp_path)
    assert "passed" in output
    assert "SquaredReluBackward" in call(python, "-c", FACTS, folder=tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "acme": 1]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { h = Mul (x, w) y = acme.SquaredRelu (h) }""")
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((8, 2), np.float32), target=np.zeros((8, 2), np.float32))
    options = ["--data", "data.npz", "--loss", "log_cosh", "--optimizer", "signsgd"]
    train = [python, "-m", "onnx_backprop", "train", "model.onnx", "-o", "trained.onnx", *options]
    assert "8 rows" in call(*train, folder=tmp_path)
    call(*pip, "uninstall", "--yes", "acme-operators", folder=tmp_path)
    assert call(python, "-c", FACTS, folder=tmp_path) == before


def test_an_extension_that_fails_is_left_out_by_name(tmp_path: Path) -> None:
    facts = tmp_path / "broken-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[onnx_backprop]\nbroken = broken_operators\n")
    (tmp_path / "broken_operators.py").write_text("raise RuntimeError('no such thing')\n")
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{FACTS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"
    assert "'broken' of broken is left out" in done.stderr
    assert "no such thing" in done.stderr
