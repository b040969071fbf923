"""The step behind the gradients: functions that update tensors, accumulation, clipping, the scale of the loss.

May import `optimizers`, `modes`, `names` and `rewrites` of this room, and what the room itself may.
"""
