"""Kernels of the convolution operators: one strategy, one folder."""
