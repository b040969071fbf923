"""Operators written in standard ONNX operators, for the route "onnx".

May import `maths`, `core` and `graphs`.
"""
