"""Losses by class of one row without an axis for it, x (C) and t (): PyTorch exports them, onnxruntime loads none."""

from collections.abc import Sequence

from onnx_backprop.converters.prepare.fused.composer import Composer


def class_loss(op: Composer) -> Sequence[str | None] | None:
    """That of x (1, C) and t (1), its outputs without the axis; None where the rows have an axis."""
    x, t, weights = (op.input(n) for n in range(3))
    given = {name: op.attribute(name) for name in ("reduction", "ignore_index")}
    if op.known.rank(x) != 1:
        return None
    asked = len(op.node.output)
    y, *rest = op.emit(op.node.op_type, [op.Unsqueeze(x, [0]), op.Unsqueeze(t, [0]), weights], given, outputs=asked)
    op.nodes[-1].metadata_props.extend(op.node.metadata_props)
    return [op.Squeeze(y, [0]) if given["reduction"] == "none" else y, *(op.Squeeze(v, [0]) for v in rest)]
