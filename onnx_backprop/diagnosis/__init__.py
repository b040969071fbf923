"""What a question about a model needs: a report, a model without its weights, the smallest that still fails.

May import converters, `ort_ops`, `providers` and opset.
"""
