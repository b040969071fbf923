"""Kernels of the gradients of normalisations and of softmax.

May import `elementwise`, `vector`, `runtime`, `compiler` and the operators and errors of opset.
"""
