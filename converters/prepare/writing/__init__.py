"""Models on their way out: files that are complete or not there, short names, nothing that inference knows, inlined.

May import `prepare.graphs`, `ir_models` and `large_weights`, and opset.
"""
