"""Which tensors of a file are parameters: what the file says, then where they are read, then their values.

May import `prepare`, `tables` and `pages`; the rules, the backward pass and the doors build on it.
"""
