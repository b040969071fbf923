"""Losses, optimizers and steps: from gradients to a training graph."""
