"""Updates of many tensors in one pass over memory."""
