"""Fine-tuning: adapters beside the weights of a model that was given, and another head on it.

May import `prepare` and opset.
"""
