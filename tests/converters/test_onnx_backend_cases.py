"""Every Conv, ConvTranspose, Resize and Upsample case of the ONNX backend tests: right, or refused with a reason."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

import onnx_backprop as ob
from tests.adjoint import adjoint_mismatches

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
def cases() -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of onnx's own cases
        found = load_model_tests(kind="node")
    return {
        case.name: Case(case.model, [np.asarray(x) for x in case.data_sets[0][0]])
        for case in found
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


def verdict(case: Case, *, freeze: bool, kernels: str) -> str:
    model, feeds, wrt = frozen(case) if freeze else as_shipped(case)
    try:
        wrong = adjoint_mismatches(model, feeds, wrt, kernels=kernels, seed=1)
    except ob.UnsupportedError as e:
        return "refused" if case.operator in str(e) else f"refused without a reason: {e}"
    assert not wrong, f"{case.model.graph.name}: {wrong}"
    return "right"


# What this version refuses, by what the case's name says it uses.
REFUSED = ("cubic", "antialias", "tf_crop_and_resize")
# With scales and sizes known only to the run, lengths alone must settle the taps.
REFUSED_AT_RUN_TIME = (*REFUSED, "scales", "not_larger", "not_smaller", "upsample_nearest")


@pytest.mark.parametrize("freeze", [True, False], ids=["constants", "as-shipped"])
def test_right_or_refused(freeze: bool, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {name: verdict(case, freeze=freeze, kernels="numpy") for name, case in cases().items()}
    counts: dict[str, Counter[str]] = {op: Counter() for op in OPERATORS}
    for name, case in cases().items():
        counts[case.operator][verdicts[name]] += 1
    with capsys.disabled():
        inputs = "constant" if freeze else "run-time"
        print(f"\nONNX backend cases, {inputs} scales and sizes:")
        for operator, count in counts.items():
            print(f"  {operator}: " + ", ".join(f"{n} {what}" for what, n in sorted(count.items())))
    assert len(verdicts) >= 57, "onnx ships fewer cases than when this was written"
    refusable = REFUSED if freeze else REFUSED_AT_RUN_TIME
    refused = {name for name, what in verdicts.items() if what == "refused"}
    expected = {name for name in verdicts if any(part in name for part in refusable)}
    if not freeze:  # align_corners never looks at the scales
        expected -= {name for name in expected if "linear_align_corners" in name}
    assert refused == expected
    assert set(verdicts.values()) <= {"right", "refused"}
