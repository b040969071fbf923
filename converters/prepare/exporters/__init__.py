"""What exporters say of tensors and what they took away: names of the module, parameters, statistics, stops.

May import `prepare.large_weights` and opset.
"""
