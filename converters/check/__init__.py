"""Are gradients right, and which rule serves which node?

May import `reverse`, `parameters`, `prepare`, `pages`, `tables` and opset.
"""
