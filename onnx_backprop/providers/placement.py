"""What of a session runs on a device, and why the rest does not: by onnxruntime's own account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, defs
from onnxruntime.capi import onnxruntime_pybind11_state as state  # pyright: ignore[reportAttributeAccessIssue]

from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_nodes
from onnx_backprop.providers.choose import CPU, Target, unusable

RECORDED = "session.record_ep_graph_assignment_info"  # which makes a session keep the account
_SHOWN = 4  # nodes that the sentence names
_AS_ONNXRUNTIME_PLEASES = "onnxruntime leaves it there"


@dataclass(frozen=True)
class Elsewhere:
    """A node that runs on the CPU, and why."""

    op_type: str
    name: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """Where the nodes of a session run, as onnxruntime has optimised it.

    nodes: how many there are; of a provider that compiles parts of a graph, those in the parts. elsewhere: those that
    are on the CPU.
    """

    device: str
    nodes: int
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def on_device(self) -> int:
        """How many nodes run on the device."""
        return self.nodes - len(self.elsewhere)

    def __str__(self) -> str:
        """`286 of 288 nodes on WebGpu; MaxPool 'p1' on the CPU: its kernel gives no Indices`."""
        counted = f"{self.on_device} of {self.nodes} nodes on {self.device}"
        by_reason: dict[str, list[Elsewhere]] = {}
        for node in self.elsewhere:
            by_reason.setdefault(node.reason, []).append(node)
        parts = [f"{_named(nodes)} on the CPU: {reason}" for reason, nodes in by_reason.items()]
        return "; ".join([counted, *parts])


def _named(nodes: list[Elsewhere]) -> str:
    named = ", ".join(f"{node.op_type} {node.name!r}" for node in nodes[:_SHOWN])
    more = len(nodes) - _SHOWN
    return f"{named} and {more} more" if more > 0 else named


def placement(
    session: onnxruntime.InferenceSession, target: Target, model: ModelProto, host: Mapping[str, str]
) -> Placement:
    """The account of a session that was asked to keep one. host: nodes that were sent to the CPU, with reasons."""
    nodes = {node.name: node for node in all_nodes(model.graph)}
    total, elsewhere = 0, list[Elsewhere]()
    types: dict[str, int] | None = None
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            total += 1
            if part.ep_name != CPU.ep:
                continue
            known = nodes.get(node.name)
            if types is None:
                types = _types(model)
            reason = host.get(node.name) or (known is not None and _reason(known, target, types))
            elsewhere.append(Elsewhere(node.op_type, node.name, reason or _AS_ONNXRUNTIME_PLEASES))
    return Placement(target.name, total, tuple(elsewhere))


def _types(model: ModelProto) -> dict[str, int]:
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    return {value.name: value.type.tensor_type.elem_type for value in values} | {
        tensor.name: tensor.data_type for tensor in graph.initializer
    }


def _reason(node: NodeProto, target: Target, types: Mapping[str, int]) -> str:
    """What the provider's own list of kernels says about a node; "" where it has no such list, or one that fits."""
    kernels = _kernels(target)
    if not kernels:
        return ""
    domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
    if (domain, node.op_type) not in kernels:
        return f"there is no kernel of {node.op_type}"
    accepted = kernels[domain, node.op_type]
    try:
        schema = defs.get_schema(node.op_type, domain)
    except defs.SchemaError:
        return ""
    for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for n, name in enumerate(names):
            kinds = accepted.get(parameters[min(n, len(parameters) - 1)].type_str)  # the last one may stand for several
            kind = TensorProto.DataType.Name(types.get(name, 0)).lower()
            if kinds is not None and name in types and f"tensor({kind})" not in kinds:
                return f"its kernel there takes no {kind}"
    return ""


@cache
def _kernels(target: Target) -> dict[tuple[str, str], dict[str, set[str]]]:
    """The types that a provider's kernels of each operator take and give, by the names that its schema has for them."""
    try:
        plugins = {device.ep_name for device in onnxruntime.get_ep_devices()}
        if target.plugin is None and any(unusable(ep) for ep in {*onnxruntime.get_available_providers()} - plugins):
            return {}  # onnxruntime asks all that it was built with, and ends the process on one that does not load
        if target.plugin is None:
            known: Any = [k for k in state.get_all_opkernel_def() if k.provider == target.provider.ep]
        else:
            known = state.get_registered_ep_kernel_defs(target.provider.ep)
    except Exception:  # noqa: BLE001 - the account then gives no reasons
        return {}
    result: dict[tuple[str, str], dict[str, set[str]]] = {}
    for kernel in known:
        types = result.setdefault((kernel.domain, kernel.op_name), {})
        for name, accepted in kernel.type_constraints.items():
            types.setdefault(name, set()).update(accepted)
    return result
