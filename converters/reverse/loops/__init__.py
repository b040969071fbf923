"""Gradients of Loop and Scan: one form for both, their steps backwards, segments, states that steps carry.

May import the modules at the top of `reverse` but `differentiate`, which asks for it, and `prepare` and opset.
"""
