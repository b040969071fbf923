"""The row of an embedding that torch does not train, `padding_idx`: y = W[ids], and dW[row] gets nothing of dy.

A file of torch.export has the number among the arguments of the operation. Others say nothing, but the constructor puts
zeros there: a table that labels of the input choose from, with one row of zeros alone, is read so.
"""

import re
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.parameters.layout import shown
from onnx_backprop.converters.prepare.exporters.detached import STOP
from onnx_backprop.converters.prepare.exporters.origins import called_with
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import is_standard

_EMBEDDING = re.compile(r"\[target=torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+(?:, (-?\d{1,9}))?")

_PLACES = ("ArgMax", "ArgMin", "Shape", "Size", "TopK")


def stop_padding(graph: ir.Graph) -> dict[ir.Value, int]:
    """Let no gradient pass the padding rows of embeddings, in place; the tables whose row is guessed, and the rows."""
    guessed: dict[ir.Value, int] = {}
    op: Builder | None = None
    for node in list(graph):
        table, ids = node.inputs[:2] if is_standard(node, "Gather") and len(node.inputs) == 2 else (None, None)
        if table is None or ids is None or not _is_table(table, node):
            continue
        stated = _EMBEDDING.search(called_with(node))
        row = int(stated[1] or -1) if stated else _row_of_zeros(table) if _are_labels(ids) else -1
        if row < 0 or ids.dtype is None:
            continue
        if not stated:
            guessed[table] = row
        if op is None:
            op = Builder(used_names(graph))
            op.prefix = "padding"
        (y,) = node.outputs
        readers, op.nodes = [*y.uses()], []
        kept = op.Identity(y)
        op.nodes[-1].metadata_props[STOP] = "padding"
        is_padding = op.Unsqueeze(op.Equal(ids, op.constant(np.array(row, ids.dtype.numpy()))), op.ints([-1]))
        trained = op.Where(is_padding, kept, y)
        trained.type, trained.shape, name = y.type, y.shape, str(y.name)
        for reader, index in readers:
            reader.replace_input_with(index, trained)
        for place, output in enumerate(graph.outputs):
            if output is y:
                graph.outputs[place] = trained
        y.name, trained.name = op.unique(f"{name}/rows"), name
        graph.insert_after(node, op.nodes)
    return guessed


def warn_of_padding(guessed: Mapping[ir.Value, int], trained: Collection[str]) -> None:
    """Say what was guessed of the tables that are trained."""
    rows = [f"{row} of {shown(table)}" for table, row in guessed.items() if table.name in trained]
    if rows:
        warn(
            "these rows of tables are all zeros, and no other of theirs, as torch.nn.Embedding begins with at "
            f"padding_idx: {', '.join(rows)}. They get no gradient, as in torch. If they are to be trained, start them "
            "with other numbers"
        )


def _is_table(value: ir.Value, node: ir.Node) -> bool:
    shape, axis = value.shape, node.attributes.get("axis")
    stored = value.is_initializer() and not value.is_graph_input() and is_float(value)
    return stored and shape is not None and len(shape) == 2 and (axis is None or axis.as_int() == 0)


def _are_labels(ids: ir.Value) -> bool:
    """Whether an input is, or says, which rows are read; not so those of positions, or of the nearest of a codebook."""
    seen, waiting = set[ir.Value](), [ids]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value.is_graph_input() and not value.is_initializer():
            return True
        if value not in seen and node is not None and not is_standard(node, *_PLACES):
            waiting += [read for read in node.inputs if read is not None]
        seen.add(value)
    return False


def _row_of_zeros(table: ir.Value) -> int:
    """The only row of zeros among three or more; -1 for none or several."""
    array = None if table.const_value is None else table.const_value.numpy()
    if array is None or len(array) < 3 or array.shape[1] < 2:
        return -1
    rows = [int(row) for row in np.flatnonzero(array[:, 0] == 0) if not array[row].any()]
    return rows[0] if len(rows) == 1 else -1
