"""What compiled kernels run on: onnxruntime's C interface, plans and their stages. Nothing of operators.

May import `compiler`, and `core`, `functions` and `graphs` of opset.
"""
