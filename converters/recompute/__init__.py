"""Training graphs that hold less at once: what backward reads of the forward part is computed again where it costs least."""
