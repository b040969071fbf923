"""A compiled library in stock onnxruntime, on this machine: the losses of `Trainer`, and what goes wrong says so."""

from __future__ import annotations

import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.huge_pages import VARIABLE, block_bytes
from onnx_backprop.ort_ops.plugin import targets

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin.py"
STOCK = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not {"onnx_backprop", "llvmlite", "onnxruntime_extensions"} & set(sys.modules)
"""
# Losses of three steps, then what the process holds while the session is open.
HELD = """
import runpy, sys, numpy as np
from pathlib import Path
example, folder, library = map(Path, sys.argv[1:])
training, data = runpy.run_path(str(example))["Training"](folder, library), np.load(folder / "data.npz")
for n in range(3):
    print(training.step({"x": data["x"][n], "target": data["target"][n], "learning_rate": np.array(0.01, np.float32)}))
print(Path("/proc/self/smaps_rollup").read_text())
"""
# A libc whose system lets no process use registers of matrices.
REFUSE = """
#include <dlfcn.h>
long syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == 158 && a == 0x1023) return -1;
  return ((long (*)(long, ...))dlsym((void *)-1L, "syscall"))(number, a, b, c, d, e, f);  // RTLD_NEXT
}
"""
SIZES = ((2, 6, 7), (3, 9, 5))
FAILURES: Any = onnxruntime.capi.onnxruntime_pybind11_state  # pyright: ignore[reportAttributeAccessIssue]

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CC") or shutil.which("cc") or find_spec("ziglang")), reason="there is no C compiler (cc, zig)"
)


def _model(channels: int = 3) -> ModelProto:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        image (float[N, 1, H, W] x) => (float[N, 1, H, W] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) b = Relu (a)
            y = Conv <pads = [1, 1, 1, 1]> (b, w2, b2) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (channels, 1, 3, 3), "b1": (channels,), "w2": (1, channels, 3, 3), "b2": (1,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name))
    return model


def small(channels: int = 3) -> ob.TrainingGraph:
    return ob.training_graph(_model(channels), loss="mse", optimizer="adamw")


def batches(size: tuple[int, int, int], count: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (count, size[0], 1, *size[1:])
    return {name: rng.random(shape, np.float32) for name in ("x", "target")}


def test_texts_in_c_are_what_they_were(tmp_path: Path) -> None:
    from onnx_backprop.ort_ops.plugin.library import _text

    odd = 'a"b\\c??/\n\té😀'
    (tmp_path / "x.c").write_text(f"#include <stdio.h>\nint main(void) {{ return !fputs({_text(odd)}, stdout); }}")
    subprocess.run([*(os.environ.get("CC") or "cc").split(), "-o", tmp_path / "x", tmp_path / "x.c"], check=True)
    assert subprocess.run([tmp_path / "x"], capture_output=True, check=False).stdout.decode() == odd


def _lengths(size: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip("NHW", size, strict=True))


def compiled(folder: Path) -> Path:
    """A small network in a folder, for two sets of lengths."""
    ob.compile_plugin(small(), folder, lengths=[_lengths(size) for size in SIZES])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def training() -> Any:
    return runpy.run_path(str(EXAMPLE))["Training"]


def library_in(folder: Path) -> Path:
    (path,) = (folder / targets.here()).glob("onnx_backprop.*")
    return path


def _options(*libraries: Path) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for library in libraries:
        options.register_custom_ops_library(str(library))
    return options


def _expected(size: tuple[int, int, int], channels: int = 3) -> tuple[list[float], dict[str, np.ndarray]]:
    trainer, data = ob.Trainer(small(channels), learning_rate=0.01), batches(size)
    return [trainer.step({k: v[n] for k, v in data.items()}) for n in range(len(data["x"]))], trainer.state()


def _trained(training: Any, folder: Path, size: tuple[int, int, int], threads: int = 0) -> tuple[list[float], Any]:
    run, data = training(folder, library_in(folder), threads), batches(size)
    rate = np.array(0.01, np.float32)
    losses = [run.step({**{k: v[n] for k, v in data.items()}, "learning_rate": rate}) for n in range(len(data["x"]))]
    return losses, run.state()


@pytest.mark.parametrize("size", SIZES)
def test_a_process_without_this_package_has_the_losses_of_the_trainer(folder: Path, tmp_path: Path, size) -> None:
    np.savez(tmp_path / "data.npz", **batches(size))
    arguments = [str(EXAMPLE), str(folder), targets.here(), str(tmp_path / "data.npz"), "--learning-rate", "0.01"]
    printed = subprocess.run(
        [sys.executable, "-c", STOCK, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert [float(line) for line in printed.split()] == _expected(size)[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_losses_and_state_are_those_of_the_trainer_on_any_number_of_threads(
    folder: Path, training: Any, threads: int
) -> None:
    losses, state = _trained(training, folder, SIZES[0], threads)
    expected, wanted = _expected(SIZES[0])
    assert losses == expected
    assert state.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.mark.skipif(not 0 < block_bytes() <= 2 << 20, reason="this system gives no huge pages of 2 MiB on request")
def test_large_tensors_lie_in_huge_pages(tmp_path: Path) -> None:
    """Those of 4 and 12 MiB that kernels read: at least the 12 MiB of `a`, whatever the C library's memory gives."""
    size = (1, 1024, 1024)
    ob.compile_plugin(small(), tmp_path, lengths=_lengths(size))
    np.savez(tmp_path / "data.npz", **batches(size, 3))
    losses, huge = {}, {}
    for setting in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", HELD, str(EXAMPLE), str(tmp_path), str(library_in(tmp_path))],
            capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, VARIABLE: setting},
        )  # fmt: skip
        losses[setting], listed = done.stdout.split()[:3], done.stdout
        huge[setting] = int(re.findall(r"AnonHugePages: +(\d+) kB", listed)[0])
    assert huge["1"] - huge["0"] >= 10 << 10, huge
    assert losses["0"] == losses["1"]


def test_updates_are_in_place_and_the_guard_says_so(folder: Path, training: Any) -> None:
    run, data = training(folder, library_in(folder)), batches(SIZES[0])
    about = run.session.get_modelmeta().custom_metadata_map
    assert set(about["in_place"].split("\n")) >= {"w1", "w2"}
    before = run.state()["w1"]
    run.step({**{k: v[0] for k, v in data.items()}, "learning_rate": np.array(0.01, np.float32)})
    assert run.guard == 2
    assert not np.array_equal(run.state()["w1"], before)


def test_a_loss_that_is_not_finite_leaves_the_state(folder: Path, training: Any) -> None:
    run, data = training(folder, library_in(folder)), batches(SIZES[0])
    before = run.state()
    batch = {k: v[0] for k, v in data.items()} | {"learning_rate": np.array(0.01, np.float32)}
    with pytest.raises(FloatingPointError):
        run.step(batch | {"x": np.full_like(batch["x"], np.nan)})
    for name, array in run.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_other_lengths_are_refused_by_a_status_that_names_them(folder: Path, training: Any) -> None:
    run = training(folder, library_in(folder))
    other = {k: v[0] for k, v in batches((2, 8, 8)).items()} | {"learning_rate": np.array(0.01, np.float32)}
    with pytest.raises(Exception, match=r"compiled for the lengths N=2,H=6,W=7; N=3,H=9,W=5; .*\[2,1,8,8\]"):
        run.step(other)
    assert run.step({k: v[0] for k, v in batches(SIZES[0]).items()} | {"learning_rate": np.array(0.01, np.float32)})


def test_an_input_that_is_left_out_is_refused(folder: Path) -> None:
    model = onnx.load(folder / "training.onnx")
    node = next(n for n in model.graph.node if n.op_type == "OnnxBackprop_Convolution" and len(n.input) == 3)
    node.input[2] = ""  # the bias, which may be absent; the others onnxruntime refuses
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options(library_in(folder)))
    state = onnxruntime.InferenceSession(folder / "initial.onnx")
    feeds = dict(zip([v.name for v in state.get_outputs()], state.run(None, {}), strict=True))
    feeds |= {k: v[0] for k, v in batches(SIZES[0]).items()}
    rest = {v.name: np.ones(v.shape, np.float32) for v in session.get_inputs() if v.name not in feeds}
    with pytest.raises(FAILURES.InvalidArgument, match=r"came to this node: \[.*\], \[.*\], absent"):
        session.run(None, feeds | rest)


def test_library_in_of_another_graph_is_refused(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "training.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "spec":
                attribute.i = 1000
    with pytest.raises(FAILURES.RuntimeException, match="not of the graph that the library was made for"):
        onnxruntime.InferenceSession(model.SerializeToString(), _options(library_in(folder)))
    with pytest.raises(FAILURES.Fail, match="onnxbackprop_"):
        onnxruntime.InferenceSession(folder / "training.onnx", _options())


def test_two_libraries_in_one_process_and_in_the_same_options(folder: Path, tmp_path: Path, training: Any) -> None:
    ob.compile_plugin(small(5), tmp_path, lengths=_lengths(SIZES[0]))
    together = _options(library_in(folder), library_in(tmp_path))
    for where in (folder, tmp_path):
        onnxruntime.InferenceSession(where / "training.onnx", together)
    assert _trained(training, folder, SIZES[0])[0] == _expected(SIZES[0])[0]
    assert _trained(training, tmp_path, SIZES[0])[0] == _expected(SIZES[0], 5)[0]


def test_threads_may_share_a_session_and_have_their_own(folder: Path) -> None:
    options = _options(library_in(folder))
    shared = onnxruntime.InferenceSession(folder / "training.onnx", options)
    initial = onnxruntime.InferenceSession(folder / "initial.onnx")
    state = dict(zip([v.name for v in initial.get_outputs()], initial.run(None, {}), strict=True))
    about = shared.get_modelmeta().custom_metadata_map
    fixed = state | {about["guard"]: np.ones((), np.float32), "learning_rate": np.array(0.01, np.float32)}
    outcome: list[tuple[int, list[np.ndarray]]] = []

    def work(n: int) -> None:
        session = shared if n % 2 else onnxruntime.InferenceSession(folder / "training.onnx", options)
        which = n // 2 % 2
        batch = {k: v[0] for k, v in batches(SIZES[which]).items()}
        outcome.extend((which, session.run(None, fixed | batch)) for _ in range(20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcome) == 160
    for which in (0, 1):
        results = [arrays for number, arrays in outcome if number == which]
        for arrays in results[1:]:
            for array, first in zip(arrays, results[0], strict=True):
                np.testing.assert_array_equal(array, first)


def test_a_run_that_is_ended_leaves_the_session(folder: Path, training: Any) -> None:
    run, ended = training(folder, library_in(folder)), onnxruntime.RunOptions()
    ended.terminate = True
    for name, array in batches(SIZES[0]).items():
        run.bindings[0][0].bind_cpu_input(name, array[0])
    run.bindings[0][0].bind_cpu_input("learning_rate", np.array(0.01, np.float32))
    with pytest.raises(Exception, match="terminate"):
        run.session.run_with_iobinding(run.bindings[0][0], ended)
    data = batches(SIZES[0])
    losses = [
        run.step({k: v[n] for k, v in data.items()} | {"learning_rate": np.array(0.01, np.float32)}) for n in range(6)
    ]
    assert losses == _expected(SIZES[0])[0]


def sessions(folder: Path, count: int) -> int:
    """Bytes by which a process grows while it opens and closes so many sessions, the library with each."""
    batch = {k: v[0] for k, v in batches(SIZES[0]).items()}
    initial = onnxruntime.InferenceSession(folder / "initial.onnx")
    state = dict(zip([v.name for v in initial.get_outputs()], initial.run(None, {}), strict=True))
    fixed = state | batch | {"update_guard": np.ones((), np.float32), "learning_rate": np.array(0.01, np.float32)}
    start = 0
    for n in range(count):
        options = _options(library_in(folder))
        options.intra_op_num_threads = 1
        onnxruntime.InferenceSession(folder / "training.onnx", options).run(None, fixed)
        if n == count // 2:
            start = _resident()
    return _resident() - start


def _resident() -> int:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_sessions_come_and_go_without_growth(folder: Path) -> None:
    assert sessions(folder, 200) < 4 << 20


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"lengths": {"N": 2, "H": 6}}, "lengths: expected the length of 'W'"),
        ({"lengths": {"N": 2, "H": 6, "W": 0}}, "lengths: 'W': expected a whole number"),
        ({"lengths": {"batch": 2}}, "lengths: no input has a length 'batch'. There are: N, H, W"),
        ({"target": "linux-x86"}, "target: expected linux-x86_64"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=match):
        ob.compile_plugin(small(), tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_state_in_float16_is_refused(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float16[N,2] x) => (float16[N,2] y) <float16[2] w = {1,2}> { y = Mul (x, w) }""")
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", trainable=["w"])
    with pytest.raises(ob.InvalidArgumentError, match="'w' has type float16, .* Convert the model to float32"):
        ob.compile_plugin(graph, tmp_path / "new", lengths={"N": 2})
    assert not (tmp_path / "new").exists()


def test_what_computes_in_float16_has_the_losses_of_the_trainer(tmp_path: Path, training: Any) -> None:
    graph = ob.training_graph(_model(), loss="mse", optimizer="adamw", precision="fp16")
    ob.compile_plugin(graph, tmp_path, lengths=_lengths(SIZES[0]))
    trainer, data = ob.Trainer(graph, learning_rate=0.01), batches(SIZES[0])
    expected = [trainer.step({k: v[n] for k, v in data.items()}) for n in range(6)]
    assert _trained(training, tmp_path, SIZES[0])[0] == expected


def test_fused_batch_norms(tmp_path: Path, training: Any) -> None:
    """A residual, a Relu and their gradients in the passes of the batch norm."""
    model = _model()
    nodes = parser.parse_graph("""
        g (float[N, 3, H, W] a) => (float[N, 3, H, W] b) {
            n, m, v = BatchNormalization <training_mode = 1> (a, gamma, beta, mean, variance)
            s = Add (n, a) b = Relu (s) }""").node
    model.graph.node.pop(1)
    for n, node in enumerate(nodes):
        model.graph.node.insert(1 + n, node)
    for n, name in enumerate(("gamma", "beta", "mean", "variance")):
        model.graph.initializer.append(numpy_helper.from_array(np.full(3, 0.5 + n / 4, np.float32), name))
    graph = ob.training_graph(model, loss="mse", optimizer="adamw", training_mode=True)
    ob.compile_plugin(graph, tmp_path, lengths=_lengths(SIZES[0]))
    compiled_nodes = onnx.load(tmp_path / "training.onnx").graph.node
    assert (
        sum(any(a.name == "program" and "ReLUBackward" in str(a.s) for a in n.attribute) for n in compiled_nodes) == 1
    )
    assert not any(node.op_type in ("Add", "Relu") for node in compiled_nodes[:8])
    trainer, data = ob.Trainer(graph, learning_rate=0.01), batches(SIZES[0])
    expected = [trainer.step({k: v[n] for k, v in data.items()}) for n in range(6)]
    for threads in (1, 2):
        assert _trained(training, tmp_path, SIZES[0], threads)[0] == expected


def test_products_are_those_of_the_trainer(tmp_path: Path, training: Any) -> None:
    """In registers of matrices, if the processor has them and no library of the folder is for one that has none."""
    model, rng = (
        parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[64,96] x) => (float[64,64] y) { a = MatMul (x, w1) b = Relu (a) y = MatMul (b, w2) }"""),
        np.random.default_rng(0),
    )
    for name, shape in {"w1": (96, 128), "w2": (128, 64)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), name))
    graph = ob.training_graph(model, loss="mse", optimizer="adamw")
    both, alone = tmp_path / "both", tmp_path / "alone"
    ob.compile_plugin(graph, both, target=list(dict.fromkeys((targets.here(), targets.here().partition("-amx")[0]))))
    ob.compile_plugin(graph, alone)
    data = {name: rng.random((64, n), np.float32) for name, n in {"x": 96, "target": 64}.items()}
    trainer = ob.Trainer(graph, learning_rate=0.01)
    expected, rate = [trainer.step(data) for _ in range(3)], np.array(0.01, np.float32)
    for threads in (1, 2, 3):
        run = training(alone, library_in(alone), threads)
        assert [run.step({**data, "learning_rate": rate}) for _ in range(3)] == expected
    counts = [
        sum(node.op_type == "OnnxBackprop_MatrixProduct" for node in onnx.load(where / "training.onnx").graph.node)
        for where in (alone, both)
    ]
    assert counts == [5 if matrix_tiles() else 0, 0]


@pytest.mark.skipif(targets.here() != targets.AMX, reason="this processor has no registers of matrices")
def test_a_system_that_refuses_amx_gives_a_status(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "refuse.c").write_text(REFUSE)
    compiler = (os.environ.get("CC") or "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", tmp_path / "refuse.so", tmp_path / "refuse.c"], check=True)
    program = "import sys, onnxruntime; onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[1])"
    for preloaded, match in (("", ""), (tmp_path / "refuse.so", "has instructions that the system does not let this")):
        done = subprocess.run(
            [sys.executable, "-c", program, library_in(folder)],
            env=os.environ | {"LD_PRELOAD": str(preloaded)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, match in done.stderr) == (1 if match else 0, True), done.stderr


def test_gradients_alone_are_no_training(tmp_path: Path) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="no optimizer"):
        ob.compile_plugin(ob.training_graph(_model(), loss="mse"), tmp_path)


def test_the_commands_of_the_page_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from onnx_backprop.command.main import main

    path, folder = tmp_path / "training.onnx", tmp_path / "compiled"
    onnx.save(_model(), tmp_path / "model.onnx")
    model = str(tmp_path / "model.onnx")
    assert main(["compile", model, "-o", str(folder)]) == 2
    assert "Make one with `convert MODEL -o TRAINING --loss … --optimizer …`" in capsys.readouterr().err
    assert main(["convert", model, "-o", str(path), "--loss", "mse", "--optimizer", "adamw"]) == 0
    assert onnx.load(path) == small().model
    assert main(["compile", str(path), "-o", str(folder), "--lengths", "N=2,H=6,W=7"]) == 0
    assert "KB" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} >= {
        "training.onnx",
        "initial.onnx",
        "evaluation.onnx",
        "forward.onnx",
    }
    assert main(["compile", str(path), "-o", str(folder), "--lengths", "N=2"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["compile", str(path), "-o", str(folder), "--lengths", "N", "--force"]) == 2
    assert "--lengths: expected NAME=LENGTH, got 'N'" in capsys.readouterr().err
