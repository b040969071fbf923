"""Other providers of onnxruntime: which there are, graphs for them, what they run, and tensors in their memory.

May import converters, `ort_ops` and opset.
"""
