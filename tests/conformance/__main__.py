"""`make conformance`: the whole grids on every route, the table of operators and the backbones, written to docs/conformance.md.

A section that is checked whole takes the place it has in the page; the others stay. Ends with 1 if anything is wrong.

The page holds counts only, so it changes when what we do changes, and not with the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import onnxruntime

from onnx_backprop.opset import KERNELS
from tests.conformance import backbones, conv, derivatives, operators, resize, vmap

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
GRIDS = {"Conv and ConvTranspose": conv, "Resize": resize}
TITLES = (*GRIDS, "Operators", "Derivatives", "Many rows at once", "Backbones")

HEAD = """# Conformance

Which gradients are right, counted by `make conformance`, which writes this page. Each configuration of the first two grids is one node. It
goes through the whole converter, and its gradients are compared with onnxruntime's own forward, by the adjoint identity <F(x), dy> =
<x, dx> = <w, dw> or, if X can be an identity matrix, in every entry. Some configurations have all dimensions known at conversion, the others
none. "Not run" counts those that onnxruntime refuses to run forward, with its reasons below each table. [Readings](readings.md) says what is
followed where onnxruntime departs from the text of ONNX.
"""


class Counts(Protocol):
    """What a grid reports of one operator or family."""

    right: int
    not_run: Counter[str]
    refused: Mapping[str, list[str]]
    wrong: list[str]


def section(title: str, reports: dict[str, dict[str, Counts]]) -> str:
    """One grid as a table over its families, on all routes."""
    lines = [
        f"## {title}",
        "",
        "| | route | right | wrong | refused by us | not run |",
        "|---|---|---:|---:|---:|---:|",
    ]
    reasons: Counter[str] = Counter()
    refusals: dict[str, str] = {}
    for kernels, families in reports.items():
        for family, counts in families.items():
            refused = sum(len(names) for names in counts.refused.values())
            lines.append(
                f"| {family} | {kernels} | {counts.right} | {len(counts.wrong)} | {refused} | {counts.not_run.total()} |"
            )
            refusals |= {why: names[0] for why, names in counts.refused.items()}
            if kernels == next(iter(reports)):
                reasons += counts.not_run
        right = sum(counts.right for counts in families.values())
        lines.append(f"| **all** | {kernels} | **{right}** | {sum(len(c.wrong) for c in families.values())} | | |")
    lines += ["", *(f"- not run, {n} times: {why}" for why, n in sorted(reasons.items()))]
    lines += [f"- refused by us: {why}, as {name}" for why, name in sorted(refusals.items())]
    return "\n".join(lines) + "\n"


def table_of_operators() -> tuple[str, list[str]]:
    """The section of the operators, and what is wrong."""
    rows = operators.report()
    return operators.section(rows), [what for row in rows.values() for what in row.wrong]


def networks() -> tuple[str, list[str]]:
    """The section of the backbones, and what is wrong."""
    outcomes = {}
    for name in backbones.NAMES:
        outcomes[name] = backbones.examine(name)
        print(name, outcomes[name], flush=True)
    wrong = [f"{name}: {outcome}" for name, outcome in outcomes.items() if not outcome.right]
    return backbones.section(outcomes), wrong


def table_of_derivatives() -> tuple[str, list[str]]:
    """The section of the modes and orders, and what is wrong."""
    counts, wrong = derivatives.report(operators.cases())
    return derivatives.section(counts), wrong


def table_of_rows() -> tuple[str, list[str]]:
    """The section of `vmap`, and what is wrong."""
    counts, wrong = vmap.report(operators.cases())
    return vmap.section(counts), wrong


SINGLE = {"Operators": table_of_operators, "Derivatives": table_of_derivatives, "Backbones": networks}
SINGLE["Many rows at once"] = table_of_rows


def write(sections: Mapping[str, str]) -> None:
    """Put sections into the page, each in its place."""
    known = PAGE.read_text(encoding="utf-8").split("\n## ")[1:] if PAGE.exists() else []
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in known} | dict(sections)
    with tempfile.NamedTemporaryFile("w", dir=PAGE.parent, delete=False, encoding="utf-8") as file:
        file.write("\n".join([HEAD, *(parts[title] for title in TITLES if title in parts)]))
    os.replace(file.name, PAGE)
    PAGE.chmod(0o644)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS), help="routes")
    parser.add_argument("--grid", nargs="+", default=list(TITLES), choices=TITLES, help="sections of the page")
    arguments = parser.parse_args()
    onnxruntime.set_default_logger_severity(4)  # thousands of warnings of a deprecated coordinate mode
    sections: dict[str, str] = {}
    wrong: list[str] = []
    for title in arguments.grid:
        if title not in GRIDS:
            sections[title], failures = SINGLE[title]()
            wrong += failures
            print(sections[title], flush=True)
            continue
        reports = {}
        for kernels in arguments.kernels:
            start = time.perf_counter()
            reports[kernels] = GRIDS[title].report(kernels)
            print(f"{title}, route {kernels}: {time.perf_counter() - start:.0f} s", flush=True)
            wrong += [what for counts in reports[kernels].values() for what in counts.wrong]
        sections[title] = section(title, reports)
        print(sections[title], flush=True)
    print(*(f"WRONG: {what}" for what in wrong[:50]), sep="\n")
    if set(arguments.kernels) == set(KERNELS):
        write(sections)
    print(f"conformance: {len(wrong)} wrong, in {', '.join(sections)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
