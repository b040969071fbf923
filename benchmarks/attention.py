"""Attention alone, forward and backward, beside PyTorch's: python -m benchmarks.attention [--threads 1]

Nine heads of 64 numbers, one batch, float32: without a mask, causal, and causal by a mask of floats, which our kernel
reads and PyTorch is spared. Contenders take turns; of one thread the time is the processor's, so that other processes
on the machine count for less. Medians, and PyTorch's time over ours.

Estimated for the forward pass when the blocks were chosen, before any run: of a block of 128 queries and 96 keys
products take 49,000 cycles, powers 8,500 and copies 3,000, which is 80 % of what multiply-adds allow, some 170 of 217
GFLOP/s with AVX-512. The aim was 1.3 times PyTorch's speed both ways at T = 2048.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob

torch: Any = import_module("torch")  # which type checkers run without
BATCH, HEADS, SIZE = 1, 9, 64
LENGTHS = (128, 512, 1024, 2048)
FORMS = ("plain", "causal", "mask")


def model(length: int, form: str, *, backward: bool) -> ModelProto:
    """The two operators, or the first alone."""
    shape = (BATCH, HEADS, length, SIZE)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value", "diff"), shape)
    inputs, attributes = ["query", "key", "value"], {"domain": ob.DOMAIN, "is_causal": int(form == "causal")}
    bias = ["bias"] if form == "mask" else []
    if bias:
        shapes["bias"] = (1, 1, length, length)
    nodes = [helper.make_node("AttentionForwardTraining", [*inputs, *bias], ["y", "sums"], **attributes)]
    if backward:
        given = ["diff", *inputs, "y", "sums", *bias]
        nodes.append(helper.make_node("AttentionBackward", given, ["dq", "dk", "dv"], **attributes))
    kind, outputs = TensorProto.FLOAT, ["y", *(["dq", "dk", "dv"] if backward else [])]
    graph = helper.make_graph(
        nodes, "attention", [helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()],
        [helper.make_tensor_value_info(n, kind, None) for n in outputs],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def contenders(length: int, form: str, threads: int) -> dict[str, Callable[[], object]]:
    """A run of each, forward alone and both ways."""
    rng = np.random.default_rng(0)
    shape, names = (BATCH, HEADS, length, SIZE), ("query", "key", "value", "diff")
    feeds: dict[str, np.ndarray] = {name: rng.standard_normal(shape, np.float32) for name in names}
    leaves = [torch.tensor(feeds[name], requires_grad=name != "diff") for name in names]
    if form == "mask":
        feeds["bias"] = np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)[None, None]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = {both: ob.session(model(length, form, backward=both), session_options=options) for both in (False, True)}
    attend: Any = partial(torch.nn.functional.scaled_dot_product_attention, *leaves[:3], is_causal=form != "plain")

    def forward() -> None:
        with torch.no_grad():
            attend()

    return {
        "ours forward": lambda: sessions[False].run(None, feeds),
        "torch forward": forward,
        "ours": lambda: sessions[True].run(None, feeds),
        "torch": lambda: torch.autograd.grad(attend(), leaves[:3], leaves[3]),
    }


def main() -> None:
    """Print a row for each length and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    print("| T | form | forward | both | torch forward | torch both | times | times both |\n|" + "---|" * 8)
    for length in arguments.lengths:
        for form in FORMS:
            runs = contenders(length, form, arguments.threads)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(arguments.runs + 1):
                for name, run in runs.items():
                    start = clock()
                    run()
                    if turn:  # the first one compiles
                        times[name].append(clock() - start)
            forward, their, both, theirs = (median(times[name]) for name in runs)
            cells = [f"{1e3 * seconds:.2f} ms" for seconds in (forward, both, their, theirs)]
            print(
                f"| {length} | {form} | {' | '.join(cells)} | {their / forward:.2f} | {theirs / both:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
