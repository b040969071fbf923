"""What a model with derivatives says about itself: which of its inputs seed them, and which outputs they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.opset.core.reading import load

METADATA = "onnx_backprop.derivatives"  # key of the model's metadata: JSON, a list of derivatives, the newest last
MODES = ("vjp", "jvp", "hvp", "jacobian", "hessian")


@dataclass(frozen=True)
class Derivative:
    """One differentiation of a model, by the names of the result's inputs and outputs.

    mode: which. seeds: vjp {y: input that is multiplied from the left}, jvp {x: its tangent}, hvp {x: its direction};
    without those that are seeded automatically. results: vjp {x: its gradient}, jvp {y: its tangent}, hvp {x: the
    product}; of jacobian {y: {x: dy/dx}} and hessian {x: {z: d²y/dxdz}}. batched: seeds and results have a leading
    axis, with one entry for each of several seeds.
    """

    mode: str
    seeds: dict[str, str]
    results: dict[str, Any]
    batched: bool = False


def derivatives(model: ModelProto | ir.Model | str | Path) -> tuple[Derivative, ...]:
    """The derivatives that a model has from `backward`, `vjp`, `jvp`, `hvp`, `jacobian` and `hessian`, newest last.

    Those whose inputs or outputs the model no longer has are left out. Empty for any other model.
    """
    proto = load(model)
    text = next((entry.value for entry in proto.metadata_props if entry.key == METADATA), "")
    inputs = {value.name for value in proto.graph.input}
    outputs = {value.name for value in proto.graph.output}
    return tuple(
        one for one in _read(text) if inputs.issuperset(_names(one.seeds)) and outputs.issuperset(_names(one.results))
    )


def shaped_like(derivative: Derivative) -> dict[str, list[str]]:
    """{a seed or a result: the values whose shapes it has, one after the other}."""
    shapes = {seed: [of] for of, seed in derivative.seeds.items()}
    for first, entry in derivative.results.items():
        shapes |= (
            {name: [first, second] for second, name in entry.items()} if isinstance(entry, dict) else {entry: [first]}
        )
    return shapes


def record(model: ir.Model, derivative: Derivative) -> None:
    """Note a derivative in a model's metadata, behind those that it has already."""
    before = _read(model.metadata_props.get(METADATA, ""))
    entries = [
        {field: value for field, value in vars(one).items() if value is not False} for one in (*before, derivative)
    ]
    model.metadata_props[METADATA] = json.dumps(entries, separators=(",", ":"))


def _read(text: str) -> list[Derivative]:
    """What the metadata holds; a file of a stranger may say anything, and what is no derivative is passed over."""
    try:
        entries = [Derivative(**entry) for entry in json.loads(text or "[]")]
    except (ValueError, TypeError, RecursionError):
        return []
    return [
        one for one in entries if one.mode in MODES and isinstance(one.seeds, dict) and isinstance(one.results, dict)
    ]


def _names(tree: Mapping[str, Any]) -> list[str]:
    return [name for entry in tree.values() for name in (_names(entry) if isinstance(entry, dict) else [str(entry)])]
