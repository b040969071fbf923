"""What the native nodes of a graph ask for: each operator with its attributes, and the shapes that it meets.

A session is run on the lengths that a library is to serve, and what its kernels have planned is written down. Nothing
of it depends on a processor: `library` plans it again for the one that code is made for.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from onnx import ModelProto, NodeProto, helper

from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN, NATIVE_PREFIX
from onnx_backprop.opset.functions.numpy import NUMPY_DOMAIN
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE, NAME
from onnx_backprop.ort_ops.native_table import KERNELS
from onnx_backprop.ort_ops.runtime.bridge import asked_for, node_attributes, spec_key

Spec = dict[str, Any]  # as JSON has it: an operator with attributes and keys, or with a program
SPEC = "spec"  # the attribute that tells a node's number in the library


def requests(model: ModelProto, run: Callable[[], object]) -> tuple[str, list[Spec]]:
    """The domain of a library for a model, and what its nodes ask for in `run`; the nodes become those of the domain.

    model: without functions. run: makes a session of the model, and runs it for all lengths. Two nodes of one operator
    and equal attributes share a spec. The domain's name is a digest of the specs, so that a graph does not load with
    the library of another, and sessions of several libraries may have the same options.
    Errors: UnsupportedError for a native operator that works with other processes.
    """
    for node in all_nodes(model):
        if node.domain == NUMPY_DOMAIN:
            raise UnsupportedError(
                "its kernel is Python, which no library runs. Give register_kernel a native one",
                op_type=node.op_type,
                node=node.name,
            )
    asked: dict[tuple[object, ...], dict[tuple[int, ...], None]] = {}
    token = asked_for.set(asked)
    try:
        run()
    finally:
        asked_for.reset(token)
    numbers: dict[tuple[object, ...], int] = {}
    specs: list[Spec] = []
    nodes = [node for node in all_nodes(model) if node.domain == NATIVE_DOMAIN]
    for node in nodes:
        key, spec = _spec(node, asked)
        if key not in numbers:
            numbers[key] = len(specs)
            specs.append(spec)
        node.attribute.append(helper.make_attribute(SPEC, numbers[key]))
    domain = f"{NATIVE_PREFIX.lower()}{hashlib.sha256(json.dumps(specs).encode()).hexdigest()[:16]}"
    for node in nodes:
        node.domain = domain
        node.name = node.name or node.output[0]  # which onnxruntime says when a run of it fails
    kept = [entry for entry in model.opset_import if entry.domain != NATIVE_DOMAIN]
    assign(model.opset_import, [*kept, helper.make_opsetid(domain, 1)])
    return domain, specs


def _spec(
    node: NodeProto, asked: dict[tuple[object, ...], dict[tuple[int, ...], None]]
) -> tuple[tuple[object, ...], Spec]:
    given = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}
    if node.op_type in (NAME, ELEMENTWISE):
        spec = {"op": node.op_type, "program": given["program"], "after": given.get("after", 0)}
        return tuple(spec.values()), spec
    kernel = KERNELS.get(node.op_type)
    if kernel is None:
        raise UnsupportedError(
            "it is of a training on several ranks, which no library runs", op_type=node.op_type, node=node.name
        )
    op = kernel.op
    attributes = node_attributes(op, lambda name, _kind: given.get(name))
    key = spec_key(op, attributes)
    there = {name: value for name, value in attributes.items() if value is not None}
    return key, {"op": node.op_type, "attributes": there, "keys": sorted(asked.get(key, ()))}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return tuple(value) if isinstance(value, list) else value
