"""Kernels of the gradients of bias, ReLU, max pooling and products with packed weights.

May import `vector`, `runtime`, `compiler` and the operators, maths and errors of opset.
"""
