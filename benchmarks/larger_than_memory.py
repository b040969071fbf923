"""`python -m benchmarks.larger_than_memory`: the resident set of a training whose data do not fit into memory.

For each kind of files a data set of --gigabytes is written to a new folder inside --folder, the command trains one
epoch on it, and everything is removed again. Beside it stands the same training on a hundredth of the data: what the
model, onnxruntime and Python take.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

KINDS = ("npz", "npy", "parquet", "feather")
FEATURES, TARGETS = 4096, 8
ROW = 4 * (FEATURES + TARGETS)  # bytes
PART = 16384  # rows of a file
GROUP = 256  # rows of a row group
BATCH = 512


def model() -> onnx.ModelProto:
    """x (N, FEATURES) -> tanh(x·W) (N, TARGETS): next to no work, so that reading is what takes time."""
    weight = np.random.default_rng(0).standard_normal((FEATURES, TARGETS)).astype(np.float32) / FEATURES**0.5
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="h"), helper.make_node("Tanh", ["h"], ["y"], name="y")]
    given, output = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", length])
        for name, length in (("x", FEATURES), ("y", TARGETS))
    )
    graph = helper.make_graph(nodes, "wide", [given], [output], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def written(folder: Path, kind: str, size: float) -> int:
    """A folder of parts, together of so many bytes; how many bytes the files have."""
    folder.mkdir()
    process = get_context("spawn").Process(target=_write, args=(folder, kind, size))  # a child's largest
    process.start()  # resident set begins with that of its parent, which has to stay small
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
    return sum(path.stat().st_size for path in folder.iterdir())


def _write(folder: Path, kind: str, size: float) -> None:
    left = int(size // ROW)
    rng = np.random.default_rng(1)
    for part in range(-(-left // PART)):
        rows = min(PART, left - part * PART)
        arrays = {"x": rng.random((rows, FEATURES), np.float32), "target": rng.random((rows, TARGETS), np.float32)}
        if kind == "npz":
            np.savez(folder / f"{part:05}.npz", x=arrays["x"], target=arrays["target"])
        elif kind == "npy":
            for name, array in arrays.items():
                np.save(folder / f"{name}.{part:05}.npy", array)
        else:
            _write_columns(folder / f"{part:05}.{kind}", arrays)


def _write_columns(path: Path, arrays: dict[str, np.ndarray]) -> None:
    pa, feather, parquet = map(import_module, ("pyarrow", "pyarrow.feather", "pyarrow.parquet"))
    table = pa.table(
        {name: pa.FixedSizeListArray.from_arrays(pa.array(a.ravel()), a.shape[1]) for name, a in arrays.items()}
    )
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=GROUP)
    else:
        feather.write_feather(table, path, chunksize=GROUP)


def trained(folder: Path, data: Path) -> tuple[float, float]:
    """One epoch: the largest resident set in bytes, the seconds."""
    command = f"train {folder / 'model.onnx'} -o {folder / 'out.onnx'} --data {data} --loss mse --optimizer sgd --force"
    arguments = [*command.split(), "--epochs", "1", "--batch-size", str(BATCH), "--quiet"]
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "onnx_backprop", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--folder", default=None, help="on which disk (default: that of temporary files)")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder = Path(name)
            onnx.save(model(), folder / "model.onnx")
            written(folder / "small", kind, arguments.gigabytes * 1e7)
            base, _ = trained(folder, folder / "small")
            size = written(folder / "large", kind, arguments.gigabytes * 1e9)
            peak, seconds = trained(folder, folder / "large")
        print(
            f"{kind}: {size / 1e9:.1f} GB on disk, {size / 1e6 / seconds:.0f} MB/s; resident {peak / 1e6:.0f} MB, "
            f"with a hundredth of the data {base / 1e6:.0f} MB",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
