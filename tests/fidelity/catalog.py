"""All subjects by name."""

from __future__ import annotations

from functools import cache

from tests.fidelity.architectures import architectures
from tests.fidelity.modules_constants import absent, buffers
from tests.fidelity.modules_gates import gates, tables
from tests.fidelity.modules_layers import layers, readings
from tests.fidelity.modules_modes import frozen, norms, stops
from tests.fidelity.subject import Subject


@cache
def subjects() -> dict[str, Subject]:
    kinds = (layers, readings, gates, tables, buffers, absent, norms, frozen, stops, architectures)
    found = [subject for kind in kinds for subject in kind()]
    result = {subject.name: subject for subject in found}
    if len(result) < len(found):
        raise ValueError("two subjects have one name")
    return result
