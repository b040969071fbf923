"""Runs that pause: what they hand out and take is what inputs and outputs would have been, and nobody waits for good."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, parser

from onnx_backprop.ort_ops import default_options, has_kernels, session
from onnx_backprop.ort_ops.runtime import pause
from onnx_backprop.ort_ops.runtime.pause import PausedRun, add_pause

OrtValue = onnxruntime.OrtValue
HEAD = '<ir_version: 10, opset_import: ["": 18]>'
# y and the gradient of a loss of y by x, which both read a
MODEL = f"{HEAD} m (float[N] x, float[N] dy) => (float[N] y, float[N] dx) {{ a = Exp(x) y = Mul(a, x) da = Add(a, y) dx = Mul(dy, da) }}"


def opened(model: ModelProto, ends: list[str], seeds: Mapping[str, str]) -> tuple[onnxruntime.InferenceSession, str]:
    options = default_options(python_operators=True, lean=True)
    has_kernels(options)
    token = add_pause(model, ends, seeds)
    assert token is not None
    return session(model, kernels=None, session_options=options), token


def fed(**arrays: np.ndarray) -> dict[str, OrtValue]:
    return {name: OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}


def wait_for_nobody() -> None:
    gc.collect()
    for _ in range(1000):
        if not pause._running:
            return
        time.sleep(0.01)
    raise AssertionError("a run still waits")


def test_values_and_gradients_of_interleaved_runs() -> None:
    run_on, token = opened(parser.parse_model(MODEL), ["y"], {"y": "dy"})
    arrays = [np.linspace(-1, 1, n, dtype=np.float32) for n in (3, 5, 0)]
    runs = [PausedRun(run_on, token, fed(x=x)) for x in arrays]
    for x, run in zip(arrays[::-1], runs[::-1], strict=True):
        (y,), dy = run.values, 2 * x
        np.testing.assert_allclose(y, np.exp(x) * x, rtol=1e-6)
        (dx,) = run.resume({0: dy})
        np.testing.assert_allclose(dx.numpy(), dy * np.exp(x) * (1 + x), rtol=1e-5)
    wait_for_nobody()


FLOATS = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16]
INTEGERS = [
    TensorProto.BOOL,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT64,
]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("elements", FLOATS + INTEGERS)
def test_types(elements: int, shape: tuple[int, ...]) -> None:
    """A value passes as it is, and its gradient, of floats, comes back."""
    dtype = helper.tensor_dtype_to_np_dtype(elements)
    x = np.array(np.arange(np.prod(shape)).reshape(shape) * 1.37, dtype)
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    values = [helper.make_tensor_value_info(name, elements, shape) for name in ("x", "y", "dy", "dx")]
    floating = elements in FLOATS
    if floating:
        nodes.append(helper.make_node("Identity", ["dy"], ["dx"]))
    inputs, outputs = [values[0], *values[2:3][: int(floating)]], [values[1], *values[3:][: int(floating)]]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    run_on, token = opened(model, ["y"], {"y": "dy"} if floating else {})
    raw = OrtValue.ortvalue_from_numpy_with_onnx_type(x, elements)
    run = PausedRun(run_on, token, {"x": raw})
    (y,) = run.values
    assert y.shape == shape
    np.testing.assert_array_equal(y.astype(dtype), x)
    if floating:
        seed = (x.astype(np.float64) - 0.5).astype(dtype)
        (dx,) = run.resume({0: seed.astype(y.dtype)})
        assert tuple(dx.shape()) == shape
        assert dx.element_type() == elements
    wait_for_nobody()


def test_what_cannot_be_handed_out_leaves_the_model_as_it_was() -> None:
    model = parser.parse_model(
        f"{HEAD} m (string[N] x, float[N] dy) => (string[N] y, float[N] dx) {{ y = Identity(x) dx = Neg(dy) }}"
    )
    before = model.SerializeToString()
    assert add_pause(model, ["y"], {}) is None
    assert model.SerializeToString() == before


def test_a_gradient_that_needs_no_seed() -> None:
    """Nothing waits then: the run is over at once."""
    text = f"{HEAD} m (float[N] x, float[N] dy) => (float[N] y, float[N] dx) {{ y = Neg(x) dx = Sub(x, x) }}"
    run_on, token = opened(parser.parse_model(text), ["y"], {"y": "dy"})
    run = PausedRun(run_on, token, fed(x=np.ones(3, np.float32)))
    np.testing.assert_array_equal(run.values[0], [-1, -1, -1])
    np.testing.assert_array_equal(run.resume({0: np.ones(3, np.float32)})[0].numpy(), [0, 0, 0])


def test_a_run_that_nobody_resumes_ends() -> None:
    run_on, token = opened(parser.parse_model(MODEL), ["y"], {"y": "dy"})
    run = PausedRun(run_on, token, fed(x=np.ones(3, np.float32)))
    assert len(pause._running) == 1
    del run
    wait_for_nobody()


@pytest.mark.parametrize(("reached", "expected"), [("y", "Add node"), ("dx", "Mul node")])
def test_errors_of_both_parts(reached: str, expected: str) -> None:
    text = f"""{HEAD} m (float[N] x, float[M] z, float[N] dy) => (float[N] y, float[N] dx) {{
        {"y = Add(x, z) dx = Neg(dy)" if reached == "y" else "y = Neg(x) dx = Mul(dy, z)"} }}"""
    run_on, token = opened(parser.parse_model(text), ["y"], {"y": "dy"})
    feeds = fed(x=np.ones(3, np.float32), z=np.ones(2, np.float32))
    with pytest.raises(Exception, match=expected):
        PausedRun(run_on, token, feeds).resume({0: np.ones(3, np.float32)})
    wait_for_nobody()


def test_an_interruption_ends_the_run() -> None:
    """Of a loop that would take hours."""
    text = f"""{HEAD} m (float[N] x, float[N] dy, int64 n, bool go) => (float[N] y, float[N] dx) {{
        y = Loop (n, go, x) <body = b (int64 i, bool c, float[N] v) => (bool d, float[N] w) {{ d = Identity(c) w = Neg(v) }}>
        dx = Neg(dy) }}"""
    run_on, token = opened(parser.parse_model(text), ["y"], {"y": "dy"})
    feeds = fed(x=np.ones(3, np.float32), n=np.array(10**12), go=np.array(True))
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        PausedRun(run_on, token, feeds)
    wait_for_nobody()


LAYERS, MEBIBYTES = 24, 8
MEMORY = f"""
import resource
import numpy as np
import onnxruntime
from onnx import parser
from tests.ort_ops.runtime.test_pause import HEAD, PausedRun, fed, opened
lines = [f"a{{n + 1}} = Exp(a{{n}})" for n in range({LAYERS})]
lines += [f"d{{n}} = Mul(d{{n + 1}}, a{{n + 1}})" for n in reversed(range({LAYERS}))]
names = ", ".join(f"float[N] d{{n}}" for n in range({LAYERS}))
text = f"{{HEAD}} m (float[N] a0, float[N] d{LAYERS}) => (float[N] a{LAYERS}, {{names}}) {{{{ {{' '.join(lines)}} }}}}"
run_on, token = opened(parser.parse_model(text), ["a{LAYERS}"], {{"a{LAYERS}": "d{LAYERS}"}})
x = np.full({MEBIBYTES} * 2**18, -50, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = PausedRun(run_on, token, fed(a0=x))
run.resume({{0: x}})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 / {MEBIBYTES})
"""


def child(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has held at most is measured in other units")
def test_what_the_backward_pass_has_read_is_freed() -> None:
    """24 values of the forward pass, then as many gradients in their place: two sessions would hold 48 of them."""
    assert float(child(MEMORY)) < 1.5 * LAYERS


COMPILED = """
import numpy as np
import onnxruntime
from onnx import parser
from onnx_backprop.ort_ops import default_options, has_kernels, lower, session
from onnx_backprop.ort_ops.runtime.pause import PausedRun, add_pause
from tests.ort_ops.runtime.test_pause import fed
A = 'strides = [1, 1], pads_begin = [1, 1], pads_end = [1, 1], dilations = [1, 1], '
A += 'data_format = "NCX", weights_format = "OIX"'
model = parser.parse_model(f'''<ir_version: 10, opset_import: ["": 18, "onnx_backprop": 1]>
    m (float[1,16,9,9] x, float[16,16,3,3] w, float[1,16,9,9] dy, float[1,16,9,9] dz)
    => (float[1,16,9,9] y, float[1,16,9,9] z, float[16,16,3,3] dw, float[1,16,9,9] s) {{
        y = FORWARD
        z = Neg(x)
        v = Constant <value_ints = [16, 16, 3, 3]> ()
        u = Cast <to = 6> (v)
        dw = onnx_backprop.ConvolutionBackwardWeights <{A}> (x, dy, u)
        part = Slice(dw, start, end)
        total = ReduceSum <keepdims = 0> (part)
        s = Add(dz, total)
    }}'''.replace("FORWARD", FORWARD.replace("ATTRIBUTES", A)))
model.graph.initializer.extend(onnx.numpy_helper.from_array(np.zeros(4, np.int64), n) for n in ("start", "end"))
model = lower(model, "native", ["y", "z"]).model
options = onnxruntime.SessionOptions() if DEFAULT_ORDER else default_options(python_operators=True, lean=True)
has_kernels(options)
token = add_pause(model, ["y", "z"], {"y": "dy", "z": "dz"})
run_on = session(model, kernels=None, session_options=options)
x = np.random.default_rng(0).standard_normal((1, 16, 9, 9)).astype(np.float32)
w = np.zeros((16, 16, 3, 3), np.float32)
w[range(16), range(16), 1, 1] = 1
for _ in range(2):
    run = PausedRun(run_on, token, fed(x=x, w=w))
    y, z = run.values
    dw, s = (value.numpy() for value in run.resume({0: x, 1: 2 * x}))
    np.testing.assert_allclose(y, x, atol=1e-6)
    np.testing.assert_array_equal(z, -x)
    np.testing.assert_allclose(s, 2 * x, atol=1e-6)
    np.testing.assert_allclose(dw[:, :, 1, 1], np.einsum("nohw,nihw->oi", x, x), atol=1e-4)
"""


@pytest.mark.parametrize("default_order", [False, True])
@pytest.mark.parametrize(
    "forward", ["onnx_backprop.Convolution <ATTRIBUTES> (x, w)", "Identity(x)"], ids=["both", "backward"]
)
def test_kernels_that_are_missing_in_either_part(forward: str, default_order: bool, tmp_path: Path) -> None:
    """The first run finds out what to compile; what it hands out is never zeros in the place of values."""
    program = f"import onnx\nFORWARD = {forward!r}\nDEFAULT_ORDER = {default_order}\n{COMPILED}"
    child(program, NUMBA_CACHE_DIR=str(tmp_path))


def test_the_end_of_a_process_with_a_run_that_waits() -> None:
    child(
        "import numpy as np\nfrom onnx import parser\n"
        "from tests.ort_ops.runtime.test_pause import MODEL, PausedRun, fed, opened\n"
        "run_on, token = opened(parser.parse_model(MODEL), ['y'], {'y': 'dy'})\n"
        "runs = [PausedRun(run_on, token, fed(x=np.ones(3, np.float32))) for _ in range(3)]\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    child(
        "import os, threading, time\nfrom onnx_backprop.ort_ops.runtime import pause\n"
        "pause._in_a_thread(lambda: None)\ntime.sleep(0.2)\nassert pause._idle\n"
        "if (pid := os.fork()) == 0:\n"
        "    ran = threading.Event()\n    pause._in_a_thread(ran.set)\n    os._exit(0 if ran.wait(10) else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_wait_for_a_run_of_the_other() -> None:
    child(
        "import os, signal\nimport numpy as np\nfrom onnx import parser\n"
        "from onnx_backprop.opset.core.errors import KernelError\n"
        "from tests.ort_ops.runtime.test_pause import MODEL, PausedRun, fed, opened\n"
        "run_on, token = opened(parser.parse_model(MODEL), ['y'], {'y': 'dy'})\n"
        "x = np.ones(3, np.float32)\nrun = PausedRun(run_on, token, fed(x=x))\n"
        "if (pid := os.fork()) == 0:\n"
        "    signal.alarm(20)\n"
        "    try:\n        run.resume({0: x})\n    except KernelError:\n        os._exit(0)\n    os._exit(1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "run.resume({0: x})\n"
    )


def test_the_end_of_a_process_waits_until_a_run_has_freed_what_it_had() -> None:
    """A thread that frees values of onnxruntime while Python goes ends the process by a signal."""
    program = "import time\nfrom onnx_backprop.ort_ops import default_options, has_kernels\n"
    program += "from onnx_backprop.ort_ops.runtime import pause\nhas_kernels(default_options(python_operators=True))\n"
    program += "pause._in_a_thread(lambda: (time.sleep(0.5), print('freed', flush=True)))\n"
    assert "freed" in child(program)


def test_a_thread_that_does_not_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    run_on, token = opened(parser.parse_model(MODEL), ["y"], {"y": "dy"})
    monkeypatch.setattr(pause, "_idle", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        PausedRun(run_on, token, fed(x=np.ones(3, np.float32)))
    assert not pause._running
    assert not pause._busy


def test_many_runs_at_once_leave_few_threads() -> None:
    run_on, token = opened(parser.parse_model(MODEL), ["y"], {"y": "dy"})
    runs = [PausedRun(run_on, token, fed(x=np.ones(3, np.float32))) for _ in range(3 * pause._KEPT)]
    before = threading.active_count()
    del runs
    wait_for_nobody()
    for _ in range(1000):
        if not pause._busy and threading.active_count() <= before - pause._KEPT:
            break
        time.sleep(0.01)
    assert len(pause._idle) <= pause._KEPT
    assert threading.active_count() <= before - pause._KEPT
