"""Kernels of the interpolation gradients and of average pooling's: sparse sums along each axis."""
