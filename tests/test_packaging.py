"""The wheel holds onnx_backprop/, what its command starts with and nothing else, and works where nothing of the checkout is."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("opset", "ort_ops", "converters")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built as anybody would, from a copy without what git ignores."""
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, files.split("\0")):
        path, target = ROOT / name, source / name
        if not path.exists() and not path.is_symlink():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        else:
            target.write_bytes(path.read_bytes())
    subprocess.run([sys.executable, "-m", "build", str(source)], check=True, capture_output=True)
    return source / "dist"


def test_wheel_holds_the_package_and_nothing_else(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "onnx_backprop").rglob("*.py")}
    for room in ROOMS:
        expected |= {f"onnx_backprop/{path.relative_to(ROOT)}" for path in (ROOT / room).rglob("*.py")}
    expected |= {
        f"onnx_backprop/web/{path.name}" for path in (ROOT / "onnx_backprop" / "web").iterdir() if path.is_file()
    }
    expected |= {
        "onnx_backprop/py.typed",
        "onnx_backprop/ort_ops/plugin/runtime.c",
        "onnx_backprop/fmi/fmu.c",
        "onnx_backprop_command.py",
    }
    assert names == expected


def test_source_archive_is_a_checkout(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "README.md", "LICENSE", "models/super_resolution.py", "onnx_backprop/opset/core/op.py"} <= names


def test_an_index_would_take_them(archives: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_installed_wheel_converts_from_anywhere(archives: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment, the package from the wheel alone."""
    (wheel,) = archives.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[N,2,H,W] x) => (float[N,3,H,W] y) <float[3,2,1,1] w = {1,2,3,4,5,6}> { y = Conv (x, w) }""")
    onnx.save(model, tmp_path / "model.onnx")
    script = f"""
import sys
sys.path.insert(0, {str(site)!r})
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + repr(f)]
import onnx_backprop
assert onnx_backprop.__file__.startswith({str(site)!r}), onnx_backprop.__file__
from onnx_backprop.__main__ import main
sys.exit(main(["convert", "model.onnx", "-o", "training.onnx", "--loss", "mse"]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    graph = onnx.load(tmp_path / "training.onnx")
    assert [o.name for o in graph.graph.output] == ["loss", "y", "w_grad"]
