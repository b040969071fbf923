"""Values that are thrown away where they are no numbers: nothing flows back there, not 0 · NaN.

    y = Where(IsNaN(x), c, x)  =>  dx = 0 where x is NaN;  x = a · b, b = NaN  =>  da = dx · b would be NaN

Whatever an elementwise operator before x makes of such an element, its part of every gradient is 0 where dx is 0. So it
is for Imputer of ai.onnx.ml and nan_to_num of PyTorch, which preprocessing with logarithms and powers ends in.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import constant_value
from onnx_backprop.opset.graphs.facts import ELEMENTWISE


def imputed(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The elementwise nodes, of some in their order, that lead to a value whose NaN or infinity is thrown away."""
    found: set[ir.Node] = set()
    values: set[ir.Value] = set()
    for node in reversed(list(nodes)):
        if node not in ELEMENTWISE:
            continue
        if not values.isdisjoint(node.outputs):
            found.add(node)
            values.update(x for x in node.inputs if x is not None)
        if node.op_type == "Where" and _throws_away(node):
            values.update(x for x in node.inputs[1:] if x is not None)
    return found


def _throws_away(node: ir.Node) -> bool:
    """Whether a Where leaves out what is no number of one of its operands."""
    condition, a, b = node.inputs
    test = None if condition is None else condition.producer()
    if test is not None and test.op_type == "Not" and test.inputs[0] is not None:
        test = test.inputs[0].producer()
    if test is None or test.domain or not test.inputs or test.inputs[0] not in (a, b):  # Constant has no inputs
        return False
    other = constant_value(test.inputs[1]) if test.op_type == "Equal" else None
    return test.op_type in ("IsNaN", "IsInf") or (other is not None and not np.isfinite(other).any())
