"""Emitting a Scan: the only loop of a backward graph, for what runs along time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_backprop.converters.rules.cell_activations import Arithmetic

ScanBody = Callable[[Arithmetic, list[ir.Value], list[ir.Value]], tuple[list[ir.Value], list[ir.Value]]]


def scan(
    m: Arithmetic,
    states: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    step: ScanBody,
    *,
    outputs: int,
    backwards: bool,
    running: ir.Value | None = None,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """(states, outputs) = step(states, inputs) for each step in turn; return the last states and all outputs.

    Shapes: states (B, …), sequences and outputs (T, B, …). running: where it is false the states stay.
    """
    inner = Arithmetic(m.op.inside(), m.dtype)
    op = inner.op
    op.prefix = f"{m.op.prefix}/step"
    flags = [] if running is None else [running]
    types = [m.dtype] * (len(states) + len(sequences)) + [ir.DataType.BOOL] * len(flags)
    given = [
        ir.Value(name=op.unique(f"{op.prefix}/in"), type=ir.TensorType(t), shape=ir.Shape([None, None])) for t in types
    ]
    before, taken = given[: len(states)], given[len(states) : len(states) + len(sequences)]
    after, results = step(inner, before, taken)
    if running is not None:
        after = [op.Where(given[-1], new, old) for new, old in zip(after, before, strict=True)]
    for value in (*after, *results):
        value.type, value.shape = ir.TensorType(m.dtype), ir.Shape([None, None])
    body = ir.Graph(given, [*after, *results], nodes=op.nodes, name=op.unique(f"{op.prefix}/body"))
    attributes = {"body": body, "num_scan_inputs": len(sequences) + len(flags)}
    if backwards:
        attributes |= {
            "scan_input_directions": [1] * (len(sequences) + len(flags)),
            "scan_output_directions": [1] * outputs,
        }
    values = m.op.emit("Scan", [*states, *sequences, *flags], attributes, outputs=len(states) + outputs)
    return list(values[: len(states)]), list(values[len(states) :])
