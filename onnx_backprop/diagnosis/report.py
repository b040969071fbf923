"""`report`: what a question about a model needs to say, without a weight of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.check.explain import explain_gradients
from onnx_backprop.opset.core.errors import OnnxBackpropError
from onnx_backprop.opset.core.mapped import byte_size
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.providers.choose import devices

_PACKAGES = ("onnx-backprop", "onnxruntime", "onnxruntime-extensions", "onnx", "onnx-ir", "numpy", "llvmlite", "torch")


def report(model: ModelProto | ir.Model | str | Path | None = None) -> str:
    """Versions, processor and devices; for a model also its structure and the result of `explain_gradients`. Text.

        print(ob.report("model.onnx"))

    It contains names of values and nodes, but no numbers of tensors; `anonymize` hides names too.

    Errors: InvalidArgumentError or InvalidModelError for a file that is no model.
    """
    sections = [("Versions", _versions()), ("Machine", _machine())]
    if model is not None:
        proto = load(model, mapped=True)
        sections += [("Model", _structure(proto)), ("Gradients", _gradients(proto))]
    return "\n".join(line for title, lines in sections for line in (f"## {title}", "", *lines, ""))


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: not installed"


def _machine() -> Iterator[str]:
    cores = f"{machine.cores()} cores, {machine.processors()} of them used"
    vectors = f"vectors of {machine.VECTOR} float32, {machine.REGISTERS} registers"
    tiles = "registers of matrices" if machine.matrix_tiles() else "no registers of matrices"
    yield f"{machine.PROCESSOR}, {cores}, {vectors}, {tiles}"
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("ONNX_BACKPROP_"))
    try:
        yield from map(str, devices())
    except (ImportError, OSError) as e:  # which may be what the report is about
        yield f"devices: {type(e).__name__}: {e}"


def _structure(proto: ModelProto) -> Iterator[str]:
    tensors = [t for graph in all_graphs(proto) for t in graph.initializer]
    opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in proto.opset_import)
    producer = f"{proto.producer_name} {proto.producer_version}".strip()
    yield f"written by {producer or 'an unnamed producer'}, IR {proto.ir_version}, {opsets}"
    nodes = list(all_nodes(proto))
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
    yield f"{len(nodes)} nodes: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())
    unnamed = sum(not node.name for node in nodes)
    inner = sum(1 for _ in all_graphs(proto)) - 1
    yield f"{unnamed} nodes without names, {inner} inner graphs, {len(proto.functions)} functions"
    yield from _values("input", proto.graph.input)
    yield from _values("output", proto.graph.output)
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[TensorProto.DataType.Name(tensor.data_type)] += byte_size(tensor) if tensor.data_type != 8 else 0
    yield f"{len(tensors)} tensors: " + ", ".join(f"{size:,} bytes of {name}" for name, size in sizes.items())


def _values(what: str, values: Iterable[ValueInfoProto]) -> Iterator[str]:
    for value in values:
        yield f"{what} {value.name}: {helper.printable_type(value.type)}"


def _gradients(proto: ModelProto) -> Iterator[str]:
    try:
        yield from str(explain_gradients(proto)).splitlines()
    except OnnxBackpropError as e:
        yield f"{type(e).__name__}: {e}"
