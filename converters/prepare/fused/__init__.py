"""Operators that are made of standard ones, as onnxruntime's optimisers and scikit-learn's converters leave them.

May import `accept`, `large_weights` and `inference` of `prepare`, and opset.
"""
