"""Convolutions by 3×3 with stride 1 and their gradients, through Winograd's tiles.

May import what `convolution` may, and all of it but `kernels`.
"""
