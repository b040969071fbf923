"""The cache of a decoder: which inputs and outputs belong to it, and what the graph computes in their place.

May import `accept` and `large_weights` of `prepare`, and opset.
"""
