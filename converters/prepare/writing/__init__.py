"""Models on their way out: files that are complete or not there, short names, nothing that inference knows, inlined.

May import `prepare.ir_models` and `prepare.large_weights`, and opset.
"""
