"""Kernels of the gradients of bias, ReLU and max pooling."""
