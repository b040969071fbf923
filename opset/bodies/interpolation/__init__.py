"""The interpolation gradients in standard ONNX operators: one matrix per axis, in the form that suits the lengths.

May import what `bodies` may, and the modules there.
"""
