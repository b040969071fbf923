"""From what a user hands over to a graph that can be differentiated, and back to files.

May import opset.
"""
