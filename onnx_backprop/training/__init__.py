"""`Trainer`, its loop, and what a training reads and leaves behind.

`trainer` runs the steps, `buffers` hold the state, `ranks` are several trainers. Rooms: `data`, the rows that a step is
fed, `callbacks`, what acts on a training, and `reports`, what people read. May import `converters`, `ort_ops`, `opset`
and `distributed`.
"""
