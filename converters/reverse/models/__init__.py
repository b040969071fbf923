"""A whole model in, the same model with its gradients out: `backward`, values by name, what a file says of derivatives.

May import everything of `reverse`, `parameters`, `prepare` and opset.
"""
