"""Operators written in standard ONNX operators, for the route "onnx"."""
