"""Convolutions with one channel per group, and their gradients.

May import what `convolution` may, and all of it but `kernels`.
"""
