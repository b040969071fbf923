"""The rows that a training is fed: batches of them, their order, and arrays in files larger than memory.

May import `distributed`, `opset`, pages and tables of `converters`, and the errors of `divergence`.
"""
