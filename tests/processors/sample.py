"""A sample of what the native kernels compute, on the processor of this process: python -m tests.processors.sample

Every operator in every element type and both layouts, on tensors between unreadable pages, beside the references; what
the oneDNN library gave; and the cases of every kind of kernel with vector code of its own. `--every 4` takes a quarter.

With `--compile 0/2`, the first half of the kernels is compiled into the cache instead, in this process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.native_route import reason_against
from tests.declarations.calls import Call
from tests.declarations.registry import DECLARED, random_call
from tests.opset import test_golden
from tests.ort_ops import compile_kernels, guarded
from tests.ort_ops.convolution import test_depthwise, test_depthwise_cells, test_residues, test_winograd
from tests.ort_ops.interpolation import test_gather
from tests.support import single_op
from tests.support.checks import DTYPES, assert_rounded, evaluate

EACH = 4  # calls of an operator, element type and layout


def facts() -> str:
    """Of the processor that code is generated for."""
    return f"{machine.TRIPLE.split('-')[0]} {machine.VECTOR} {machine.REGISTERS}"


def layouts(op: str) -> tuple[str, ...]:
    return ("NCX", "NXC") if any(a.name == "data_format" for a in BY_NAME[op].attributes) else ("",)


def drawn(op: str, layout: str, rng: np.random.Generator) -> Call:
    while True:
        call = random_call(rng, op)
        if call.attributes.get("data_format", "") == layout:
            return call


def operators(every: int) -> Iterator[str]:
    """Between unreadable pages, at the end and at the beginning of a page, as `guarded` does."""
    assert set(DECLARED) == set(BY_NAME), "operators without random calls"
    for n, op in enumerate(DECLARED):
        for dtype, layout, seed in product(DTYPES, layouts(op), range(max(1, EACH // every))):
            call = drawn(op, layout, np.random.default_rng([n, seed, layout == "NCX"]))
            answered = guarded.check(call, dtype, at_end=seed % 2 == 0)
            assert answered == "answered", f"{call} {dtype}: {answered}"
            yield op


def golden(every: int) -> Iterator[str]:
    """What the oneDNN library gave, on the route "native"."""
    for op, dtype in sorted({(case.op, case.dtype) for case in test_golden.ALL})[::every]:
        test_golden.test_sessions(op, dtype, "native", "symbolic")
        yield f"{op} {dtype}"


def winograd(case: tuple, dtype: str, rng: np.random.Generator) -> None:
    """Small integers, whose sums are exact but for the factors of tiles of 4 x 4."""
    batch, groups, s, d, lengths, pads = case
    attributes = test_winograd.attributes(groups=groups, pads_begin=list(pads), pads_end=list(pads))
    x, w = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((batch, groups * s, *lengths), (groups * d, s, 3, 3))
    )
    y = evaluate("Convolution", attributes, [x, w], dtype)
    dy = rng.integers(-3, 4, y.shape).astype(np.float32)
    for op, given, inputs in (
        ("Convolution", {}, [x, w]),
        ("ConvolutionBackwardData", {"dst_shape": list(x.shape)}, [dy, w]),
        ("ConvolutionBackwardWeights", {"weights_shape": list(w.shape)}, [x, dy]),
    ):
        expected = evaluate(op, attributes | given, inputs, dtype).astype(np.float32)
        got = single_op.run(op, attributes | given, inputs, dtype=dtype, kernels="native")
        assert_rounded(got, expected, dtype, error=test_winograd.ERRORS[4], message=f"{op} {case} {dtype}")


def kinds(every: int) -> Iterator[str]:
    """Kernels with vector code of their own, bit for bit where sums are exact: half of their tests' cases at most."""
    rng = np.random.default_rng(5)
    families = (
        (test_depthwise.CASES[::2], test_depthwise.run_case),
        (
            test_depthwise_cells.CASES[1:13:2],
            lambda case, dtype, rng: test_depthwise_cells.run_cases([case], rng, (dtype,)),
        ),
        (test_residues.CASES[::2], test_residues.run_case),
        (test_winograd.CASES[::2], winograd),
    )
    for cases, run in families:
        for n, case in enumerate(cases[::every]):
            run(case, ("f32", "f16")[n % 2], rng)
            yield str(case)
    test_gather.check(4 * every + 1)
    yield "interpolation"


PARTS: tuple[Callable[[int], Iterator[str]], ...] = (operators, golden, kinds)


def compile_share(share: str) -> None:
    part, parts = (int(n) for n in share.split("/"))
    names = sorted(compile_kernels.exported())[part::parts]
    seconds = sum(compile_kernels.compile_kernel(name) for name in names)
    print(f"{len(names)} kernels compiled in {seconds:.0f} s of the processor", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expect", help="the processor that this has to be: architecture, vector length, registers")
    parser.add_argument("--every", type=int, default=1, help="one of so many checks (%(default)s)")
    parser.add_argument("--compile", metavar="PART/PARTS", help="compile a share of the kernels")
    arguments = parser.parse_args()
    if arguments.expect not in (None, facts()):
        raise SystemExit(f"code is generated for {facts()!r}, not for {arguments.expect!r}")
    if arguments.compile:
        compile_share(arguments.compile)
        return
    if reason := reason_against():
        raise SystemExit(f"the native route does not work: {reason}")
    counts = {}
    for part in PARTS:
        start = time.perf_counter()
        counts[part.__name__] = sum(1 for _ in part(arguments.every))
        seconds = time.perf_counter() - start
        print(f"{facts()}: {part.__name__}, {counts[part.__name__]} checks in {seconds:.0f} s", flush=True)
    print(f"passed: {sum(counts.values())}", flush=True)


if __name__ == "__main__":
    main()
