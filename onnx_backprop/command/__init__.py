"""The command `onnx-backprop`."""
