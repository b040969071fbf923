"""What every route owes to the process it runs in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper, parser
from onnxruntime.capi import onnxruntime_pybind11_state as state  # pyright: ignore[reportAttributeAccessIssue]

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.ort_ops import native_route, sessions

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
    print(len(calls) or "none", list(threads.map(first, ["native", "numpy", "native", "numpy"])), len(calls))
"""


def test_the_first_sessions_may_be_made_by_several_threads() -> None:
    """The operators are registered once; a second registration would be of operators that exist."""
    done = subprocess.run([sys.executable, "-c", FIRST_SESSIONS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"none {[[3.0, 3.0]] * 4} 1\n"), done.stderr


def test_several_threads_register_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one hands operators to a library, a session that another one makes may read its list."""
    idents: list[int] = []

    def slow() -> str:
        idents.append(threading.get_ident())
        time.sleep(0.2)
        return ""

    monkeypatch.setattr(native_route, "reason_against", cache(slow))
    work = cache(sessions.native_kernels_work.__wrapped__)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(idents) == 1


WITH_LIBRARY = """
import logging
import numpy as np, onnxruntime, onnx_backprop as ob
from onnx import parser
from onnxruntime_extensions import get_library_path

def options():
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 3
    made.register_custom_ops_library(get_library_path())
    return made

early = options()
text = '<ir_version: 8, opset_import: ["": 18]> g (float[n, 2] x, float[2, 2] w) => (float[n, 2] y) { y = MatMul(x, w) }'
model = parser.parse_model(text)
model.graph.input.pop()
model.graph.initializer.add(name="w", dims=[2, 2], data_type=1, float_data=[1, 2, 3, 4])
graph = ob.training_graph(model, loss="mse", optimizer="sgd")
said = []
logging.getLogger("onnx_backprop").addHandler(type("Said", (logging.Handler,), {"emit": lambda s, r: said.append(r)})())
batch = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
trainer = ob.Trainer(graph, session_options=early)
assert trainer.kernels == "onnx" and len(said) == 1 and "register_ops(options)" in said[0].getMessage(), said
print(trainer.step(*batch))
for refused in (lambda: ob.register_ops(early), lambda: ob.session(model, kernels="numpy", session_options=early)):
    try:
        refused()
    except ob.KernelError as e:
        assert "in the place of options.register_custom_ops_library" in str(e)
    else:
        raise SystemExit("not refused")
ob.session(model, session_options=early)
late = options()
assert ob.register_ops(late) is late
for kernels in ("onnx", "numpy", "native"):
    trainer = ob.Trainer(graph, session_options=options(), kernels=kernels)
    assert trainer.kernels == kernels
    print(trainer.step(*batch))
    ob.session(model, kernels=kernels, session_options=late).run(None, {"x": batch[0]})
"""


def test_options_with_the_library_of_the_extensions() -> None:
    """As every tutorial of onnxruntime-extensions registers it: after the kernels are in it, and before, which is told."""
    done = subprocess.run([sys.executable, "-c", WITH_LIBRARY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["26.0"] * 4


def test_a_model_on_which_optimizations_fail_runs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime's do on some branches of constant conditions: said once, and the options stay as they were."""
    whole, none = sessions._Session, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

    def opened(source: bytes, options: onnxruntime.SessionOptions, **arguments: Any) -> object:
        if options.graph_optimization_level != none:
            raise state.InvalidArgument("Invalid model. Node input 'v' is not an output of a previous node.")
        return whole(source, options, **arguments)

    monkeypatch.setattr(sessions, "_Session", opened)
    model = parser.parse_model('<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Neg(x) }')
    options = sessions.default_options(python_operators=False)
    level = options.graph_optimization_level
    with pytest.warns(ob.OnnxBackpropWarning, match="optimizations fail on this model.*Node input 'v'"):
        session = ob.session(model, session_options=options)
    assert options.graph_optimization_level == level != none
    np.testing.assert_array_equal(session.run(None, {"x": np.float32([1, 2])})[0], [-1, -2])


@pytest.mark.parametrize("lean", [False, True])
def test_products_with_dequantized_weights_are_exact(lean: bool, rng: np.random.Generator) -> None:
    """By default onnxruntime rounds x to 8 bits there. Options that ask for that keep it."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[6, 2] x) => (float[6, 2] y)
            <int8[2, 2] q = {-3, -1, 1, 4}, float[2] scale = {0.5, 0.55}> { w = DequantizeLinear<axis = 1>(q, scale) y = MatMul(x, w) }"""
    )
    x = rng.standard_normal((6, 2), np.float32)
    exact = x @ (np.float32([[-3, -1], [1, 4]]) * np.float32([0.5, 0.55]))
    options = sessions.default_options(python_operators=False, lean=lean)
    (y,) = ob.session(model, session_options=options).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(y), exact, rtol=1e-5, atol=1e-6)
    rounding = onnxruntime.SessionOptions()
    rounding.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    sessions.be_lean(rounding)
    assert rounding.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "4"


def test_a_normalization_of_a_function_overwrites_what_no_other_node_reads() -> None:
    """In training mode, with a mean of zeros, of which onnxruntime keeps one for it and for what is added."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "own": 1]> g (float[N,3] x) => (float[N,3] y) '
        "<float[3] s = {1, 2, 3}, float[3] b = {0, 0, 0}, float[3] v = {1, 1, 1}> "
        "{ h = own.norm(x, s, b, b, v) y = Add(h, b) } "
        '<domain: "own", opset_import: ["": 18]> norm (x, s, b, m, v) => (h) '
        "{ h, m1, v1 = BatchNormalization<training_mode = 1>(x, s, b, m, v) }"
    )
    model.graph.node[0].input[3] = "m"
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "m"))
    session, x = ob.session(model), np.float32([[1, 2, 3], [3, 5, 4]])
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * np.float32([1, 2, 3])
    for _ in range(3):
        np.testing.assert_allclose(np.asarray(session.run(None, {"x": x})[0]), expected, rtol=1e-5)
