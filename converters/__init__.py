"""Converters: a forward ONNX model in, a training graph out.

May import opset; nothing that runs a model.
"""
