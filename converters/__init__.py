"""Converters: a forward ONNX model in, a training graph out."""
