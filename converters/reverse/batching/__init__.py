"""A further leading axis for chosen values of a graph: a rule for each operator that has one, else a Scan over rows."""
