"""All subjects by name, those whose constructor leaves zeros or ones also from other values, "<name>_perturbed"."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tests.fidelity.architectures import architectures
from tests.fidelity.modules_constants import absent, buffers
from tests.fidelity.modules_gates import gates, tables
from tests.fidelity.modules_layers import layers, readings
from tests.fidelity.modules_modes import frozen, norms, stops
from tests.fidelity.modules_people import people
from tests.fidelity.modules_recipes import recipes
from tests.fidelity.modules_reported import reported
from tests.fidelity.modules_shared import shared
from tests.fidelity.subject import Subject

PERTURBED = "_perturbed"


@cache
def _modules() -> dict[str, Subject]:
    kinds = (layers, readings, gates, tables, buffers, absent, norms, frozen, stops, people, recipes, reported, shared)
    return {subject.name: subject for kind in kinds for subject in kind()}


def subject(name: str) -> Subject:
    """One of `names()`."""
    plain = name.removesuffix(PERTURBED)
    if name != plain:
        return replace(_modules()[plain], name=name, perturbed=True)
    return _modules()[name] if name in _modules() else {s.name: s for s in architectures()}[name]


def names() -> list[str]:
    result: list[str] = []
    for name, entry in _modules().items():
        constant = any(p.numel() > 1 and bool((p == p.flatten()[0]).all()) for p in entry.module().parameters())
        result += [name, name + PERTURBED] if constant else [name]
    result += [s.name for s in architectures()]
    if len(set(result)) < len(result):
        raise ValueError("two subjects have one name")
    return result
