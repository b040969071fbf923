"""Convolutions with one channel per group, and their gradients."""
