"""Curves as a picture, by matplotlib: those of the page, on axes of the same kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_backprop.converters.pages import Points, scale_of
from onnx_backprop.converters.prepare.writing.files import check_writable
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.training.reports.history import Record, Records

_SCALES = {"logarithmic": "log", "linear": "linear"}


def check_plot(path: str | Path) -> None:
    """Before there is anything to draw.

    Errors: KernelError without matplotlib, InvalidArgumentError where the picture cannot be written.
    """
    check_writable(path)
    formats = _figure(1).canvas.get_supported_filetypes()
    if _format(path) not in formats:
        raise InvalidArgumentError(f"plot: expected a name that ends in .{', .'.join(sorted(formats))}, got {path}")


def _format(path: str | Path) -> str:
    return Path(path).suffix[1:].lower() or "png"


def _figure(count: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise KernelError(f"the plot needs matplotlib: {e}. Install it with `pip install matplotlib`") from e
    return Figure(figsize=(8, 1.5 + 3 * count), layout="constrained")


def draw(records: list[Record], path: str | Path) -> None:
    """Draw losses, metrics and the learning rate over the steps, one above the other; the suffix chooses the format.

    Errors: those of `check_plot`.
    """
    _draw(path, Records(records).curves(), "step", "linear")


def plot_curves(path: str | Path, curves: Mapping[str, Points], x: str, y: str, *, across: str = "linear") -> None:
    """Draw curves over titled axes. across: "linear" or "logarithmic", the horizontal one. Errors: as `check_plot`."""
    _draw(path, {y: curves}, x, across)


def _draw(path: str | Path, panels: Mapping[str, Mapping[str, Points]], x: str, across: str) -> None:
    figure = _figure(len(panels))
    for axes, (y, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for name, points in curves.items():
            if not points:
                continue
            style = "o-" if len(points) < 50 else "-"
            axes.plot(*zip(*points, strict=True), style, markersize=3, linewidth=0.8, label=name)
        scale = scale_of([value for points in curves.values() for _, value in points])
        axes.set_yscale(_SCALES[scale])
        axes.set_xscale(_SCALES[across])
        axes.set_ylabel(f"{y} ({scale})")
        axes.set_xlabel(x if across == "linear" else f"{x} ({across})")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(loc="upper right")
    try:
        with replacing(path) as (file,):
            figure.savefig(file, format=_format(path))
    except (OSError, ValueError) as e:
        raise InvalidArgumentError(f"cannot write the plot {path}: {e}") from e
