"""Derivatives beside the gradient: products with a Jacobian and a Hessian from both sides, and these whole.

May import `rules`, `reverse`, `prepare` and opset.
"""
