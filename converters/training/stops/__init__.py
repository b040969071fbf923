"""Where training lets no gradient through and the file says nothing: estimators, rows of padding.

May import what the room itself may, nothing of it.
"""
