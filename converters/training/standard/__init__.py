"""Forms of training that ONNX defines itself: `TrainingInfoProto`, and the operators of `ai.onnx.preview.training`.

May import all of `training`; nothing in it imports this room but `result`, when it reads such a file.
"""
