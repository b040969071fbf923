"""The operators of the domain, one module each; `registry` reads them off the folder.

May import everything of opset but `functions`.
"""
