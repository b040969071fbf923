"""The contract of an operator: declaration, schema, arithmetic on shapes, errors; writing files, signals that wait.

May import `graphs`, onnx and NumPy.
"""
