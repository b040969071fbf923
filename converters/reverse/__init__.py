"""Reverse-mode differentiation of one graph: the walk, the table of rules, what a rule sees and emits.

May import `parameters`, `prepare` and opset.
"""

from importlib import import_module

import_module("onnx_backprop.converters.rules")  # which build on this package, and fill its table
