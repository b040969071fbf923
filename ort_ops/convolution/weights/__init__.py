"""Weight gradients as matrix products over the pixels.

May import what `convolution` may, and all of it but `kernels`.
"""
