"""Graphs for providers whose kernels have limits: what they cannot do is written in what they can, or left to the host."""
