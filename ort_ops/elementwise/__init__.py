"""Elementwise formulas in one pass over memory: updates of many tensors, chains of operators."""
