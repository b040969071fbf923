"""Whatever Python raises in a kernel, wherever it does: an exception in Python, never a crash, never a wrong gradient."""

from __future__ import annotations

import dis
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core import signals
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from onnx_backprop.ort_ops import numpy_route
from onnx_backprop.ort_ops.runtime import bridge, c_abi, extensions
from tests.support import single_op

DY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
MODEL = single_op.model("BiasAddBackward", {"data_format": "NXC"}, [DY])
ROUTES = ("native", "numpy")
PLACES = {("native", "create"): 50, ("native", "run"): 40, ("numpy", "create"): 0, ("numpy", "run"): 20}
FILES = {module.__file__ for module in (bridge, c_abi, numpy_route, extensions._ocos)}


class Sudden(BaseException):
    """As KeyboardInterrupt, but nobody else's."""


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def function(*_: object, **__: object) -> Any:
        raise error

    return function


def interrupted(*_: object) -> Any:
    signal.raise_signal(signal.SIGINT)


def assert_right(session: onnxruntime.InferenceSession, dy: np.ndarray = DY) -> None:
    (db,) = session.run(None, {"diff_dst": dy})
    np.testing.assert_array_equal(np.asarray(db), dy.sum(axis=(0, 1)), strict=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Sudden])
def test_an_interrupted_kernel_is_not_created(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bridge, "Attributes", raising(error))
        with pytest.raises(error):
            ob.session(MODEL)
    assert_right(ob.session(MODEL))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Sudden])
def test_an_interrupted_plan_fails_the_run_alone(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    session = ob.session(MODEL)
    with monkeypatch.context() as patched:
        patched.setattr(bridge, "_validated", raising(error))
        with pytest.raises(error):
            session.run(None, {"diff_dst": DY})
    assert_right(session)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Sudden, MemoryError])
@pytest.mark.parametrize("place", ["evaluate_all", "cast_attributes"])
@pytest.mark.parametrize("kernels", PYTHON_KERNELS)
def test_an_interrupted_python_operator_fails_the_run_alone(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str, kernels: str
) -> None:
    """In the operator, and in the library's Python around it."""
    session = ob.session(MODEL, kernels=kernels)
    owner = numpy_route.Op if place == "evaluate_all" else extensions._ocos.Opdef
    sentence = error is MemoryError and place == "evaluate_all"
    with monkeypatch.context() as patched:
        patched.setattr(owner, place, raising(error))
        with pytest.raises(Exception if sentence else error, match="MemoryError" if sentence else None):
            session.run(None, {"diff_dst": DY})
    assert_right(session)


def test_no_memory_for_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while another one becomes a status."""
    session = ob.session(MODEL)
    monkeypatch.setattr(bridge, "_validated", raising(ValueError))
    with monkeypatch.context() as patched:
        patched.setattr(bridge, "_sentence", raising(MemoryError))
        with pytest.raises(MemoryError):
            session.run(None, {"diff_dst": DY})
    with pytest.raises(Exception, match="BiasAddBackward: ValueError"):
        session.run(None, {"diff_dst": DY})


def test_a_stock_session_is_interrupted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure comes first; the interruption does as soon as Python goes on."""
    options = ob.register_ops(onnxruntime.SessionOptions())
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ob.use_kernels(MODEL, "native").SerializeToString(), options)

    def run() -> None:
        try:
            session.run(None, {"diff_dst": DY})
        except Exception:  # noqa: BLE001 - onnxruntime's exceptions have no common base
            assert_right(session)
            raise AssertionError("not reached") from None

    with monkeypatch.context() as patched:
        patched.setattr(bridge, "_validated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert_right(session)


def test_another_thread_s_run_interrupts_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    session, failures = ob.session(MODEL), []

    def run() -> None:
        try:
            session.run(None, {"diff_dst": DY})
        except Exception as e:  # noqa: BLE001 - onnxruntime's exceptions have no common base
            failures.append(str(e))

    def work() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(bridge, "_validated", raising(Sudden))
            run()

    def wait() -> None:
        thread.start()
        while True:
            thread.join(0.01)

    thread = threading.Thread(target=work)
    with pytest.raises(Sudden):
        wait()
    thread.join()
    assert len(failures) == 1
    assert "interrupted" in failures[0]
    assert_right(session)


class At:
    """Raises Sudden in the callbacks, at the n-th bytecode behind one where Python handles signals."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self.before.get(frame, "").startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self.left -= 1
            if self.left < 0:
                raise Sudden
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self


@pytest.fixture
def untraced() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("stage", ["create", "run"])
@pytest.mark.parametrize("kernels", ROUTES)
def test_an_interruption_at_any_bytecode(kernels: str, stage: str) -> None:
    """Every shape is new to the session, so that each run asks Python."""
    assert_right(ob.session(MODEL, kernels=kernels))
    session, count = None, 0
    while True:
        dy = np.ones((1, count + 1, 2), np.float32)
        if session is None or stage == "create":
            session = ob.session(MODEL, kernels=kernels)
        trace = At(count)
        sys.settrace(trace)
        try:
            if stage == "create":
                session = ob.session(MODEL, kernels=kernels)
            else:
                assert_right(session, dy)
        except Sudden:
            pass
        finally:
            sys.settrace(None)
        assert_right(session, dy)
        if trace.left >= 0:
            break
        count += 1
    print(count)
    assert count >= PLACES[kernels, stage]


REGISTRATION = """
import signal, sys
from onnx_backprop.ort_ops import numpy_route, sessions
from onnx_backprop.ort_ops.runtime import c_abi
from tests.ort_ops.runtime.test_interruptions import ROUTES, MODEL, assert_right, ob

add, left = c_abi.add_external_custom_op, int(sys.argv[1])

def interrupted(library, op):
    global left
    left -= 1
    if left == 0:
        signal.raise_signal(signal.SIGINT)
    add(library, op)

c_abi.add_external_custom_op = interrupted
try:
    ob.session(MODEL)
except KeyboardInterrupt:
    for kernels in ROUTES:
        assert_right(ob.session(MODEL, kernels=kernels))
    print("right")
"""


@pytest.mark.parametrize("operator", [1, 2, 9])
def test_an_interrupted_registration_is_complete(operator: int) -> None:
    """Half of the operators could not be registered again, and a second session needs all of them."""
    command = [sys.executable, "-c", REGISTRATION, str(operator)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_signals_wait_for_the_end_of_a_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with Deferred():
            interrupted()
            with Deferred():
                interrupted()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_raise_on_the_way_into_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for a handler there calls it, and goes on doing so where it is left behind."""
    before, real = signal.getsignal(signal.SIGINT), signals._plain.signal

    def install(number: int, handler: Any) -> Any:
        real(number, handler)
        if number == signal.SIGINT:
            raise Sudden

    with monkeypatch.context() as patched:
        patched.setattr(signals._plain, "signal", install)
        with pytest.raises(Sudden), Deferred():
            raise AssertionError("not reached")
    try:
        assert signal.getsignal(signal.SIGINT) is not before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_defer_nothing() -> None:
    seen: list[Any] = []

    def work() -> None:
        with Deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
