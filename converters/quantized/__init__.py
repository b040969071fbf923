"""Quantised files: the float model that one stands for, and the way back once its weights are trained.

May import `prepare` and opset.
"""
