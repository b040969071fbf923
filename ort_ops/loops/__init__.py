"""The route "numba": operators as plain loops that Numba compiles, to be read beside their specification.

A module has a family of operators: its loops in float64, what gives them their arguments, and `REFERENCES`, an entry
for each operator in the form of `Op.reference`. Attributes and shapes are checked, results rounded by the same `Op` as
on the route "numpy". Which indices meet is written out here once more, so that the loops check the other routes.

This room imports numba, numpy and opset. It is imported by `numpy_route`, the first time that somebody asks for it.
"""

from dataclasses import replace

from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.loops import convolution, interpolate, resample, resize

BY_LOOPS = {
    name: replace(BY_NAME[name], reference=reference)
    for family in (convolution, interpolate, resample, resize)
    for name, reference in family.REFERENCES.items()
}
"""The operators that have loops, by name; the others run as their references."""
