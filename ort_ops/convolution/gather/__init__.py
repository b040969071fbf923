"""Sums over the taps of a kernel: correlations and data gradients."""
