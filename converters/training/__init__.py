"""From gradients to a training graph: losses, optimizers, the step, and the models that are inside one.

`training_graph` puts the pieces together, `result` is what comes out. Rooms: `losses`, `metrics` behind its outputs,
`update` behind its gradients, `stops` in its forward pass, `rewrites` of the two passes, `standard` for the forms of
training that ONNX defines.
May import `recompute`, `reverse`, `parameters`, `prepare` and what they build on; nothing that runs a model.
"""
