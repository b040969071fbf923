"""Elementwise formulas in one pass over memory: updates of many tensors, chains of operators.

May import `vector`, `runtime`, `compiler` and opset.
"""
