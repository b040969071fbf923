"""Copies of Loops and Scans without the rows that nobody reads, which a run would stack all the same."""

import onnx_ir as ir

from onnx_backprop.opset.graphs.walk import all_nodes, is_standard, subgraphs


def detach(node: ir.Node) -> None:
    """Let a node that is given up read nothing any more."""
    for inner in all_nodes([node]):
        for index in range(len(inner.inputs)):
            inner.replace_input_with(index, None)
        for graph in subgraphs(inner):
            graph.outputs.clear()


def without_unread_rows(node: ir.Node, needed: set[ir.Value]) -> ir.Node:
    """The node, or one in its place without scan outputs that no node reads; as it is where it makes what is needed."""
    if not is_standard(node, "Loop", "Scan") or not needed.isdisjoint(node.outputs):
        return node
    body = node.attributes["body"].as_graph()
    extra = len(body.outputs) - len(node.outputs)  # the condition of a Loop
    if node.op_type == "Scan":
        states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    else:
        states = max(len(node.inputs) - 2, 0)
    kept = [n for n, y in enumerate(node.outputs) if n < states or y.uses()]
    if len(kept) == len(node.outputs) or (node.op_type == "Scan" and not kept):
        return node
    outputs = list(body.outputs)
    body.outputs[:] = [*outputs[:extra], *(outputs[extra + n] for n in kept)]
    _drop_unread(body)
    attributes = dict(node.attributes)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in attributes:
            numbers = list(attributes[name].as_ints())
            attributes[name] = ir.AttrInt64s(name, [numbers[n - states] for n in kept if n >= states])
    inputs = list(node.inputs)
    for n in range(len(inputs)):
        node.replace_input_with(n, None)
    new = ir.Node("", node.op_type, inputs, attributes.values(), num_outputs=len(kept), name=node.name)
    new.metadata_props.update(node.metadata_props)
    for n, y in zip(kept, new.outputs, strict=True):
        old = node.outputs[n]
        y.name, y.type, y.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(y)
    return new


def _drop_unread(graph: ir.Graph) -> None:
    """Take what nobody reads out of a graph, rows of inner loops too."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(y.uses() or y in outputs for y in node.outputs):
            graph.remove(node)
            detach(node)
            continue
        new = without_unread_rows(node, outputs)
        if new is not node:
            graph.insert_before(node, new)
            graph.remove(node)
