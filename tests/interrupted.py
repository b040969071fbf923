"""SIGINT at random moments: python -m tests.interrupted [--moments 20] [--seed S] [--only PROGRAM]

Each process is to end by KeyboardInterrupt, the command with exit code 130 and one line; no file is left that is not
whole. Prints the exit codes and the files that were found.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from onnx_backprop.ort_ops.compiler.cache import read
from onnx_backprop.training.checkpoint import read_checkpoint
from onnx_backprop.training.reports.history import read_log

MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[n, 3, h, w] x) => (float[n, 4, h, w] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, first)
    b = Relu (a)
    y = Conv <pads = [1, 1, 1, 1]> (b, second)
}
"""
_INTERRUPTED = r"onnx-backprop: interrupted(\. --resume goes on from \S+, step \d+)?"
_PROGRESS = r"compiling \d+ kernels |epoch \d+/\d+: "
COMMAND = "import sys; from onnx_backprop_command import main; sys.exit(main())"
WARM = ("train again", "numpy")  # programs that find the kernels compiled: what they run is what matters
TRAIN = "train model.onnx -o trained.onnx --data data.npz --loss mse --epochs 400 --every 1 --log log.csv --report report.html"
SESSION = """
import onnx_backprop as ob
session = ob.session(ob.training_graph("model.onnx", loss="mse").model, kernels={kernels!r})
import numpy as np
feeds = dict(np.load("data.npz"))
expected = session.run(None, feeds) if {runs} else []
try:
    for _ in range({runs}):
        session.run(None, feeds)
except KeyboardInterrupt:
    for got, wanted in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    raise
"""
PROGRAMS = {
    "train": [sys.executable, "-c", COMMAND, *TRAIN.split()],
    "train again": [sys.executable, "-c", COMMAND, *TRAIN.split()],
    "session": [sys.executable, "-c", SESSION.format(kernels="native", runs=0)],
    "numpy": [sys.executable, "-c", SESSION.format(kernels="numpy", runs=60)],
}


def prepare(folder: Path) -> None:
    rng = np.random.default_rng(0)
    model = parser.parse_model(MODEL)
    for name, shape in {"first": (8, 3, 3, 3), "second": (4, 8, 3, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(model, folder / "model.onnx")
    x, target = (rng.normal(size=(64, c, 16, 16)).astype(np.float32) for c in (3, 4))
    np.savez(folder / "data.npz", x=x, target=target)


def start(name: str, folder: Path, cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(PROGRAMS[name], cwd=folder, env=environment, text=True, stdout=-3, stderr=subprocess.PIPE)


def torn(path: Path) -> bool:
    """Whether a file is a part of one, or has a name that it should not have kept."""
    try:
        if path.suffix == ".onnx":
            onnx.checker.check_model(onnx.load(path))
        elif path.suffix == ".safetensors":
            read_checkpoint(path)
        elif path.suffix == ".csv":
            read_log(path)
        elif path.suffix == ".html":
            return not path.read_text().rstrip().endswith("</html>")
        elif path.suffix in (".o", ".width", ".json"):
            return read(path) is None
    except Exception:  # noqa: BLE001 - whatever a reader says
        return True
    return path.suffix not in (".onnx", ".safetensors", ".csv", ".npz")


def interrupted(name: str, moment: float | None, cache: Path | None) -> tuple[int, str, list[str], list[str], float]:
    """(exit code, stderr, files, those that are torn, seconds); no moment: uninterrupted."""
    with tempfile.TemporaryDirectory() as name_of:
        folder = Path(name_of)
        prepare(folder)
        begin = time.monotonic()
        process = start(name, folder, cache or folder / "cache")
        if moment is not None:
            time.sleep(moment)
            process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        seconds = time.monotonic() - begin
        bad = [str(path.relative_to(folder)) for path in files if torn(path)]
        return process.returncode, err, [path.suffix for path in files], bad, seconds


def problem(name: str, code: int, err: str, bad: list[str]) -> str:
    if bad:
        return f"torn: {bad}"
    if "train" in name and code == 130:
        *before, last = err.rstrip().splitlines() or [""]
        quiet = re.fullmatch(_INTERRUPTED, last) and all(re.match(_PROGRESS, line) for line in before)
        return "" if quiet else f"unexpected: {err}"
    importing = "KeyboardInterrupt" in err and "_multiarray_umath failed to import" in err  # as NumPy calls it
    if importing or "init_import_site" in err:  # where Python itself is not there yet
        return ""
    if code == -signal.SIGINT and (not err or err.rstrip().endswith("KeyboardInterrupt")):
        return ""
    return f"unexpected: {err}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--moments", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments.add_argument("--only", choices=PROGRAMS)
    given = arguments.parse_args()
    # A background job of a shell ignores it, and so would the programs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"seed {given.seed}")
    rng, failed = random.Random(given.seed), 0
    for name in [given.only] if given.only else PROGRAMS:
        with tempfile.TemporaryDirectory() as warm:
            cache = Path(warm) if name in WARM else None
            if cache:
                interrupted(name, None, cache)
            _, _, _, _, whole = interrupted(name, None, cache)
            codes: Counter[int] = Counter()
            kinds: Counter[str] = Counter()
            while codes.total() < given.moments:
                moment = rng.uniform(0, whole)
                code, err, files, bad, seconds = interrupted(name, moment, cache)
                if seconds < moment + 0.1 and code == 0:  # it had ended before
                    continue
                wrong = problem(name, code, err, bad)
                codes[code] += 1
                kinds.update(files)
                failed += bool(wrong)
                print(
                    f"{name}: {moment:6.2f} s: exit code {code} after {seconds - moment:.2f} s more {wrong}", flush=True
                )
            print(f"{name}: {whole:.1f} s whole; exit codes {dict(codes)}; files {dict(kinds)}; {failed} wrong so far")
    outcome = "wrong" if failed else "wrong: each process ended as it should, no file is torn"
    print(f"interrupt: {given.moments} moments of each program, seed {given.seed}, {failed} {outcome}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
