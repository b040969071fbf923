"""Models as graphs, for all rooms: walks, names, scopes, searches, changes, emitted nodes, facts of operators.

It imports onnx, onnx_ir and NumPy alone.
"""
