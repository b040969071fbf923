"""Tables of text, as the command and the reports print them."""

from collections.abc import Sequence

from onnx_backprop.opset.core.errors import printable


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> list[str]:
    """Lines of columns as wide as their widest cell; the columns of the given `numbers` stand to the right."""
    lines = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in lines) for n in range(len(header))]
    aligned = [f"{'>' if n in numbers else '<'}{width}" for n, width in enumerate(widths)]
    return ["  ".join(f"{cell:{a}}" for cell, a in zip(row, aligned, strict=True)).rstrip() for row in lines]
