"""Reverse-mode differentiation of one graph: the walk, the table of rules, what a rule sees and emits."""
