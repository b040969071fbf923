"""Training graphs that hold less at once: what backward reads of forward is computed again where it costs least.

May import `reverse`, `prepare`, `tables` and opset.
"""
