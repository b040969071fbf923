"""What users add from outside: gradients and expansions of operators, and arithmetic of values in their functions.

May import the rest of `reverse`, `prepare` and opset.
"""
