"""Attention without its matrix of probabilities: blocks of scores in a cache, forward, and again backward.

May import `elementwise`, `vector`, `runtime`, `compiler` and opset.
"""
