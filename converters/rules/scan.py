"""Emitting a Scan: the only loop of a backward graph, for what runs along time."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type

ScanBody = Callable[[Builder, list[ir.Value], list[ir.Value]], tuple[list[ir.Value], list[ir.Value]]]


def scan(
    op: Builder,
    states: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    step: ScanBody,
    *,
    outputs: int,
    backwards: bool,
    running: ir.Value | None = None,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """(states, outputs) = step(states, inputs) for each step in turn; return the last states and all outputs.

    Shapes: states (B, …), sequences and outputs (T, B, …), all of one type. running: where it is false the states stay.
    """
    inner = op.inside()
    inner.prefix = f"{op.prefix}/step"
    flags = [] if running is None else [running]
    dtype = element_type(states[0])
    types = [dtype] * (len(states) + len(sequences)) + [ir.DataType.BOOL] * len(flags)
    name, shape = f"{inner.prefix}/in", ir.Shape([None, None])
    given = [ir.Value(name=inner.unique(name), type=ir.TensorType(t), shape=shape.copy()) for t in types]
    before, taken = given[: len(states)], given[len(states) : len(states) + len(sequences)]
    after, results = step(inner, before, taken)
    if running is not None:
        after = [inner.Where(given[-1], new, old) for new, old in zip(after, before, strict=True)]
    for value in (*after, *results):
        inner.typed(value, given[0])
    body = ir.Graph(given, [*after, *results], nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
    inputs = len(sequences) + len(flags)
    attributes: dict[str, object] = {"body": body, "num_scan_inputs": inputs}
    if backwards:
        attributes |= {"scan_input_directions": [1] * inputs, "scan_output_directions": [1] * outputs}
    values = op.emit("Scan", [*states, *sequences, *flags], attributes, outputs=len(states) + outputs)
    for value in values:
        value.dtype = dtype
    return list(values[: len(states)]), list(values[len(states) :])
