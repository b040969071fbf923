"""`anonymize`: the same graph with other numbers, which may be shown to strangers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import assign, copied, replace_values

FEW = 16  # integers, such as a shape, axes or pads
_RESIZE = ("Resize", "Upsample")
_PROGRAM = "stack_trace"  # in keys of metadata that hold lines of the program that was exported


def anonymize(model: ModelProto | ir.Model | str | Path, *, hide_names: bool = False, seed: int = 0) -> ModelProto:
    """The model with random weights and the same nodes, attributes, types and shapes.

        ob.save_model(ob.anonymize("secret.onnx", hide_names=True), "shown.onnx")

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        hide_names: values, nodes, symbolic dimensions, functions and graphs get numbers as names, and all metadata is
            removed. Other tensors may then be trained by default, since names tell parameters from buffers.
        seed: of the random numbers.

    Floats x are replaced by draws from N(mean x, std x), clipped to the least and the largest x: scales, variances and
    probabilities remain such. Unchanged are zeros, NaN and infinity, tensors of one number or of two different ones,
    such as masks, and the scales of Resize and Upsample. Integers of at most 8 bits are shuffled within their tensor;
    rows of wider ones are, so that indices stay within their tables, but 16 or fewer stay, since they may be a shape,
    axes or pads. Texts become numbers. Equal tensors stay equal, also one and the transpose of another. Lists of floats
    in attributes are treated alike. Documentation and metadata with lines of a program are removed.

    Errors: InvalidArgumentError for a seed that is no number of 0 or more.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidArgumentError(f"seed: expected a number of 0 or more, got {seed!r}")
    result, numbers = copied(load(model)), _Numbers(seed)
    nodes = (message for message in _messages(result) if isinstance(message, NodeProto))
    sizes = {name for node in nodes if node.op_type in _RESIZE for name in node.input[1:] if name}
    kept = [(message, copied(message)) for message in _messages(result) if not sizes.isdisjoint(_constants(message))]
    for message in _messages(result):
        if isinstance(message, TensorProto):
            replace_values(message, numbers.instead_of(to_array(message)))
        elif isinstance(message, NodeProto):
            for attribute in message.attribute:
                if len(attribute.floats) > FEW:
                    assign(attribute.floats, numbers.instead_of(np.array(attribute.floats, np.float32)).tolist())
    for message, before in kept:
        message.CopyFrom(before)
    for message in _messages(result):
        fields = message.DESCRIPTOR.fields_by_name
        if "doc_string" in fields:
            message.ClearField("doc_string")
        if "metadata_props" in fields:
            kept = [p for p in message.metadata_props if not hide_names and _PROGRAM not in p.key]
            assign(message.metadata_props, kept)
    if hide_names:
        _Hidden(result).hide()
    return result


def _messages(message: Any) -> Iterator[Any]:
    """A message and all within it, the outer before the inner, but for the positions in a sparse tensor."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not (isinstance(message, SparseTensorProto) and field.name == "indices"):
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _constants(message: Any) -> Sequence[str]:
    """The names of what a message holds, if it is a tensor or a Constant."""
    if isinstance(message, TensorProto):
        return [message.name]
    return message.output if isinstance(message, NodeProto) and message.op_type == "Constant" else []


class _Numbers:
    """Random numbers in the place of others; the same for the same, whichever way round they lie."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def instead_of(self, array: np.ndarray) -> np.ndarray:
        """An array of the same type and shape."""
        name = array.dtype.name
        if name == "object":
            return np.array([f"text{n}" for n in np.unique(array, return_inverse=True)[1].flat], object).reshape(
                array.shape
            )
        if name == "bool" or array.size < 2 or ("int" in name and array.itemsize > 1 and array.size <= FEW):
            return array
        # of a matrix and its transpose the one whose bytes come first
        turned = array.ndim == 2 and array.T.tobytes() < array.tobytes()
        drawn = self._drawn(np.ascontiguousarray(array.T) if turned else array)
        return np.ascontiguousarray(drawn.T) if turned else drawn

    def _drawn(self, array: np.ndarray) -> np.ndarray:
        digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).digest()
        rng = np.random.default_rng([self.seed, *digest])
        if "int" in array.dtype.name:
            return rng.permutation(array if array.itemsize > 1 else array.reshape(-1)).reshape(array.shape)
        wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        numbers = wide.reshape(-1).view(np.float64)  # of complex ones both parts
        ordinary = np.isfinite(numbers) & (numbers != 0)
        known = numbers[ordinary]
        if np.unique(known).size > 2:
            numbers[ordinary] = np.clip(rng.normal(known.mean(), known.std(), known.size), known.min(), known.max())
        return wide.astype(array.dtype)


class _Hidden:
    """Numbers in the place of names: one for a name, wherever it stands."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self._new: dict[str, dict[str, str]] = {}
        self.functions = {(f.domain, f.name): f"Function{n}" for n, f in enumerate(model.functions)}
        self.domains = {domain: f"functions{n}" for n, domain in enumerate(sorted({d for d, _ in self.functions}))}

    def name(self, kind: str, name: str) -> str:
        """The number of a name, as "v12"; "" stays."""
        return name and self._new.setdefault(kind, {}).setdefault(name, f"{kind}{len(self._new.get(kind, {}))}")

    def hide(self) -> None:
        """Rename everything, in place."""
        standard = {o.domain for o in self.model.opset_import} - self.domains.keys()
        for message in _messages(self.model):
            if isinstance(message, NodeProto):
                self._node(message)
            elif isinstance(message, FunctionProto):
                message.input[:], message.output[:] = (
                    [self.name("v", x) for x in s] for s in (message.input, message.output)
                )
                message.name = self.functions[message.domain, message.name]
                message.domain = self.domains[message.domain]
            elif isinstance(message, GraphProto):
                message.name = self.name("g", message.name)
                del message.quantization_annotation[:]
            elif isinstance(message, ValueInfoProto | TensorProto):
                message.name = self.name("v", message.name)
            elif message.DESCRIPTOR.name == "Dimension" and message.dim_param:
                message.dim_param = self.name("d", message.dim_param)
            elif message.DESCRIPTOR.name == "OperatorSetIdProto" and message.domain not in standard:
                message.domain = self.domains[message.domain]
        for field in ("producer_name", "producer_version", "domain"):
            self.model.ClearField(field)

    def _node(self, node: NodeProto) -> None:
        node.name = self.name("n", node.name)
        node.input[:], node.output[:] = ([self.name("v", x) for x in s] for s in (node.input, node.output))
        if (node.domain, node.op_type) in self.functions:
            node.op_type, node.domain = self.functions[node.domain, node.op_type], self.domains[node.domain]
