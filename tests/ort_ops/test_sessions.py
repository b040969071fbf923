"""What every route owes to the process it runs in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import cache

import pytest

from onnx_backprop.opset import KERNELS
from onnx_backprop.ort_ops import numba_route, sessions

SESSIONS_AT_EXIT = """
import builtins, sys, types
import numpy as np
from onnx import parser
import onnx_backprop as ob

model = ob.backward(parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[1, 1, n] x, float[1, 1, 3] w) => (float[1, 1, m] y) { y = Conv (x, w) }
'''), wrt=["w"])


def session():
    return ob.session(model, kernels=sys.argv[1])


class Node:
    pass


keeper = sys.modules["keeper"] = types.ModuleType("keeper")
keeper.session = session()
node = Node()
node.itself, node.session = node, session()
builtins.kept = session()
feeds = {"x": np.ones((1, 1, 5), np.float32), "w": np.ones((1, 1, 3), np.float32), "y_grad": np.ones((1, 1, 3), np.float32)}
print(*[s.run(["w_grad"], feeds)[0].ravel() for s in (keeper.session, node.session, builtins.kept)])
"""


@pytest.mark.parametrize("kernels", KERNELS)
def test_sessions_may_outlive_the_modules(kernels: str) -> None:
    """Sessions in reference cycles are destroyed when nearly everything else of Python is gone."""
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS_AT_EXIT, kernels], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "[3. 3. 3.] [3. 3. 3.] [3. 3. 3.]\n"


NATIVE_OPERATOR = """
import gc, weakref
from onnx_backprop.ort_ops import numpy_route
from onnx_backprop.ort_ops.runtime import c_abi

operators, add = [], c_abi.add_external_custom_op
c_abi.add_external_custom_op = lambda library, op: operators.append(weakref.ref(op)) or add(library, op)
numpy_route.register()
gc.collect()
print([operator() is not None for operator in operators])
"""


def test_a_native_operator_outlives_its_module() -> None:
    """Python may clear the module first and then destroy a session, whose kernels call the operator."""
    done = subprocess.run([sys.executable, "-c", NATIVE_OPERATOR], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[True]\n"), done.stderr


FIRST_SESSIONS = """
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import numpy as np
from onnx import parser
import onnx_backprop as ob
from onnx_backprop.ort_ops import numpy_route, sessions

calls, start = [], Barrier(4)
register = numpy_route._register_check


def counted():
    calls.append(1)
    time.sleep(0.2)
    register()


numpy_route._register_check = counted
model = parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>
    g (float[N, C] dy) => (float[C] db) { db = onnx_backprop.BiasAddBackward <data_format = "NXC"> (dy) }
''')


def first(kernels):
    start.wait()
    return ob.session(model, kernels=kernels).run(None, {"dy": np.ones((3, 2), np.float32)})[0].tolist()


with ThreadPoolExecutor(4) as threads:
    print(len(calls) or "none", list(threads.map(first, ["numba", "numpy", "numba", "numpy"])), len(calls))
"""


def test_the_first_sessions_may_be_made_by_several_threads() -> None:
    """The operators are registered once; a second registration would be of operators that exist."""
    done = subprocess.run([sys.executable, "-c", FIRST_SESSIONS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"none {[[3.0, 3.0]] * 4} 1\n"), done.stderr


def test_several_threads_register_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one hands operators to a library, a session that another one makes may read its list."""
    found: list[int] = []

    def slow() -> str:
        found.append(threading.get_ident())
        time.sleep(0.2)
        return ""

    monkeypatch.setattr(numba_route, "reason_against", cache(slow))
    work = cache(sessions.native_kernels_work.__wrapped__)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
