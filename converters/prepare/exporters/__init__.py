"""What exporters say of tensors and what they took away: names of the module, parameters, statistics, stops.

May import `prepare.graphs` and `prepare.large_weights`, and opset.
"""
