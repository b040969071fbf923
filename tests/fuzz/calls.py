"""Calls of our operators that are wrong in rank, axis or length, with shapes that the model says nothing of.

What the reference refuses must fail the run of the body in standard operators and of the native kernel, whose tensors
lie between unreadable pages; what it answers, the kernel must answer alike.
"""

from __future__ import annotations

import numpy as np

import onnx_backprop as ob
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.calls import Call
from tests.declarations.registry import random_call
from tests.ort_ops import guarded
from tests.support.checks import evaluate_all
from tests.support.single_op import options

MAX_ELEMENTS = 4000


def spoilt(call: Call, rng: np.random.Generator) -> Call:
    """Another rank, axis, length or number of entries somewhere; a length one more or less."""
    inputs, attributes = list(call.inputs), dict(call.attributes)
    n = int(rng.choice([n for n, array in enumerate(inputs) if array is not None]))
    array = inputs[n]
    assert array is not None
    match rng.integers(5):
        case 0 if array.dtype == np.float32:
            inputs[n] = (
                array[None]
                if array.ndim < 2 or rng.random() < 0.5
                else array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
            )
        case 1:
            shapes = [tuple(rng.integers(1, 4, rng.integers(0, 4))) for _ in inputs]
            drawn = zip(inputs, shapes, strict=True)
            inputs = [np.ones(s, "f4") if i is not None and i.dtype == np.float32 else i for i, s in drawn]
        case 2:
            for name, value in attributes.items():
                if isinstance(value, int) and rng.random() < 0.7:
                    attributes[name] = int(rng.choice([-20, -3, -2, -1, 0, 1, 2, 3, 13]))
                elif isinstance(value, list) and value and rng.random() < 0.5:
                    attributes[name] = [*value, value[-1]] if rng.random() < 0.5 else value[:-1]
        case 3 if array.ndim:
            lengths = list(array.shape)
            lengths[int(rng.integers(array.ndim))] = int(rng.integers(1, 6))
            inputs[n] = np.ones(lengths, array.dtype)
        case _:
            return guarded.spoilt(call, rng)
    return Call(call.op, attributes, inputs, call.seed)


def drawn(seed: int, number: int) -> Call:
    """The call of a case, every third one as it should be."""
    rng = np.random.default_rng([seed, number])
    call = random_call(rng)
    while sum(array.size for array in call.inputs if array is not None) > MAX_ELEMENTS:
        call = random_call(rng)
    return call if number % 3 == 0 else spoilt(call, rng)


def attempt(call: Call) -> str:
    """What becomes of a call."""
    try:
        evaluate_all(call.op, call.attributes, call.inputs, "f32")
    except ob.OnnxBackpropError:
        if answers_in_standard_operators(call):
            return f"untyped: the body in standard operators answers what the reference refuses: {call}"
    try:
        return guarded.check(call, "f32", at_end=True)
    except (SystemExit, AssertionError) as e:
        return f"untyped: {e}"


def answers_in_standard_operators(call: Call) -> bool:
    """Whether the route "onnx" answers a call of which the model says no shapes."""
    model = guarded.model(call, "f32")
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    try:
        session = ob.session(model, kernels="onnx", session_options=options(1))
        named = zip((spec.name for spec in BY_NAME[call.op].inputs), call.inputs, strict=False)
        given = {value.name for value in session.get_inputs()}
        session.run(None, {name: array for name, array in named if name in given})
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions have no common base
        return False
    return True
