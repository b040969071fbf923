"""Kernels of the gradients of normalisations and of softmax."""
