"""Rewrites of a model for the native kernels, each one a function on a ModelProto; `native_graph` has their order.

They may import `ort_ops.elementwise`, what `ort_ops.normalization` says of its programs, and the operator set.
"""
