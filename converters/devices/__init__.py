"""Graphs for providers of limited kernels: what they cannot do is written in what they can, or left to the CPU.

May import `prepare` and opset.
"""
