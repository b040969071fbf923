"""Gradients of Loop and Scan: one form for both, their steps backwards, segments, states that steps carry.

May import the modules at the top of `reverse`, `prepare` and opset; `reverse.differentiate` alone asks for it.
"""
