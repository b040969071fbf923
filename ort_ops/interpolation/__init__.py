"""Kernels of the interpolation gradients and of average pooling's: sparse sums along each axis.

May import `vector`, `runtime`, `compiler` and the operators and maths of opset.
"""
