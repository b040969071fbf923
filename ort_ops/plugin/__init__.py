"""A training graph's kernels and plans as a library of custom operators, which needs no Python.

`requests` finds out what a session asks for, `library` makes plans, machine code and tables of it and links them with
`runtime.c`, which stands in the place of what Python does in `runtime.bridge`.

May import elementwise kernels, the compiler, the runtime and the table of kernels, and opset.
"""
