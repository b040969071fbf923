"""Models on their way out: files that are complete or not there, short names, nothing that inference knows, inlined.

May import the modules at the top of `prepare`, and opset.
"""
