"""Survivors that no test could kill: what changes is no result. By the function or the name, and what was changed."""

_AGAIN = (
    "onnxruntime 1.31 rounds what is compared and its largest entry, or neither; with Max and Min, only one of them"
)

REASONS: dict[tuple[str, str], str] = {
    ("converters/reverse/widened.py:_AGAIN", "without 'GlobalMaxPool'"): _AGAIN,
    ("converters/reverse/widened.py:_AGAIN", "without 'ReduceMax'"): _AGAIN,
    ("converters/reverse/widened.py:_AGAIN", "without 'ReduceMin'"): _AGAIN,
    ("ort_ops/convolution/winograd/plan.py:_thread_bytes", "192 bytes less"): (
        "no more than the room for alignment, where a vector has 16 floats; 4096 bytes less are found"
    ),
}
