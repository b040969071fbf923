"""What several operators compute: float64 references and geometry, nothing of ONNX graphs.

May import `core`.
"""
