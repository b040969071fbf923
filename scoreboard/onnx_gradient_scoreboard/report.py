"""The pages: tables in Markdown, and every cell in one file of HTML that needs nothing else."""

from __future__ import annotations

import datetime
import html
import json
import os
import platform
import re
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from onnx_gradient_scoreboard.producers import PRODUCERS, Producer
from onnx_gradient_scoreboard.questions import KINDS
from onnx_gradient_scoreboard.runner import Result
from onnx_gradient_scoreboard.verdicts import VERDICTS

TITLES = {
    "right": "right", "wrong": "silently wrong", "sentence": "refused with a reason", "badly": "failed otherwise",
    "crashed": "crashed", "slow": "too slow", "not asked": "not asked",
}  # fmt: skip
MARKS = {"right": "r", "wrong": "w", "sentence": "s", "badly": "b", "crashed": "c", "slow": "l", "not asked": "-"}
ASKED = {
    "inputs": "gradients by inputs", "weights": "gradients by weights", "symbolic": "gradients, all lengths symbolic",
    "jvp": "Jacobian-vector products", "second": "Hessian-vector products",
}  # fmt: skip


@dataclass
class Row:
    """A producer with its answers."""

    producer: Producer
    versions: dict[str, str]
    results: list[Result]

    def counts(self, kind: str = "", operator: str = "") -> Counter[str]:
        """How many of each verdict, of one question, of one operator."""
        chosen = (r for r in self.results if kind in ("", r.question) and operator in ("", r.operator))
        return Counter(r.verdict for r in chosen)

    @property
    def version(self) -> str:
        """Of the producer itself."""
        return self.versions.get(self.producer.distribution, "")


def rows(folder: Path) -> list[Row]:
    """What lies in a folder of results, by the share of right answers among those asked for."""
    table = []
    for path in sorted(folder.glob("*.jsonl")):
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        results = [Result(**line) for line in lines]
        table.append(Row(PRODUCERS[head["producer"]], head["versions"], results))
    return sorted(table, key=lambda row: -_share(row.counts()))


def _share(counts: Counter[str]) -> float:
    asked = counts.total() - counts["not asked"]
    return counts["right"] / asked if asked else 0


def write(results: Path, folder: Path) -> None:
    """scoreboard.md and scoreboard_cells.html of the results."""
    table = rows(results)
    _replace(folder / "scoreboard.md", markdown(table))
    _replace(folder / "scoreboard_cells.html", page(table))


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


HEAD = """# Scoreboard: gradients of ONNX models

Written by `make scoreboard` on {date} ({machine}): {cases} cases of {operators} operators and {networks} whole models
at opset 13 to 23, {producers} producers, {cells} answers judged. It shows which producers of gradients for ONNX models
are right, and where.

A case is one of ONNX's own node tests, its values moved off ties, at every opset at which onnxruntime agrees with
ONNX. The reference is finite differences of the forward pass, in float64 of onnxruntime's kernels or of onnx's
reference evaluator, in float32 if neither exists; if two step sizes disagree, the question is dropped. The tolerance
is that of ONNX's test, relative to the largest entry; second derivatives get ten times as much.

- **Right**: every number. If ONNX calls an operator not differentiable, a refusal is right too.
- **Silently wrong**: other numbers and no error.
- **Refused with a reason**: an error that says what is not handled.
- **Failed otherwise**: any other error, or a produced graph that onnxruntime refuses.

Each producer is asked only what it documents, at the last opset that it documents; importers, which read files as
exporters write them, by the first input. To repeat a cell, `pip install ./scoreboard` and run
`python -m onnx_gradient_scoreboard --producer NAME --case CASE`.

The rules are in `scoreboard/onnx_gradient_scoreboard/verdicts.py`; what each producer is asked, and why, in
`producers.py`; its adapter of about twenty lines in `adapters/`. If you find a verdict unfair, please tell us.
[scoreboard_cells.html](scoreboard_cells.html) has every cell with the text of every refusal.
"""


def markdown(table: list[Row]) -> str:
    """The tables."""
    names = sorted({r.operator for row in table for r in row.results} - {"whole models"})
    everything = {r.case for row in table for r in row.results}
    networks = {r.case for row in table for r in row.results if r.operator == "whole models"}
    judged = sum(row.counts().total() - row.counts()["not asked"] for row in table)
    head = HEAD.format(
        date=datetime.date.today().isoformat(), machine=f"{platform.system()}, {platform.machine()}", cells=judged,
        cases=len(everything) - len(networks), operators=len(names), networks=len(networks), producers=len(table),
    )  # fmt: skip
    lines = ["## All answers", "", f"| producer | version | {' | '.join(TITLES.values())} |"]
    lines.append("|---|---|" + "---:|" * len(TITLES))
    for row in table:
        cells = [str(row.counts()[v]) for v in TITLES]
        lines.append(f"| {row.producer.name} | {row.version} | {' | '.join(cells)} |")
    lines += ["", "## By question", "", "Right answers of all questions asked; silently wrong ones in bold.", ""]
    lines += ["| producer | " + " | ".join(ASKED[k] for k in KINDS) + " |", "|---|" + "---:|" * len(KINDS)]
    lines += [f"| {row.producer.name} | {' | '.join(_cell(row.counts(k)) for k in KINDS)} |" for row in table]
    lines += ["", "## By operator", "", 'All questions. "all 12": 12 of 12 are right.', ""]
    lines += ["| operator | " + " | ".join(row.producer.name for row in table) + " |", "|---|" + "---:|" * len(table)]
    for name in [*names, "whole models"]:
        lines.append(f"| {name} | {' | '.join(_cell(row.counts(operator=name)) for row in table)} |")
    lines += ["", "## Silently wrong", ""]
    for row in table:
        wrong = defaultdict[str, list[str]](list)
        for r in row.results:
            if r.verdict == "wrong":
                wrong[r.case].append(r.question)
        listed = "; ".join(f"`{case}` ({', '.join(kinds)})" for case, kinds in wrong.items()) or "none"
        lines.append(f"- **{row.producer.name}**: {listed}")
    lines += ["", "## What each was asked", ""]
    for row in table:
        used = ", ".join(f"{n} {v}" for n, v in row.versions.items())
        passes = "".join(f" Not asked of {op}: {why}." for op, why in row.producer.passes.items())
        lines.append(
            f"- **{row.producer.name}**: of {len({r.case for r in row.results})} cases {', '.join(row.producer.asked)}."
            f" Documented in {row.producer.basis}.{passes} ({used})"
        )
    missing = [name for name in PRODUCERS if name not in {row.producer.name for row in table}]
    lines += [f"- **{name}** was not run." for name in missing]
    return head + "\n" + "\n".join(lines) + "\n"


def _cell(counts: Counter[str]) -> str:
    asked = counts.total() - counts["not asked"]
    if not asked:
        return ""
    right = f"all {asked}" if counts["right"] == asked else f"{counts['right']} of {asked}"
    return right + (f", **{counts['wrong']} wrong**" if counts["wrong"] else "")


def page(producers: list[Row]) -> str:
    """Every cell: a letter each, its words at a touch. Letters and texts are one table of JSON, drawn by a script."""
    cases: dict[str, list] = {}
    texts: dict[str, int] = {}
    for number, row in enumerate(producers):
        for r in row.results:
            case = cases.setdefault(
                r.case, [r.case, r.operator, r.attributes, [["-"] * len(KINDS) for _ in producers], {}]
            )
            kind = KINDS.index(r.question)
            case[3][number][kind] = MARKS[r.verdict]
            if r.verdict != "right" or not r.text.endswith("of what is allowed"):
                case[4].setdefault(number, {})[kind] = texts.setdefault(r.text[:200], len(texts))
    for case in cases.values():
        case[3] = ["".join(letters) for letters in case[3]]
    data = {
        "producers": [f"{row.producer.name}" for row in producers], "kinds": KINDS, "texts": list(texts),
        "cases": list(cases.values()),
    }  # fmt: skip
    table = "".join(
        f"<tr><td>{html.escape(row.producer.name)} {row.version}" + "".join(f"<td>{row.counts()[v]}" for v in VERDICTS)
        for row in producers
    )
    heads = "".join(f'<th><b class="{MARKS[v]}">{MARKS[v]}</b> {TITLES[v]}' for v in VERDICTS)
    head = f"{datetime.date.today().isoformat()}. Five letters each: {', '.join(ASKED.values())}. Tap for details."
    parts = {"HEAD": head, "TABLE": f"<tr><th>producer{heads}{table}"}
    parts["DATA"] = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    text = (files(__package__ or "") / "page.html").read_text(encoding="utf-8")
    return re.sub("@(HEAD|TABLE|DATA)@", lambda producers: parts[producers[1]], text)
