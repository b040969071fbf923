"""Kernels of the convolution operators: one strategy, one folder.

May import `vector`, `runtime`, `compiler` and the operators, maths and errors of opset.
"""
