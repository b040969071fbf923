"""What becomes of a graph that has its gradients: sums in stages, half precision, what is computed again or early.

May import `names`, `modes` and the scale of the loss of this room, and what the room itself may.
"""
