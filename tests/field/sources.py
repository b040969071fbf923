"""Where the models come from: files in packages, exports of PyTorch's architectures, pipelines of scikit-learn.

A `Source` writes its model and says what to feed it; the same every time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """A model of the field.

    name: also of its files. origin: the package and what in it. write: puts the file where it is told. feeds: one
    batch. loss, prediction: as `training_graph` takes them. module: the same network in PyTorch, taking the values of
    the feeds in their order; None where there is none. kind: which variants make sense of it, and which heavy ones do.
    """

    name: str
    origin: str
    write: Callable[[Path], None]
    feeds: Callable[[np.random.Generator], Feeds]
    loss: str = "mse"
    prediction: str | None = None
    module: Callable[[], Any] | None = None
    kind: str = "file"
    widely: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def batch(self) -> Feeds:
        """The feeds, the same every time."""
        return self.feeds(np.random.default_rng(zlib.crc32(self.name.split("/")[0].encode())))


def package_file(package: str, end: str) -> Path:
    """The file of an installed package whose path ends so."""
    matches = [f for f in distribution(package).files or () if str(f).endswith(end)]
    if len(matches) != 1:
        raise FileNotFoundError(f"{package}: expected one file that ends in {end}, found {len(matches)}")
    return Path(str(matches[0].locate()))


def _floats(*shape: int, low: float = -1.0, high: float = 1.0) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.uniform(low, high, shape).astype(np.float32)


def _bars(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Lines of dark and light bars: in noise a detector of text sees nothing at all."""

    def draw(_: np.random.Generator) -> np.ndarray:
        dark = (np.arange(shape[2]) // 6 % 2)[:, None] * (np.arange(shape[3]) // 3 % 2)[None]
        return np.broadcast_to(1 - 2 * dark, shape).astype(np.float32)

    return draw


def _bytes(rng: np.random.Generator) -> np.ndarray:
    """Two files of bytes, 256 where they are over."""
    codes = rng.integers(0, 256, (2, 2048)).astype(np.int32)
    codes[1, 700:1024] = 256
    return codes


def _rate(_: np.random.Generator) -> np.ndarray:
    return np.array(16000, np.int64)


def _of_package(
    package: str, end: str, inputs: Mapping[str, Callable[[np.random.Generator], np.ndarray]], **more: Any
) -> Source:
    def write(path: Path) -> None:
        path.write_bytes(package_file(package, end).read_bytes())

    def feeds(rng: np.random.Generator) -> Feeds:
        return {name: draw(rng) for name, draw in inputs.items()}

    name = f"{package}-{Path(end).stem}"
    return Source(name, f"{package} {distribution(package).version}", write, feeds, **more)


def _files() -> list[Source]:
    state = _floats(2, 1, 128)
    speech = {"input": _floats(1, 576), "state": state}
    cell = {"h": _floats(1, 1, 128), "c": _floats(1, 1, 128)}
    return [
        _of_package("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x": _floats(2, 3, 48, 192)}, widely=True),
        _of_package("rapidocr", "PP-OCRv6_det_small.onnx", {"x": _bars(1, 3, 64, 96)}),
        _of_package("rapidocr", "PP-OCRv6_rec_small.onnx", {"x": _floats(2, 3, 48, 96)}),
        _of_package("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": _floats(1, 3, 48, 192)}),
        _of_package("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", {"x": _bars(2, 3, 64, 96)}, widely=True),
        _of_package("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", {"x": _floats(2, 3, 48, 96)}, widely=True),
        _of_package("nudenet", "320n.onnx", {"images": _floats(2, 3, 160, 160, low=0)}, widely=True),
        _of_package("ddddocr", "common.onnx", {"input1": _floats(1, 1, 64, 96)}),
        _of_package("ddddocr", "common_old.onnx", {"input1": _floats(1, 1, 64, 96)}),
        _of_package("ddddocr", "common_det.onnx", {"images": _floats(1, 3, 416, 416, low=0, high=255)}, widely=True),
        _of_package("magika", "standard_v3_3/model.onnx", {"bytes": _bytes}, widely=True),
        _of_package(
            "silero-vad",
            "silero_vad.onnx",
            {"input": _floats(1, 576), "state": state, "sr": _rate},
            prediction="output",
        ),
        _of_package(
            "silero-vad", "silero_vad_16k_op15.onnx", {**speech, "sr": _rate}, prediction="output", widely=True
        ),
        _of_package(
            "silero-vad", "silero_vad_16k_sequence.onnx", {"input": _floats(5, 576), **cell}, prediction="speech_probs"
        ),
        _of_package("silero-vad", "silero_vad_half.onnx", speech, prediction="output"),
        _of_package("silero-vad", "silero_vad_op18_ifless.onnx", {**speech, "sr": _rate}, prediction="output"),
        _of_package("silero-vad", "silero_vad_openvino_16k.onnx", speech, prediction="output"),
    ]


@cache
def sources() -> dict[str, Source]:
    """All of them, by name."""
    from tests.field.sklearn_sources import pipelines
    from tests.field.torch_sources import exports

    return {source.name: source for source in [*_files(), *exports(), *pipelines()]}
