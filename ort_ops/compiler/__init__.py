"""From Python functions to machine code: the language that kernels are written in, for the processor at hand.

May import llvmlite, and `core` of opset.
"""
