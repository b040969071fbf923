"""The commands `web` and `serve`: what they write, how large it is, what they refuse."""

from __future__ import annotations

import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from onnx_backprop.command.main import main
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.web.serve import server
from onnx_backprop.web.site import CDN, PAGE, RUNTIME
from tests.onnx_backprop.web.javascript import CASES, WEB

KB = 1000


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The CNN and rows for it."""
    onnx.save(CASES["cnn"].build(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **CASES["cnn"].rows(np.random.default_rng(0)))
    return tmp_path


def _web(folder: Path, *more: str) -> int:
    loss = ["--loss", "softmax_cross_entropy", "--quiet", "-o", str(folder / "site")]
    return main(["web", str(folder / "model.onnx"), "--data", str(folder / "data.npz"), *loss, *more])


def test_size(files: Path) -> None:
    assert _web(files) == 0
    site = files / "site"
    graph = (site / "model" / "training.onnx").read_bytes()
    assert len(graph) <= 80 * KB
    assert len(gzip.compress(graph)) <= 15 * KB
    page = sum(path.stat().st_size for path in site.iterdir() if path.is_file() and path.name != "data.bin")
    assert page <= 44 * KB
    weights = sum(t.ByteSize() for t in onnx.load(files / "model.onnx").graph.initializer)
    assert (site / "model" / "forward.onnx").stat().st_size < weights + 4 * KB


def test_site(files: Path) -> None:
    """Every file that the page asks for is there; rows are held out and none is lost."""
    assert _web(files) == 0
    site = files / "site"
    about = json.loads((site / "site.json").read_text())
    assert (about["data"]["rows"], about["data"]["train"], about["batch"]) == (640, 576, 32)
    assert about["runtime"] == f"{CDN}{RUNTIME[0]}"
    arrays = about["data"]["arrays"]
    labels = np.frombuffer((site / "data.bin").read_bytes(), np.int64, 640, arrays["labels"]["at"])
    with np.load(files / "data.npz") as data:
        assert sorted(labels) == sorted(data["labels"])
        assert not np.array_equal(labels, data["labels"])
        assert about["own"]["range"][0] >= float(data["image"].min())
    for name in PAGE:
        text = (site / name).read_text()
        for other in re.findall(r"(?:from|src=|href=|Worker\() ?['\"](?:\./)?([\w.]+\.(?:js|css))['\"]", text):
            assert (site / other).is_file(), (name, other)
    forward = onnx.load(site / "model" / "forward.onnx")
    assert [v.name for v in forward.graph.output] == ["logits"]


def test_a_folder_of_images(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its classes have names on the page; rows and the bytes of a visitor's picture are scaled alike."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 3, 4, 5] image) => (float[N, 2] y) { a = GlobalAveragePool(image) b = Flatten(a) y = MatMul(b, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    pixels = rng.integers(0, 256, (2, 4, 4, 5, 3), np.uint8)
    for n, name in enumerate(("ash", "oak")):
        (tmp_path / "trees" / name).mkdir(parents=True)
        for k, picture in enumerate(pixels[n]):
            Image.fromarray(picture).save(tmp_path / "trees" / name / f"{k}.png")
    options = ["--data", str(tmp_path / "trees"), "--evaluation", str(tmp_path / "trees"), "--layout", "classes"]
    means, deviations = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for scale, expected in (("imagenet", (pixels / 255 - means) / deviations), ("1/255", pixels / 255)):
        assert _web(tmp_path, *options, "--scale", scale, "--force") == 0
        about = json.loads((tmp_path / "site" / "site.json").read_text())
        assert about["names"] == ["ash", "oak"]
        image = about["data"]["arrays"]["image"]
        assert (about["data"]["train"], image["dtype"], image["dims"]) == (8, "float32", [16, 3, 4, 5])
        rows = np.frombuffer((tmp_path / "site" / "data.bin").read_bytes(), np.float32, 480, image["at"])
        np.testing.assert_allclose(
            rows.reshape(8, 3, 4, 5), expected.reshape(8, 4, 5, 3).transpose(0, 3, 1, 2), rtol=1e-5, atol=1e-6
        )
        bytes_ = np.array([[0.0], [255.0]])
        ends = (bytes_ / 255 - means) / deviations if scale == "imagenet" else bytes_[:, 0] / 255
        np.testing.assert_allclose(about["own"]["range"], ends, rtol=1e-12)


def test_a_site_is_replaced_only_when_asked(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _web(files) == 0
    assert _web(files) == 2
    assert "is not empty. Name another folder, or --force to replace the site in it" in capsys.readouterr().err
    before = json.loads((files / "site" / "site.json").read_text())
    assert _web(files, "--force", "--learning-rate", "0.5") == 0
    after = json.loads((files / "site" / "site.json").read_text())
    assert after == before | {"learningRate": 0.5}
    (files / "other").mkdir()
    (files / "other" / "thesis.txt").write_text("all of it")
    assert _web(files, "--force", "-o", str(files / "other")) == 2
    assert "is not empty. Name another folder" in capsys.readouterr().err
    assert [path.name for path in (files / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.full(640, 10)}, "--data: 'labels': expected classes 0 … 9, got 10 at (0,). Number the classes"),
        ({"labels": np.full(640, -1)}, "--data: 'labels': expected classes 0 … 9, got -1 at (0,). Number the classes"),
        ({"labels": np.zeros(639, np.int64)}, "expected arrays with one number of rows"),
        ({"image": np.zeros((640, 3, 8, 8), np.float32)}, "'image': expected the shape"),
    ],
)
def test_wrong_rows_are_refused(
    arrays: dict[str, np.ndarray], message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(files / "data.npz", **(CASES["cnn"].rows(np.random.default_rng(0)) | arrays))
    assert _web(files) == 2
    assert message in capsys.readouterr().err
    assert not (files / "site").exists()


def test_a_folder_without_onnxruntime_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _web(files, "--runtime", str(files)) == 2
    assert "Name the folder `dist` of npm's onnxruntime-web" in capsys.readouterr().err
    assert not (files / "site").exists()


def test_numbers_of_adapters_without_adapters_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--rank", "--alpha"):
        assert _web(files, option, "4") == 2
        assert f"{option}: goes with --lora" in capsys.readouterr().err


def test_serve(files: Path) -> None:
    """With the headers under which a page may use threads, right types, and nothing from outside the folder."""
    with pytest.raises(InvalidArgumentError, match="holds no site"):
        server(files)
    assert _web(files) == 0
    running = server(files / "site", port=0)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{running.server_port}"
    try:
        with pytest.raises(InvalidArgumentError, match="cannot listen on"):
            server(files / "site", port=running.server_port)
        for name, kind in {
            "": "text/html",
            "page.js": "text/javascript",
            "data.bin": "application/octet-stream",
        }.items():
            with urllib.request.urlopen(f"{url}/{name}") as answer:
                assert answer.headers.get_content_type() == kind
                assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
                assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/../model.onnx")
    finally:
        running.shutdown()
        running.server_close()


def test_the_package_for_npm_is_whole() -> None:
    about = json.loads((WEB / "package.json").read_text())
    named = [path.removeprefix("./") for entry in about["exports"].values() for path in entry.values()]
    assert set(named) <= set(about["files"])
    assert all((WEB / name).is_file() for name in about["files"])
