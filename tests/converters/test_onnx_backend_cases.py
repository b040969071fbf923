"""Every Conv, ConvTranspose, Resize and Upsample case of the ONNX backend tests is right; Loop and If on sequences by value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support.adjoint import Adjoint, check_adjoints
from tests.support.loop_checks import run
from tests.support.onnx_cases import node_cases

OPERATORS = ("Conv", "ConvTranspose", "Resize", "Upsample")


@dataclass(frozen=True)
class Case:
    """One backend test of a single node: its model and what it is fed."""

    model: ModelProto
    inputs: list[np.ndarray]

    @property
    def operator(self) -> str:
        return self.model.graph.node[0].op_type


@cache
def node_tests() -> dict[str, TestCase]:
    """Those of modules that have a case of our operators or of sequences; others compute answers for seconds."""
    return node_cases("conv", "convtranspose", "if_", "loop", "resize", "upsample")


@cache
def cases() -> dict[str, Case]:
    return {
        case.name: Case(case.model, [np.asarray(x) for x in case.data_sets[0][0]])
        for case in node_tests().values()
        if case.model is not None
        and case.data_sets is not None
        and len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type in OPERATORS
        and case.model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    }


def frozen(case: Case) -> tuple[ModelProto, dict[str, np.ndarray], list[str]]:
    """The case's model with scales, sizes and roi as initializers; its feeds; the float inputs to differentiate by."""
    model = ModelProto()
    model.CopyFrom(case.model)
    feeds = {i.name: x for i, x in zip(model.graph.input, case.inputs, strict=True)}
    resizes = model.graph.node[0].op_type in ("Resize", "Upsample")
    wrt = [model.graph.input[0].name] if resizes else list(feeds)
    kept = [i for i in model.graph.input if i.name in wrt]
    for name in feeds.keys() - set(wrt):
        model.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model, feeds, wrt


def as_shipped(case: Case) -> tuple[ModelProto, dict[str, np.ndarray], list[str]]:
    """The case's model with every input an input of the run."""
    _, kept, wrt = frozen(case)
    feeds = {i.name: x for i, x in zip(case.model.graph.input, case.inputs, strict=True)}
    return case.model, feeds | kept, wrt


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("freeze", [True, False], ids=["constants", "as-shipped"])
def test_everything_is_right(freeze: bool, kernels: str, tell: Callable[[str], None]) -> None:
    """With constant and with run-time scales, sizes and regions of interest."""
    form = frozen if freeze else as_shipped
    check_adjoints([Adjoint(name, *form(case), seed=1) for name, case in cases().items()], kernels)
    tell(f"ONNX backend cases, {'constant' if freeze else 'run-time'} scales and sizes, route {kernels}:")
    for operator, count in Counter(case.operator for case in cases().values()).items():
        tell(f"  {operator}: {count} right")
    assert len(cases()) >= 57, "onnx ships fewer cases than when this was written"


@cache
def pytorch_cases() -> dict[str, tuple[ModelProto, dict[str, np.ndarray]]]:
    """The convolutions that onnx ships as exported from PyTorch, opset 6 to 9, their weights as inputs of the run."""
    collected = {}
    for case in (*load_model_tests(kind="pytorch-converted"), *load_model_tests(kind="pytorch-operator")):
        assert case.model_dir is not None
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        if not {node.op_type for node in model.graph.node} & {"Conv", "ConvTranspose"}:
            continue
        feeds = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        del model.graph.initializer[:]
        for i in model.graph.input:
            if i.name not in feeds:
                feeds[i.name] = numpy_helper.to_array(onnx.load_tensor(folder / "test_data_set_0" / "input_0.pb"))
        collected[case.name] = (model, feeds)
    return collected


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_pytorch_convolution_is_right(kernels: str) -> None:
    assert len(pytorch_cases()) >= 30
    for name, (model, feeds) in pytorch_cases().items():
        assert len(feeds) == len(model.graph.input), f"{name} has one input besides its weights"
    problems = [Adjoint(name, model, feeds, list(feeds), seed=2) for name, (model, feeds) in pytorch_cases().items()]
    check_adjoints(problems, kernels)


SLICES = [np.arange(1, n + 1, dtype=np.float32) for n in range(1, 6)]  # what a step appends: x[:i + 1]
OF_SLICES = np.arange(1, 6, dtype=np.float32) * np.array([15, 14, 12, 9, 5], np.float32)
STEPS = {"trip_count": np.array(5), "cond": np.array(True)}
BEGUN = [np.array(7, np.float32)]
# case: what to differentiate by, what it is fed, what seeds it, the gradients
SEQUENCES: list[tuple[str, list[str] | None, dict[str, Any], list[Any], dict[str, Any]]] = [
    ("loop13_seq", None, {"seq_empty": []}, [s * (k + 1) for k, s in enumerate(SLICES)], {"x_grad": OF_SLICES}),
    ("loop13_seq", ["seq_empty"], {"seq_empty": [SLICES[3]]}, [SLICES[2], *SLICES], {"seq_empty_grad": [SLICES[2]]}),
    ("loop16_seq_none", ["x", "constant_in"], {"opt_seq": None}, [BEGUN[0], *(s * (k + 1) for k, s in enumerate(SLICES))],
     {"x_grad": OF_SLICES, "constant_in_grad": BEGUN[0]}),
    ("loop16_seq_none", ["x", "constant_in"], {"opt_seq": BEGUN}, [BEGUN[0], *(s * (k + 1) for k, s in enumerate(SLICES))],
     {"x_grad": OF_SLICES, "constant_in_grad": np.array(0, np.float32)}),
    ("loop16_seq_none", ["opt_seq"], {"opt_seq": BEGUN}, [BEGUN[0], *SLICES], {"opt_seq_grad": BEGUN}),
    ("loop16_seq_none", ["opt_seq"], {"opt_seq": None}, [BEGUN[0], *SLICES], {"opt_seq_grad": []}),
    ("if_seq", None, {}, [SLICES[4]], {"x_grad": SLICES[4], "y_grad": SLICES[4] * 0}),
    ("if_opt", None, {"cond": np.array(False)}, [SLICES[4]], {"x_grad": SLICES[4]}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SEQUENCES)))
def test_sequences_by_value(number: int) -> None:
    name, wrt, feeds, seeds, want = SEQUENCES[number]
    model = node_tests()[f"test_{name}"].model
    assert model is not None
    graph = ob.backward(model, wrt=wrt)
    known = {value.name for value in model.graph.input}
    given = {x: value for x, value in {**STEPS, **feeds}.items() if x in known}
    (y,) = model.graph.output
    answers = run(graph, given | {f"{y.name}_grad": seeds})
    assert repr(answers[y.name]) == repr(run(model, given)[y.name])
    assert set(answers) == {y.name, *want}
    for key, value in want.items():
        got = answers[key] if isinstance(value, list) else [answers[key]]
        for a, b in zip(got, value if isinstance(value, list) else [value], strict=True):
            np.testing.assert_array_equal(a, b)
