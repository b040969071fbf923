"""A folder that trains a model in the browser, with nothing but a static server."""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.whole_decoder import KEPT
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.web.bundle import bundle
from onnx_backprop.web.webgpu import webgpu_bundle

RUNTIME_VERSION = "1.30.0"  # of onnxruntime-web, where it comes from a CDN
CDN = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{RUNTIME_VERSION}/dist/"
PAGE = (
    "index.html",
    "style.css",
    "page.js",
    "chart.js",
    "own.js",
    "worker.js",
    "store.js",
    "trainer.js",
    "rows.js",
    "classes.js",
)
# The module to import, and what it loads from the same folder.
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
_ALIGNMENT = 8  # bytes of the largest elements
_CHANNELS = (1, 3)  # of images that a page can show
_HELD_OUT = 0.1  # of the rows, where no others are given


def held_out(
    data: Mapping[str, np.ndarray], evaluation: Mapping[str, np.ndarray] | None, seed: int
) -> tuple[dict[str, np.ndarray], int]:
    """All rows, and how many of them are to train on; those behind are held out.

    Without rows for evaluation a tenth of the data, drawn with the seed, is held out.
    """
    rows = len(next(iter(data.values())))
    if evaluation is not None:
        return {name: np.concatenate([array, evaluation[name]]) for name, array in data.items()}, rows
    order = np.random.default_rng(seed).permutation(rows)
    return {name: array[order] for name, array in data.items()}, rows - int(_HELD_OUT * rows)


def write_site(
    folder: Path,
    graph: TrainingGraph,
    arrays: Mapping[str, np.ndarray],
    *,
    train: int,
    title: str,
    batch: int,
    learning_rate: float,
    runtime: Path | None = None,
    fixed: TrainingGraph | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write the site, each file complete or not at all; the bytes of each by its name.

    arrays: a row of each for every row of data, by the names of the graph's inputs, the first `train` to train on.
    runtime: the folder `dist` of onnxruntime-web, which is copied; None for a link to a CDN.
    fixed: the graph of the same model with all lengths, not inlined; then the page trains on WebGPU.
    schedule: of the learning rate: its name, "linear" or "cosine", steps, and warmup, the steps of a rise in front.
    Errors: InvalidArgumentError for what `bundle` refuses, for a folder without onnxruntime-web, and where nothing can
    be written.
    """
    files = {name: _resource(name) for name in PAGE}
    parts = bundle(graph) if fixed is None else webgpu_bundle(fixed, graph.inference_model())
    files |= {f"model/{name}": content for name, content in parts.items()}
    files["data.bin"], data = _packed(arrays)
    modules = RUNTIME if fixed is None else WEBGPU
    if runtime is not None:
        files |= {f"runtime/{name}": _read(runtime / name) for name in modules}
    one_size = fixed is not None or not _any_batch(graph)
    if one_size and train < batch:
        raise InvalidArgumentError(
            f"the model takes {batch} rows at a time, there are {train} to train on. Give it more"
        )
    settings = graph.options.loss
    identity = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        if name.startswith(("model/", "data")):
            identity.update(files[name])
    about = {
        "title": title,
        "id": identity.hexdigest(),
        "loss": settings["name"] if isinstance(settings, dict) else None,
        "target": graph.target,
        "classes": _classes(graph),
        "schedule": None if schedule is None else dict(schedule),
        "batch": min(batch, train),
        "batchFixed": one_size,
        "learningRate": learning_rate,
        "runtime": f"{CDN if runtime is None else './runtime/'}{modules[0]}",
        "session": None if fixed is None else {"executionProviders": ["webgpu"]},
        "data": {"rows": len(next(iter(arrays.values()))), "train": train, "arrays": data},
        "own": _visitor_input(graph, arrays, train),
    }
    files["site.json"] = json.dumps(about, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    _write(folder, files)
    return {name: len(content) for name, content in files.items()}


def _classes(graph: TrainingGraph) -> dict[str, int] | None:
    """Where the classes of the output are that the page shows, if the loss reads scores of classes there."""
    compared = [each for each in graph.options.compared if each.get("axis") is not None and not each.get("shift")]
    return {"axis": int(compared[0]["axis"])} if compared and compared[0]["prediction"] == graph.outputs[0] else None


def _any_batch(graph: TrainingGraph) -> bool:
    """Whether a step takes any number of rows."""
    declared = {value.name: value.type.tensor_type.shape.dim for value in graph.model.graph.input}
    return not any(declared[name] and declared[name][0].HasField("dim_value") for name in graph.inputs)


def _visitor_input(graph: TrainingGraph, arrays: Mapping[str, np.ndarray], train: int) -> dict[str, Any] | None:
    """What a visitor may drop into the page: pictures or a table of numbers, in the range of the rows to train on."""
    names = [name for name in graph.inputs if name not in graph.options.loss_inputs]
    if len(names) != 1 or any(entry.key == KEPT for entry in graph.model.metadata_props):
        return None
    array = arrays[names[0]][:train]
    image = array.ndim == 4 and array.shape[1] in _CHANNELS
    if not (image or array.ndim == 2) or array.dtype.kind not in "fiu":
        return None
    low, high = float(array.min()), float(array.max())
    kind = "image" if image else "vector"
    return {"name": names[0], "kind": kind, "dims": list(array.shape[1:]), "range": [low, high]}


def _packed(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, Any]]:
    """The arrays behind each other, little-endian, and where each lies."""
    parts: list[bytes] = []
    about: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        about[name] = {"dtype": str(array.dtype), "dims": list(array.shape), "at": at}
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        parts += [raw, bytes(-len(raw) % _ALIGNMENT)]
        at += len(raw) + len(parts[-1])
    return b"".join(parts), about


def _resource(name: str) -> bytes:
    """A file of the page, without comments and indentation: every visitor loads it."""
    text = (resources.files("onnx_backprop.web") / name).read_text("utf-8")
    if name.endswith(".js"):
        text = re.sub(r"^\s*(/\*\*.*?\*/|//[^\n]*)\n", "", text, flags=re.MULTILINE | re.DOTALL)
    if name.endswith(".css"):
        text = re.sub(r"\s*([{};])\s*", r"\1", text)
    return re.sub(r"^\s+", "", text, flags=re.MULTILINE).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InvalidArgumentError(
            f"--runtime: cannot read {path}: {e.strerror or e}. Name the folder `dist` of npm's onnxruntime-web"
        ) from e


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files; one that cannot be written leaves those of an earlier site as they were."""
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for file, content in zip(
                stack.enter_context(replacing(*(folder / name for name in files))), files.values(), strict=True
            ):
                file.write(content)
    except OSError as e:
        raise InvalidArgumentError(f"cannot write {folder}: {e.strerror or e}") from e


def title_of(path: str) -> str:
    """A model's name without its folder and suffix, as words."""
    return re.sub(r"[_\s]+", " ", Path(path).stem).strip() or "model"
