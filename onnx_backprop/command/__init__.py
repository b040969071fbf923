"""The command `onnx-backprop`: its parser, what its commands share, and `commands`, one module for each of them.

May import everything but `__main__`; what needs a runtime is imported when a command runs.
"""
