"""Native kernels under hard conditions, each in a process of its own: what would crash must not end the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ort_ops import registers

ROOT = Path(__file__).parents[2]
WINOGRAD = "tests/ort_ops/convolution/test_winograd.py"


def run(*arguments: str, **environment: str) -> str:
    """What a Python process prints; its last words where it fails."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    last = "\n".join(result.stdout.splitlines()[-1:])
    assert result.returncode == 0, f"ended with {result.returncode} at: {last}\n{result.stderr[-3000:]}"
    return result.stdout


def guarded(*arguments: str, **environment: str) -> str:
    """`tests.ort_ops.guarded`; what ends together runs once more one by one, which names the call."""
    given = "-m", "tests.ort_ops.guarded", *arguments
    try:
        return run(*given, **environment)
    except AssertionError:
        run(*given, "--together", "1", **environment)
        raise


def test_random_calls_between_unreadable_pages() -> None:
    """A read or write beyond a tensor would end the process."""
    printed = guarded("--calls", "400", "--seed", "1")
    assert "'answered': " in printed
    refused = int(printed.split("'refused': ")[1].split("}")[0])
    assert refused > 40


@pytest.mark.parametrize("shared", [1, 100_000])
def test_random_calls_in_rounds(shared: int) -> None:
    """What large weights need, on small ones."""
    printed = guarded("--calls", "200", "--seed", "3", "--shared", str(shared))
    assert "'answered': " in printed


def test_a_narrow_vector_length() -> None:
    """The kernels of a processor with small registers, wherever this runs."""
    printed = guarded("--calls", "150", "--seed", "2", **registers.environment(4))
    assert "'answered': " in printed


def test_winograd_with_tiles_of_several_narrow_vectors() -> None:
    """On NEON a tile of 12 channels is three vectors."""
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", WINOGRAD, **registers.environment(4))
    assert " passed" in printed
    assert "failed" not in printed


def test_the_guard_sees_a_read_beyond_the_end() -> None:
    """Otherwise the tests above would prove nothing."""
    code = (
        "import ctypes\n"
        "from tests.ort_ops.guarded import Guarded\n"
        "memory = Guarded(400)\n"
        "ctypes.string_at(memory.address(at_end=True), 400 + {})\n"
    )
    run("-c", code.format(0))
    with pytest.raises(AssertionError, match="ended with -"):
        run("-c", code.format(1))


def test_an_impossible_vector_length_speaks_against_the_route() -> None:
    code = "from onnx_backprop.ort_ops.native_route import reason_against; print(reason_against())"
    printed = run("-c", code, ONNX_BACKPROP_VECTOR_LENGTH="2")
    assert "ONNX_BACKPROP_VECTOR_LENGTH: expected a power of two from 4 to 64, got '2'" in printed


EMPTY = """
import numpy as np
import onnx_backprop as ob
from onnx import parser

model = parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>
    g (float[N,1,2,3] x, float[N,1,2] sums, float[1,1,2,2] bias)
        => (float[N,1,2,3] dq, float[N,1,2,3] dk, float[N,1,2,3] dv, float[1,1,2,2] dbias) {
        dq, dk, dv, dbias = onnx_backprop.AttentionBackward (x, x, x, x, x, sums, bias)
    }''')
feeds = {"x": np.zeros((0, 1, 2, 3), np.float32), "sums": np.zeros((0, 1, 2), np.float32)}
*_, dbias = ob.session(model, kernels="native").run(None, {**feeds, "bias": np.ones((1, 1, 2, 2), np.float32)})
assert not dbias.any()
"""


def test_stages_of_nothing() -> None:
    """Attention of no batches has gradients of its bias alone, and stages without an item."""
    run("-c", EMPTY)


# A model with a kernel of each kind, and its answer as bytes.
SESSIONS = """
import multiprocessing, os, sys, threading
import numpy as np
import onnx_backprop as ob
from onnx import parser

MODEL = parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>
    g (float[N,C,H,W] x, float[N,O,H,W] dy, float[O,C,3,3] w, float[N,C,I,J] small)
        => (float[N,C,H,W] dx, float[O,C,3,3] dw, float[O] db, float[N,C,I,J] dsmall) {
        s = Shape (x)
        shape = Cast <to = 6> (s)
        k = Shape (w)
        kernel = Cast <to = 6> (k)
        dx = onnx_backprop.ConvolutionBackwardData <strides = [1, 1], dilations = [1, 1], pads_begin = [1, 1],
            pads_end = [1, 1], data_format = "NCX", weights_format = "OIX"> (dy, w, shape)
        dw = onnx_backprop.ConvolutionBackwardWeights <strides = [1, 1], dilations = [1, 1], pads_begin = [1, 1],
            pads_end = [1, 1], data_format = "NCX", weights_format = "OIX"> (x, dy, kernel)
        db = onnx_backprop.BiasAddBackward <data_format = "NCX"> (dy)
        dsmall = onnx_backprop.InterpolateBackward <mode = "linear", data_format = "NCX"> (small, x)
    }''')
rng = np.random.default_rng(0)
FEEDS = {
    name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in {"x": (2, 20, 19, 21), "dy": (2, 40, 19, 21), "w": (40, 20, 3, 3), "small": (2, 20, 9, 8)}.items()
}

def answer(runs=1, threads=2, parallel=False):
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 2
    session = ob.session(MODEL, kernels="native", session_options=options)
    answers = {b"".join(np.asarray(o).tobytes() for o in session.run(None, FEEDS)) for _ in range(runs)}
    assert len(answers) == 1, "the answers of one session differ"
    return answers.pop()
"""


def test_sessions_in_threads_give_the_same_bits() -> None:
    """Four sessions in four threads, one and two threads each, nodes in sequence and in parallel, 500 runs each."""
    code = """
expected, got = answer(), []
ways = [(1, False), (2, False), (2, True), (3, True)]
threads = [threading.Thread(target=lambda t=t, p=p: got.append(answer(500, t, p))) for t, p in ways]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(got) == 4 and set(got) == {expected}, "the answers of the threads differ"
print("same", len(expected))
"""
    assert run("-c", SESSIONS + code).startswith("same ")


def test_a_forked_child_makes_its_own_session() -> None:
    code = """
expected = answer()
child = os.fork()
if not child:
    os._exit(0 if answer(5) == expected else 1)
assert os.waitpid(child, 0)[1] == 0, "the child failed"
assert answer() == expected
print("same")
"""
    assert run("-W", "ignore::DeprecationWarning", "-c", SESSIONS + code) == "same\n"


def test_spawned_workers_make_their_own_sessions(tmp_path) -> None:
    script = tmp_path / "workers.py"
    code = """
def work(_):
    return answer(3)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert set(pool.map(work, range(4))) == {answer()}
    print("same")
"""
    script.write_text(SESSIONS + code)
    assert run(str(script)) == "same\n"


def test_sessions_free_their_memory() -> None:
    """The resident set after a thousand more kernels, four in a session, each with plans for some shapes.

    Allocators and threads may take a megabyte at any time, once; what leaks grows with the sessions.
    """
    for sessions in ("500", "1500"):
        printed = run("-m", "tests.ort_ops.sessions_in_memory", "--sessions", sessions, "--kernels", "4")
        grown = float(printed.split()[-2])
        if grown < 0.5:
            break
    assert grown < 0.5, f"{grown} KiB stay behind per kernel"


def test_winograd_in_scratch_of_exactly_its_size() -> None:
    """Beyond it lies an unreadable page; malloc aligns to 16 bytes, and kernels to 64 by themselves."""
    code = f"""if True:
        import sys, pytest

        class Guard:
            def pytest_sessionstart(self):
                from tests.ort_ops.guarded import guard_scratch
                guard_scratch()

        names = "against_the_reference and lengths11"
        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", names, {WINOGRAD!r}], plugins=[Guard()]))
    """
    assert " passed" in run("-c", code)
