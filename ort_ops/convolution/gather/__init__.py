"""Sums over the taps of a kernel: correlations and data gradients.

May import what `convolution` may, and all of it but `kernels`.
"""
