"""The function bodies that a model carries for each route, and `use_kernels`, which exchanges them.

May import everything of opset.
"""
