"""Products of matrices, where a processor has registers for these.

May import `vector`, `runtime`, `compiler` and opset.
"""
