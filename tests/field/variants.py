"""What people do to a file before they train it: python -m tests.field.variants VARIANT SOURCE IN OUT"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

from tests.field.sources import Source, sources

Variant = Callable[[Source, Path, Path], None]


def _onnxsim(_: Source, path: Path, to: Path) -> None:
    model, same = import_module("onnxsim").simplify(onnx.load(path))
    if not same:
        raise RuntimeError("onnxsim's own check fails")
    onnx.save(model, to)


def _onnxslim(_: Source, path: Path, to: Path) -> None:
    onnx.save(import_module("onnxslim").slim(onnx.load(path)), to)


def _optimised(level: str) -> Variant:
    def run(_: Source, path: Path, to: Path) -> None:
        onnxruntime: Any = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(to)
        options.log_severity_level = 3
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return run


def _fused(source: Source, path: Path, to: Path) -> None:
    optimizer: Any = import_module("onnxruntime.transformers.optimizer")
    optimizer.optimize_model(str(path), **source.settings, opt_level=0).save_model_to_file(str(to))


def _float16(_: Source, path: Path, to: Path) -> None:
    convert: Any = import_module("onnxruntime.transformers.float16")
    onnx.save(convert.convert_float_to_float16(onnx.load(path), keep_io_types=True), to)


def _float16_common(_: Source, path: Path, to: Path) -> None:
    convert: Any = import_module("onnxconverter_common.float16")
    onnx.save(convert.convert_float_to_float16(onnx.load(path)), to)


def _dynamic(_: Source, path: Path, to: Path) -> None:
    import_module("onnxruntime.quantization").quantize_dynamic(str(path), str(to))


def _static(source: Source, path: Path, to: Path) -> None:
    quantization: Any = import_module("onnxruntime.quantization")

    class Once(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [source.batch()]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    quantization.quantize_static(str(path), str(to), Once())


VARIANTS: dict[str, Variant] = {
    "onnxsim": _onnxsim,
    "onnxslim": _onnxslim,
    "ort basic": _optimised("ORT_ENABLE_BASIC"),
    "ort extended": _optimised("ORT_ENABLE_EXTENDED"),
    "ort fused": _fused,
    "float16": _float16,
    "float16 all": _float16_common,
    "dynamic int8": _dynamic,
    "static int8": _static,
}


def _loads(path: str) -> None:
    """Raise what onnxruntime says of a file that it does not load: then it is nothing to train either."""
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def variants(source: Source) -> list[str]:
    """The variants of a source that are judged: all, or of most networks two."""
    if source.kind == "sklearn":
        return ["onnxslim", "ort extended"]
    if not source.widely:
        return ["onnxslim", "ort extended"] if not source.name.endswith("dynamo") else ["onnxsim"]
    return [name for name in VARIANTS if name != "ort fused" or source.settings]


if __name__ == "__main__":
    wanted, of, path, to = sys.argv[1:]
    if wanted == "as is":
        sources()[of].write(Path(to))
    else:
        VARIANTS[wanted](sources()[of], Path(path), Path(to))
    _loads(to)
