"""The results as a table (Markdown), a plot (PNG) and data (JSON)."""

from __future__ import annotations

import json
import os
import tempfile
from math import exp, log
from pathlib import Path
from typing import Any

FAMILIES = {
    "convolution": ("Conv",),
    "interpolation": ("nearest", "linear", "cubic"),
    "layers": ("MaxPool", "AveragePool", "Relu", "BatchNormalization", "Softmax", "LayerNormalization"),
}
PYTORCH = ("PyTorch", "PyTorch channels_last")
BEFORE = "before"  # the native kernels of another checkout
Row = dict[str, Any]


def write(folder: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Write results.json, results.md and results.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    write_text(folder / "results.md", table(machine, rows))
    plot(folder / "results.png", rows)
    print(table(machine, rows))


def write_text(path: Path, text: str) -> None:
    """Under a temporary name first, so that an interrupted run loses nothing."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def best_of_pytorch(row: Row) -> float | None:
    """The faster of PyTorch's layouts."""
    return min((row["seconds"][name] for name in PYTORCH if name in row["seconds"]), default=None)


def ratio(row: Row, contender: str, peer: str = "PyTorch") -> float | None:
    """How many times faster a contender is than a peer; of PyTorch, its best layout."""
    best = best_of_pytorch(row) if peer == "PyTorch" else row["seconds"].get(peer)
    seconds = row["seconds"].get(contender)
    return None if best is None or seconds is None else best / seconds


def roofline(row: Row, machine: dict[str, Any]) -> float:
    """The least time the machine needs: to compute, or to read and write every tensor once."""
    return max(row["flops"] / machine["multiply_add_per_second"], row["bytes"] / machine["copy_bytes_per_second"])


def geometric_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def table(machine: dict[str, Any], rows: list[Row]) -> str:
    """Milliseconds of everybody; ratios above 1 mean that we are faster."""
    contenders = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    peers = [("native", BEFORE)] if BEFORE in contenders else []
    peers += [(name, "PyTorch") for name in ("native", "onnx") if name in contenders and PYTORCH[0] in contenders]
    header = ["shape", "gradient", *contenders, "roofline", *(f"{name} / {peer}" for name, peer in peers)]
    lines = [
        "# Results",
        "",
        f"{machine['processor']}, {machine['threads']} threads, "
        f"{machine['multiply_add_per_second'] / 1e9:.0f} GFLOP/s, "
        f"{machine['copy_bytes_per_second'] / 1e9:.1f} GB/s copying; "
        + ", ".join(f"{name} {number}" for name, number in machine["versions"].items()),
        "",
        f"Milliseconds ({machine['statistic']}). The last columns say how many times faster we are; PyTorch stands for "
        "its best layout.",
        "",
        "| " + " | ".join(header) + " |",
        "|---" * 2 + "|---:" * (len(header) - 2) + "|",
    ]
    for row in rows:
        cells = [row["case"], row["gradient"]]
        cells += [_milliseconds(row["seconds"].get(name)) for name in contenders]
        cells.append(_milliseconds(roofline(row, machine)))
        cells += [_times(ratio(row, *pair)) for pair in peers]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_summary(rows, peers)]
    return "\n".join(lines) + "\n"


def _summary(rows: list[Row], peers: list[tuple[str, str]]) -> list[str]:
    lines = []
    for name, peer in peers:
        for family, kinds in FAMILIES.items():
            ratios = [r for row in rows if row["case"].startswith(kinds) and (r := ratio(row, name, peer)) is not None]
            if ratios:
                lines.append(
                    f"- {name}, {family}: {geometric_mean(ratios):.2f} times the speed of {peer} on geometric mean, "
                    f"{min(ratios):.2f} to {max(ratios):.2f}"
                )
    return lines


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot(path: Path, rows: list[Row]) -> None:
    """One bar per contender and shape, relative to PyTorch's best layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if best_of_pytorch(row) is not None]
    if not shown:
        return
    names = [n for n in ("native", "onnx", "numpy", "onnxsim") if any(n in row["seconds"] for row in shown)]
    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(shown) + 1.5), layout="constrained")
    height = 0.8 / max(len(names), 1)
    for n, name in enumerate(names):
        values = [ratio(row, name) or 0 for row in shown]
        axes.barh([i + n * height for i in range(len(shown))], values, height=height, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(
        [i + 0.4 for i in range(len(shown))], [f"{row['case']} {row['gradient']}" for row in shown], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to PyTorch's best layout")
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
