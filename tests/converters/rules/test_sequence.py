"""Sequences, optional values, and the loops over them: SequenceMap, Loop and Scan."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.gradient_checks import LINEAR, SMOOTH, case, check_cases

ZERO = "zero = Constant <value_int = 0> () last = Constant <value_int = -1> ()"
STEP = "(int64 n, bool go, float[3] s) => (bool on, float[3] t)"


def loop(body: str, count: int = 3) -> str:
    return (
        f"n = Constant <value_int = {count}> () go = Constant <value = bool {{1}}> () "
        f"y = Loop (n, go, x) <body: graph = b {STEP} {{ on = Identity(go) {body} }}>"
    )


def scan(body: str, attributes: str = "", outputs: str = "last, y") -> str:
    head = f"{outputs} = Scan (x, w) <num_scan_inputs = 1{attributes}, body: graph = b (float[3] s, float[3] v)"
    return f"{head} => (float[3] t, float[3] u) {{ {body} }}>"


CELL = "p = Mul(s, v) t = Tanh(p) u = Add(t, v)"

CASES = [
    case(f"{ZERO} s = SequenceConstruct(a, b) p = SequenceAt(s, zero) q = SequenceAt(s, last) y = Mul(p, q)",
         op="SequenceConstruct", a=(3,), b=(3,)),
    case(f"{ZERO} s = SequenceConstruct(a, b) p = SequenceAt(s, last) q = SequenceAt(s, last) y = Mul(p, q)",
         op="SequenceAt", a=(2,), b=(3,), note="of other lengths"),
    case(f"{ZERO} s = SequenceConstruct(a, b) t = SequenceInsert(s, c, last) z = ConcatFromSequence "
         "<axis = 0> (t) y = Exp(z)", op="SequenceInsert", a=(1,), b=(3,), c=(2,)),
    case(f"{ZERO} e = SequenceEmpty() s = SequenceInsert(e, a) t = SequenceInsert(s, b, zero) "
         "u = SequenceInsert(t, c) z = ConcatFromSequence <axis = -1> (u) y = Exp(z)",
         op="SequenceInsert", a=(1,), b=(3,), c=(2,), note="into an empty one", skips=["half"]),
    case(f"{ZERO} s = SequenceConstruct(a, b, c) t = SequenceErase(s, {{0}}) y = ConcatFromSequence <axis = 0> (t)"
         .format("zero"), op="SequenceErase", a=(1,), b=(3,), c=(2,)),
    case(f"{ZERO} s = SequenceConstruct(a, b, c) t = SequenceErase(s) u = SequenceErase(t, last) "
         "y = SequenceAt(u, zero)", op="SequenceErase", a=(1,), b=(3,), c=(2,), wrt=["a"], note="last"),
    *(
        case(f"s = SequenceConstruct(a, b) z = ConcatFromSequence <axis = {axis}, new_axis = {new}> (s) y = Exp(z)",
             op="ConcatFromSequence", a=(2, 3), b=(2, 3))
        for axis in (0, 1, -1) for new in (0, 1)
    ),
    *(
        case(f"{ZERO} s = SplitToSequence <axis = {axis}, keepdims = {keep}> (x{more}) p = SequenceAt(s, zero) "
             "q = SequenceAt(s, last) y = MatMul(p, q)", op="SplitToSequence", x=(4, 4), constants=given,
             note=str(keep), oracle=SMOOTH)
        for axis, keep, more, given in [
            (0, 0, "", {}), (1, 0, "", {}), (-1, 0, "", {}),
            (0, 1, ", size", {"size": np.array(4)}), (1, 1, ", sizes", {"sizes": np.array([4, 0])[:1]}),
        ]
    ),
    case(f"{ZERO} s = SplitToSequence <axis = 0> (x, sizes) p = SequenceAt(s, zero) q = SequenceAt(s, last) "
         "y = Mul(p, q)", op="SplitToSequence", x=(5, 2), constants={"sizes": np.array([1, 2, 2])}, oracle=SMOOTH),
    case(f"{ZERO} s = SplitToSequence <axis = 0> (x, size) p = SequenceAt(s, zero) q = SequenceAt(s, last) "
         "y = Mul(p, q)", op="SplitToSequence", x=(5, 2), constants={"size": np.array(2)}, oracle=SMOOTH,
         note="the last is shorter, and broadcast"),
    case("s = SequenceConstruct(a, b) t = SequenceMap (s) <body: graph = m (float[L] e) => (float[L] f) "
         "{ h = Mul(e, w) f = Exp(h) }> y = ConcatFromSequence <axis = 0> (t)",
         op="SequenceMap", a=(2,), b=(3,), w=(1,), oracle=SMOOTH, skips=["half"]),
    case("s = SequenceConstruct(a, b) t, u = SequenceMap (s, w) <body: graph = m (float[2] e, float[2] v) "
         "=> (float[2] f, float[2] k) { f = Mul(e, v) k = Tanh(e) }> p = ConcatFromSequence <axis = 0> (t) "
         "q = ConcatFromSequence <axis = 0> (u) y = Mul(p, q)",
         op="SequenceMap", a=(2,), b=(2,), w=(2,), oracle=SMOOTH, skips=["half"]),
    case("o = Optional(x) e = OptionalGetElement(o) y = Mul(e, e)", op="Optional", x=(3,), oracle=SMOOTH),
    case(f"{ZERO} s = SequenceConstruct(a, b) o = Optional(s) e = OptionalGetElement(o) y = SequenceAt(e, last)",
         op="Optional", a=(3,), b=(3,), wrt=["b"], oracle=LINEAR),
    case("e = OptionalGetElement(x) y = Mul(e, e)", op="OptionalGetElement", x=(3,), oracle=SMOOTH),
    case(loop("p = Mul(s, w) t = Tanh(p)"), op="Loop", x=(3,), w=(3,), skips=["half"]),
    case(loop("p = Mul(s, w) t = Tanh(p)", 0), op="Loop", x=(3,), w=(3,), wrt=["x"], skips=["half"], note="no step"),
    case(loop("row = Gather(w, n) p = Mul(s, row) t = Tanh(p)"), op="Loop", x=(3,), w=(4, 3), skips=["half"]),
    case(scan(CELL), op="Scan", x=(3,), w=(4, 3), skips=["half"]),
    case(scan(CELL, ", scan_input_directions = [1], scan_output_axes = [1], scan_input_axes = [1]"),
         op="Scan", x=(3,), w=(3, 4), skips=["half"], oracle=SMOOTH),
    case(scan(CELL, ", scan_input_axes = [-1], scan_output_directions = [1]"), op="Scan", x=(3,), w=(3, 4),
         skips=["half"], oracle=SMOOTH),
    case(scan(CELL, outputs="y, all"), op="Scan", x=(3,), w=(4, 3), skips=["half"], note="last state"),
]  # fmt: skip


@pytest.mark.parametrize("variant", ["static", "symbolic", "fed", "half"])
def test_right(variant: str) -> None:
    for (
        one
    ) in CASES:  # side by side onnxruntime takes lengths for equal that have symbols of onnx's inference in common
        check_cases([one], variant)
