"""Lengths of inputs: fixed ones made symbolic, and what known ones decide computed once.

May import `prepare.load`, what that imports, and opset.
"""
