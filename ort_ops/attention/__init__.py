"""Attention without its matrix of probabilities: blocks of scores in a cache, in the forward pass and again behind it."""
