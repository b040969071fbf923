"""Kernels of the gradients of bias, ReLU, max pooling and products with packed weights."""
