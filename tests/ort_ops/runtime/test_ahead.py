"""Kernels are compiled together before the first run: the same results, other processes that help, whatever they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from onnx import parser

from onnx_backprop.ort_ops.runtime import ahead

# A model with several kernels; two runs, what was compiled ahead of which, and the results as bytes.
PROGRAM = """
import json, logging, sys
import numpy as np
import onnx_backprop as ob
from onnx import parser
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.runtime import ahead

machine.processors = ahead.processors = lambda: 2
ATTRIBUTES = "strides = [1, 1], pads_begin = [1, 1], pads_end = [1, 1], dilations = [1, 1], "
ATTRIBUTES += 'data_format = "NCX", weights_format = "OIX"'
MODEL = parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>
    g (float[N,16,H,W] x, float[16,16,3,3] w) => (float[C] db, float[N,16,H,W] dz, float[16,16,3,3] dw) {
        y = onnx_backprop.Convolution <ATTRIBUTES> (x, w)
        s = Shape (x)
        t = Cast <to = 6> (s)
        dz = onnx_backprop.ConvolutionBackwardData <ATTRIBUTES> (y, w, t)
        v = Constant <value_ints = [16, 16, 3, 3]> ()
        u = Cast <to = 6> (v)
        dw = onnx_backprop.ConvolutionBackwardWeights <ATTRIBUTES> (x, dz, u)
        db = onnx_backprop.BiasAddBackward <data_format = "NCX"> (dz)
        EXTRA
    }'''.replace("EXTRA", sys.argv[1]).replace("ATTRIBUTES", ATTRIBUTES))
seen = []
ahead.watchers.append(lambda done, total: seen.append([done, total]))
rng = np.random.default_rng(0)
feeds = {"x": rng.standard_normal((2, 16, 9, 9), np.float32), "w": rng.standard_normal((16, 16, 3, 3), np.float32)}
session = ob.session(MODEL)
results = [session.run(None, feeds) for _ in range(2)]
digests = [[np.asarray(r).tobytes().hex() for r in result] for result in results]
print(json.dumps([seen, digests[0] == digests[1], digests[0]]))
"""


def answer(cache: Path, extra: str = "", **variables: str) -> tuple[list[list[int]], bool, list[str]]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | variables
    command = [sys.executable, "-c", PROGRAM, extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_empty_cache_a_full_one_and_one_by_one(tmp_path: Path) -> None:
    """Compiled ahead, found, or compiled when they are needed: the same bits."""
    seen, alike, ahead_of_it = answer(tmp_path / "a")
    total = seen[0][1]
    assert seen[0] == [0, total]
    assert seen[-1] == [total, total]
    assert total >= 3
    assert alike
    seen, alike, cached = answer(tmp_path / "a")
    assert (seen, alike, cached) == ([], True, ahead_of_it)
    seen, alike, one_by_one = answer(tmp_path / "b", "r = RandomNormal <shape = [1]> ()")
    assert (seen, alike, one_by_one) == ([], True, ahead_of_it)
    assert len(list((tmp_path / "a").rglob("*stage*"))) == len(list((tmp_path / "b").rglob("*stage*"))) + 1, "zeros"


class Finished(ahead.Exported):
    """A function that is compiled at once, in this process or, by name, nowhere else."""

    def __init__(self, name: str, compiled: list[str]) -> None:
        self._name, self._made = name, compiled

    @property
    def label(self) -> str:
        return self._name

    @property
    def address(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._made.append(self._name)
        return 1


@pytest.mark.parametrize(
    "worker", ["raise SystemExit(1)", "import sys; sys.stdin.readline()", "import time; time.sleep(0.2)"]
)
def test_a_process_that_does_not_help(monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    """It ends at once or in the middle: what it does not make is made later, when it is asked for."""
    monkeypatch.setattr(ahead, "processors", lambda: 3)
    started: list[Any] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(_popen([command[0], "-c", worker], **options))
        return started[-1]

    _popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    compiled: list[str] = []
    ahead.compile_all([Finished(str(n), compiled) for n in range(20)])
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert len(compiled) >= 18


def test_an_interruption_ends_the_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One is in the middle of a file, of which nothing is left."""
    monkeypatch.setattr(ahead, "processors", lambda: 2)
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    started: list[Any] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        worker = (
            f"import sys; sys.path[:] = {sys.path}"
            """
from onnx_backprop.opset.core.files import replacing
with replacing("kernel.o") as (file,):
    input()
    print(flush=True)
    input()
    import time; time.sleep(1000)
"""
        )
        started.append(_popen([command[0], "-c", worker], cwd=tmp_path, **options))
        return started[-1]

    def interrupt(done: int, _total: int) -> None:
        if done > 3 and (parts := list(tmp_path.iterdir())):
            seen.extend(parts)
            raise KeyboardInterrupt

    _popen, seen, compiled = subprocess.Popen, list[Path](), list[str]()
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(ahead, "watchers", [interrupt])
    monkeypatch.setattr(Finished, "address", property(lambda _: time.sleep(0.1)))
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_all([Finished(str(n), compiled) for n in range(200)])
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert len(seen) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Dropout (x)", True),
        ("y = Dropout (x, ratio)", True),
        ("y = Dropout (x, ratio, training)", False),
        ("y = com.microsoft.BiasDropout (x, x)", False),
        ("y = RandomNormalLike (x)", False),
        ("y = somebody.TheirOwn (x)", False),
    ],
)
def test_two_runs_that_give_the_same(nodes: str, expected: bool) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "com.microsoft": 1, "somebody": 1]> '
        f"g (float[N] x, float ratio, bool training) => (float[N] y) {{ {nodes} }}"
    )
    assert ahead.gives_the_same(model) is expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Relu (x)", True),
        ("y = Dropout (x)", False),
        ("y = RandomNormalLike (x)", False),
        ("c = Constant <value_int = 1> () y = If (c) <then_branch = a () => (y1) { y1 = Bernoulli (x) }, "
         "else_branch = b () => (y2) { y2 = Relu (x) }>", False),
    ],
)  # fmt: skip
def test_what_may_run_twice(nodes: str, expected: bool) -> None:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18]> g (float[N] x) => (float[N] y) {{ {nodes} }}'
    )
    assert ahead.repeatable(model) is expected
    model.graph.node[0].op_type, model.graph.node[0].domain = "TheirOwn", "somebody"
    assert not ahead.repeatable(model), "what it does is not known"
    model.functions.add(domain="somebody", name="TheirOwn")
    assert ahead.repeatable(model) is (expected or len(model.graph.node) == 1)
    inside = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {{ {nodes} }}'
    )
    model.functions[0].node.extend(inside.graph.node)
    assert ahead.repeatable(model) is expected
    assert not ahead.repeatable("model.onnx")


def test_results_of_a_trial_go_before_the_run_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are zeros, and take as much memory as those of the run that counts."""
    monkeypatch.setattr(ahead, "compile_all", lambda _: None)
    results: list[weakref.ref[Finished]] = []

    def once() -> Finished:
        if (trial := ahead._trial.get()) is not None:
            trial.missing[Finished("missing", [])] = None
        assert all(result() is None for result in results)
        results.append(weakref.ref(result := Finished("result", [])))
        return result

    result = ahead.run(once)
    assert len(results) == 2
    assert results[1]() is result
