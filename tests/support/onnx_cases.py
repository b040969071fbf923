"""The node tests that onnx carries, of the modules that are asked for.

onnx's own loader imports every module, each of which computes its answers on import: 8 seconds for 1,700 cases.
"""

from __future__ import annotations

import importlib
import warnings

from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase


def node_cases(*modules: str) -> dict[str, TestCase]:
    """The cases of these modules of `onnx.backend.test.case.node`, and of those that were imported before, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of onnx's own cases
        for module in modules:
            importlib.import_module(f"{node.__name__}.{module}")
    return {case.name: case for case in node._NodeTestCases}
