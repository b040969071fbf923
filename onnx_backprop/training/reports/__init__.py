"""What people read of a training: the record of every step, where the time goes, one page of both.

May import what `training` may; `profiling` runs a trainer of its own.
"""
