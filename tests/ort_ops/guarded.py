"""Random calls on tensors between unreadable pages: python -m tests.ort_ops.guarded --calls 1000 --seed 0

Every input and the output lie at the end of a page before an unreadable one, then at the start of one behind an
unreadable one: a read or write beyond a tensor ends the process. Answers are compared with the float64 reference; every
third call is spoilt and must be refused like the reference refuses it, or answered like the reference answers it.

Kernels' scratch, of exactly the bytes that a plan says, ends less than a vector of 64 bytes before an unreadable page,
and what lies between must stay as it is.

Calls run together in one session, those that are to be refused alone. They are printed before they run: where a process
ends, `--together 1` shows at which.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, helper

import onnx_backprop as ob
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops import native_kernels_work, native_table
from onnx_backprop.ort_ops.convolution import problem
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.convolution.winograd import tiles as winograd_tiles
from onnx_backprop.ort_ops.runtime import bridge, scratch
from tests.declarations.calls import Call
from tests.declarations.registry import random_call
from tests.support.batch import check_each
from tests.support.checks import DTYPES, evaluate_all
from tests.support.renamed import joined
from tests.support.single_op import ELEMENT_TYPES, KINDS, options, results_of

PAGE = mmap.PAGESIZE
PROT_NONE = 0
TOLERANCE = {"f32": 3e-5, "f16": 2e-3, "bf16": 1.6e-2}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """Memory for one tensor with an unreadable page on either side."""

    def __init__(self, size: int) -> None:
        pages = max(1, -(-size // PAGE))
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE
        self._size, self._pages = size, pages
        for page in (self._first - PAGE, self._first + pages * PAGE):
            if _libc.mprotect(page, PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def address(self, *, at_end: bool) -> int:
        return self._first + (self._pages * PAGE - self._size if at_end else 0)


def guard_scratch() -> None:
    """Give kernels memory of their own for every block of scratch, none of it pooled, so that none is larger."""
    native_table.load()  # plans keep their limits
    scratch.POOL_BYTES = 0  # before anything is compiled
    blocks: dict[int, tuple[Guarded, int, bytes]] = {}
    shifts = [0]

    def malloc(size: int) -> int:
        """As malloc aligns, to a multiple of 16; what follows the scratch in it up to the page must stay as it is."""
        shifts.append(shifts[-1] + 16)
        wanted, memory = size - scratch.HEAD, Guarded(size + 64)
        end = memory.address(at_end=True) + size + 64
        block = (end - wanted) // 64 * 64  # what `acquire` makes of the address
        address, behind = block - 64 - shifts[-1] % 64, b"\xa5" * (end - block - wanted)
        ctypes.memmove(block + wanted, behind, len(behind))
        blocks[address] = memory, block + wanted, behind
        return address

    def free(address: int) -> None:
        block = blocks.pop(address, None)
        if block is None:  # a plan
            _libc.free(ctypes.c_void_p(address))
        elif ctypes.string_at(block[1], len(block[2])) != block[2]:
            print("a kernel writes behind its scratch", file=sys.stderr, flush=True)
            os._exit(1)

    functions = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(malloc), ctypes.CFUNCTYPE(None, ctypes.c_int64)(free)
    _kept.append(functions)
    for name, function in zip(("malloc", "free"), functions, strict=True):
        bridge._runtime_word(name).value = ctypes.cast(function, ctypes.c_void_p).value or 0


_kept: list[object] = []


def model(call: Call, dtype: str) -> ModelProto:
    """One node on typed graph inputs, without casts."""
    op = BY_NAME[call.op]
    infos, names = [], []
    for spec, array in zip(op.inputs, call.inputs, strict=False):
        names.append(spec.name if array is not None else "")
        if array is not None:
            element = ELEMENT_TYPES[dtype] if spec.type_name == "T1" else helper.np_dtype_to_tensor_dtype(array.dtype)
            shape = [None] * array.ndim if call.seed % 2 else None  # nothing is said of a length, or not even the rank
            infos.append(helper.make_tensor_value_info(spec.name, element, shape))
    while not names[-1]:
        names.pop()
    results = results_of(call.op)
    node = helper.make_node(call.op, names, results, domain=ob.DOMAIN)
    kinds = {a.name: KINDS.get(a.kind) for a in op.attributes}
    for name, value in call.attributes.items():
        node.attribute.append(helper.make_attribute(name, value, attr_type=None if value else kinds.get(name)))
    outputs = [
        helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype if spec.type_name == "T1" else "f32"], None)
        for name, spec in zip(results, op.outputs, strict=True)
    ]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)]
    return helper.make_model(helper.make_graph([node], "g", infos, outputs), opset_imports=imports, ir_version=10)


class Drawn(NamedTuple):
    """A call, the type of its tensors, and whether they end at a page's end."""

    call: Call
    dtype: str
    at_end: bool


class Case(NamedTuple):
    """With the reference's answers."""

    drawn: Drawn
    expected: list[np.ndarray]

    def __str__(self) -> str:
        return f"{self.drawn.call} {self.drawn.dtype}"


def run(drawn: Sequence[Drawn], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[np.ndarray]]:
    """The kernels' answers of those shapes, everything between unreadable pages."""
    models = joined([model(call, dtype) for call, dtype, _ in drawn])
    session = ob.session(models, kernels="native", session_options=options(2))
    binding = session.io_binding()
    kept = []

    def place(name: str, array: np.ndarray, element: int, bind, *, at_end: bool) -> int:
        memory = Guarded(array.nbytes)
        kept.append(memory)
        address = memory.address(at_end=at_end)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        bind(name, "cpu", 0, element, array.shape, address)
        return address

    graph_inputs = {i.name for i in session.get_inputs()}
    answers: list[list[tuple[np.ndarray, int]]] = []
    for n, ((call, dtype, at_end), call_shapes) in enumerate(zip(drawn, shapes, strict=True)):
        for spec, array in zip(BY_NAME[call.op].inputs, call.inputs, strict=False):
            if array is not None and f"{n}/{spec.name}" in graph_inputs:
                tensor = spec.type_name == "T1"
                typed = array.astype(DTYPES[dtype]) if tensor else array
                element = ELEMENT_TYPES[dtype] if tensor else helper.np_dtype_to_tensor_dtype(array.dtype)
                place(f"{n}/{spec.name}", np.array(typed, order="C"), element, binding.bind_input, at_end=at_end)
        answers.append([])
        for name, spec, shape in zip(results_of(call.op), BY_NAME[call.op].outputs, call_shapes, strict=True):
            kind = dtype if spec.type_name == "T1" else "f32"
            result = np.full(shape, np.nan, np.float32).astype(DTYPES[kind])  # what is not written shows
            address = place(f"{n}/{name}", result, ELEMENT_TYPES[kind], binding.bind_output, at_end=at_end)
            answers[-1].append((result, address))
    session.run_with_iobinding(binding)
    for result, address in chain.from_iterable(answers):
        ctypes.memmove(result.ctypes.data, address, result.nbytes)
    return [[result.astype(np.float32) for result, _ in results] for results in answers]


def spoilt(call: Call, rng: np.random.Generator) -> Call:
    """One length of one input changed."""
    inputs = list(call.inputs)
    n = int(rng.choice([n for n, i in enumerate(inputs) if i is not None]))
    array = inputs[n]
    assert array is not None
    if array.dtype == np.float32 and array.ndim > 1:
        shape = list(array.shape)
        shape[int(rng.integers(array.ndim))] += int(rng.choice([-1, 1, 2]))
        inputs[n] = np.ones([max(d, 0) for d in shape], np.float32)
    elif array.size:
        inputs[n] = array + rng.integers(-1, 2, array.shape).astype(array.dtype)
    return Call(call.op, call.attributes, inputs, call.seed)


def check(call: Call, dtype: str, *, at_end: bool) -> str:
    """Run alone and compare; 'answered' or 'refused'."""
    one = Drawn(call, dtype, at_end)
    expected = reference(one)
    for case in worth_running([(one, expected)]):
        compare(case, *answers_of([case]))
    return "refused" if expected is None else "answered"


def check_all(drawn: Sequence[Drawn]) -> Counter[str]:
    """Run together and compare; how many were 'answered' and 'refused'."""
    cases = [(one, reference(one)) for one in drawn]
    check_each(worth_running(cases), answers_of, compare)
    return Counter("refused" if expected is None else "answered" for _, expected in cases)


def reference(drawn: Drawn) -> list[np.ndarray] | None:
    """The answers; None where the call is refused by both the reference and the kernel."""
    call, dtype, _ = drawn
    try:
        return [a.astype(np.float32) for a in evaluate_all(call.op, call.attributes, call.inputs, dtype)]
    except ob.OnnxBackpropError as e:
        reason = str(e)
    refusal = refused(drawn)
    if f"{call.op}: " not in refusal:
        raise SystemExit(f"{call} {dtype}: expected the refusal {reason!r}, got {refusal!r}")
    return None


def worth_running(cases: Iterable[tuple[Drawn, list[np.ndarray] | None]]) -> list[Case]:
    """Those with an answer that has elements."""
    return [Case(one, expected) for one, expected in cases if expected and all(answer.size for answer in expected)]


def answers_of(cases: Sequence[Case]) -> list[list[np.ndarray]]:
    if not cases:
        return []
    return run([drawn for drawn, _ in cases], [[answer.shape for answer in expected] for _, expected in cases])


def compare(case: Case, answers: list[np.ndarray]) -> None:
    for got, want in zip(answers, case.expected, strict=True):
        atol = TOLERANCE[case.drawn.dtype] * float(np.abs(want[np.isfinite(want)]).max(initial=1.0))
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=str(case))


def refused(drawn: Drawn) -> str:
    """The text of the refusal, or what came instead."""
    try:
        shapes = [(1,)] * len(BY_NAME[drawn.call.op].outputs)
        return f"an answer of shape {run([drawn], [shapes])[0][0].shape}"
    except Exception as e:  # noqa: BLE001 - onnxruntime's exceptions have no common base
        return str(e)


def draw(seed: int, n: int) -> Drawn:
    rng = np.random.default_rng([seed, n])
    call = random_call(rng)
    if n % 3 == 2:
        call = spoilt(call, rng)
    return Drawn(call, str(rng.choice(["f32", "f32", "f16", "bf16"])), n % 2 == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=40, help="calls of one session")
    parser.add_argument("--quiet", action="store_true", help="print only the summary")
    parser.add_argument("--shared", type=int, help="bytes that threads may share, so that small calls go in rounds")
    arguments = parser.parse_args()
    if arguments.shared is not None:
        for module in (problem, winograd_plan):
            assert "shared_limit" in vars(module)
            vars(module)["shared_limit"] = lambda *_: arguments.shared
    guard_scratch()
    assert native_kernels_work()
    counts, least, waiting = Counter(answered=0, refused=0), winograd_tiles.MIN_WORK, deque(range(arguments.calls))
    while waiting:
        some = [waiting.popleft() for _ in range(min(arguments.together, len(waiting)))]
        drawn = {n: draw(arguments.seed, n) for n in some}
        if not arguments.quiet:
            print("\n".join(f"{n} {one.call} {one.dtype}" for n, one in drawn.items()), flush=True)
        for tiles in (least, 0):  # few of these calls have tiles enough
            winograd_tiles.MIN_WORK = tiles
            counts += check_all([one for n, one in drawn.items() if (n % 4 < 2) == (tiles > 0)])
    print(f"endurance: seed {arguments.seed}, {arguments.calls:,} calls between unreadable pages: {dict(counts)}")


if __name__ == "__main__":
    main()
