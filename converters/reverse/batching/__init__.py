"""A further axis for chosen values of a graph: a rule for each operator that has one, else a Scan over rows.

May import: what a gradient rule sees and emits, function bodies, opset; not models, nor gradient rules.
"""
