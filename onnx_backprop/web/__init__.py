"""Training graphs in onnxruntime for JavaScript: what a browser or Node needs, a page that trains, a server for it.

May import `training`, `converters` and opset.
"""
