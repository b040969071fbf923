"""Corrections of onnx's shape inference: where it is wrong, gives up, or believes more than a run keeps to.

May import `prepare.large_weights` and opset.
"""
