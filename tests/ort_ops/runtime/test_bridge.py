"""The bridge between onnxruntime and compiled kernels: attributes, refusals, memory, and what happens without it."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN, NATIVE_PREFIX, write_out
from onnx_backprop.ort_ops import native_route, sessions
from onnx_backprop.ort_ops.native_graph import lower_sound
from onnx_backprop.ort_ops.runtime import bridge
from onnx_backprop.ort_ops.runtime.call import MAX_PLANS
from tests.support import single_op

DY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def bias_model(data_format: str = "NXC") -> onnx.ModelProto:
    return single_op.model("BiasAddBackward", {"data_format": data_format}, [DY])


def kernel_model(**attributes: object) -> onnx.ModelProto:
    """The native operator by itself, with attributes that no domain node could have."""
    node = helper.make_node(f"{NATIVE_PREFIX}BiasAddBackward", ["dy"], ["db"], domain=NATIVE_DOMAIN, **attributes)
    infos = [helper.make_tensor_value_info(name, 1, None) for name in ("dy", "db")]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(NATIVE_DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=imports, ir_version=10)


class SlowList(list):
    """Another thread always gets its turn before the length is told."""

    def __len__(self) -> int:
        time.sleep(0.05)
        return super().__len__()


def test_sessions_of_several_threads_keep_their_own_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels created at once must not get the number of the same attributes: the gradient would be another."""
    monkeypatch.setattr(bridge, "_specs", SlowList())
    monkeypatch.setattr(bridge, "_spec_numbers", {})
    with ThreadPoolExecutor(8) as threads:
        specs = [str(n % 4) for n in range(8)]
        numbers = list(threads.map(lambda spec: bridge._spec_number((spec,), spec), specs))
    assert [bridge._specs[number] for number in numbers] == specs
    assert sorted(bridge._specs) == ["0", "1", "2", "3"]


def test_native_operators_written_out_where_a_node_has_empty_names_behind_its_inputs() -> None:
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["own": 1]> g (float[2] x) => (float[2] y) {{ y = own.F(x) }}
        <domain: "own", opset_import: ["{NATIVE_DOMAIN}": 1]> F (a) => (b) {{ b = {NATIVE_DOMAIN}.Kernel(a) }}
    """)
    model.graph.node[0].input.extend(["", ""])
    write_out(model)
    (node,) = model.graph.node
    assert (node.op_type, list(node.input), list(node.output)) == ("Kernel", ["x"], ["y"])


def test_the_route_works_here() -> None:
    """The tests below would test the fallback otherwise."""
    assert native_route.reason_against() == ""


BIAS = f"{NATIVE_PREFIX}BiasAddBackward"


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("y = onnx_backprop.BiasAddBackward (dy)", [BIAS]),
        ("y = onnx_backprop.BiasAddBackward (dy)  z = Abs (y)", [BIAS, "Abs"]),
        (
            "e = Relu (dy)  w = onnx_backprop.BiasAddBackward (e)  y = Abs (w)  z = Relu (y)",
            ["Relu", BIAS, "Abs", "Relu"],
        ),
    ],
)
def test_nothing_but_the_kernel_is_left_in_the_optimised_graph(tmp_path, nodes: str, left: list[str]) -> None:
    """No cast, no copy: what the body adds around the kernel goes away."""
    outputs = "float[C] y, float[C] z" if "z =" in nodes else "float[C] y"
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>'
        f"g (float[N,X,C] dy) => ({outputs}) {{ {nodes} }}"
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    session = ob.session(model, kernels="native", session_options=options)
    assert [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node] == left
    np.testing.assert_array_equal(np.asarray(session.run(["y"], {"dy": DY})[0]), DY.sum((0, 1)))


@pytest.mark.parametrize(("data_format", "expected"), [("NXC", DY.sum((0, 1))), ("NCX", DY.sum((0, 2)))])
def test_attributes_arrive(data_format: str, expected: np.ndarray) -> None:
    session = ob.session(bias_model(data_format), kernels="native")
    np.testing.assert_array_equal(np.asarray(session.run(None, {"diff_dst": DY})[0]), expected)


def test_an_absent_attribute_takes_its_default() -> None:
    session = ob.session(kernel_model(), kernels=None)
    np.testing.assert_array_equal(np.asarray(session.run(None, {"dy": DY})[0]), DY.sum((0, 1)))


def test_a_bad_attribute_is_refused_when_the_session_is_created() -> None:
    with pytest.raises(Exception, match="BiasAddBackward: attribute data_format: expected one of NXC, NCX, got 'CX'"):
        ob.session(kernel_model(data_format="CX"), kernels=None)


def test_a_bad_shape_is_refused_and_the_session_goes_on() -> None:
    session = ob.session(kernel_model(), kernels=None)
    for _ in range(3):
        with pytest.raises(Exception, match="BiasAddBackward: diff_dst: expected rank 2 to 64, got 1 with shape"):
            session.run(None, {"dy": DY[0, 0]})
        np.testing.assert_array_equal(np.asarray(session.run(None, {"dy": DY})[0]), DY.sum((0, 1)))


def sums(session: onnxruntime.InferenceSession, rows: int) -> np.ndarray:
    return np.asarray(session.run(None, {"dy": np.ones((rows, 3), np.float32)})[0])


def test_the_plans_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    validated = bridge._validated

    def noting(*asked: Any) -> bridge.Request:
        planned.append(int(asked[-1][4]))
        return validated(*asked)

    monkeypatch.setattr(bridge, "_validated", noting)
    session = ob.session(kernel_model(), kernels=None)
    for rows in range(1, MAX_PLANS + 11):
        assert sums(session, rows).tolist() == [rows] * 3
        sums(session, 1)  # in use all the time
    assert planned == list(range(1, MAX_PLANS + 11))
    planned.clear()
    for rows in (1, *range(MAX_PLANS + 10, 11, -1)):
        sums(session, rows)
    assert planned == []
    sums(session, 2)
    assert planned == [2]


def test_threads_share_plans_that_come_and_go() -> None:
    session = ob.session(kernel_model(), kernels=None)

    def work(seed: int) -> bool:
        chosen = np.random.default_rng(seed).integers(1, 2 * MAX_PLANS, 2000)
        return all(sums(session, int(rows))[0] == rows for rows in chosen)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_without_the_route_a_warning_says_why_and_standard_operators_take_over(monkeypatch, caplog) -> None:
    monkeypatch.setattr(native_route, "reason_against", lambda: "no such symbol")
    monkeypatch.setattr(sessions, "native_kernels_work", cache(sessions.native_kernels_work.__wrapped__))
    kernels: list[str] = []
    monkeypatch.setattr(sessions, "lower_sound", lambda model, name: kernels.append(name) or lower_sound(model, name))
    with caplog.at_level(logging.WARNING, "onnx_backprop"):
        session = ob.session(bias_model(), kernels="native")
        ob.session(bias_model(), kernels="native")
    assert kernels == ["onnx", "onnx"]
    assert [record.message.endswith("no such symbol") for record in caplog.records] == [True], "one warning"
    np.testing.assert_array_equal(np.asarray(session.run(None, {"diff_dst": DY})[0]), DY.sum((0, 1)))


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        ("platform", "machine", lambda: "riscv64", "no native kernels for riscv64"),
        ("onnxruntime", "__version__", "1.16.3", "onnxruntime 1.16.3 is older than 1.17"),
        ("onnxruntime", "InferenceSession", None, "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_what_speaks_against_the_route(monkeypatch, module: str, name: str, value: object, reason: str) -> None:
    monkeypatch.setattr(f"{native_route.__name__}.{module}.{name}", value)
    monkeypatch.setattr("onnx_backprop.ort_ops.native_table.register", lambda: None)
    assert native_route.reason_against.__wrapped__() == reason


def test_a_wrong_answer_of_the_self_test_speaks_against_the_route(monkeypatch) -> None:
    monkeypatch.setattr("onnx_backprop.ort_ops.native_table.register", lambda: None)
    monkeypatch.setattr(np, "arange", lambda *_, **__: DY[0] + 1.5)
    assert native_route.reason_against.__wrapped__() == ""
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", lambda *_: [np.zeros(3)])
    assert "self-test expected" in native_route.reason_against.__wrapped__()
