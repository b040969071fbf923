"""docs/field.md, from the verdicts."""

from __future__ import annotations

import math
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

Verdicts = list[dict[str, Any]]
SAME = ("yes", "warned", "no")
SECONDS, TIMES, MORE = 5.0, 3.0, 500.0  # what a conversion may take: of a processor; of memory, in files and megabytes

HEAD = """# The field

Which real models train as they are: files from packages, exports from PyTorch by both exporters, models fitted by scikit-learn, and what
optimisers, float16 and quantisation make of them. `make field` makes and judges each in its own process and writes this page. All options
have their defaults, except `loss`, `optimizer="adamw"` and, with several outputs, `prediction`.

| Column or verdict | Meaning |
|---|---|
| **right** | The gradients of the loss with respect to all parameters, those of `backward` with respect to all parameters and float inputs, and the first updates of AdamW agree with PyTorch in float64, which runs the same file node by node (`tests/field/twin.py`); if it lacks an operator, with differences of the forward. After ten updates the losses and the state are finite. The exported model runs in onnxruntime and computes what the trainer does |
| **refused** | An error at conversion names node and operator. |
| gap | The largest ‖g - r‖ / ‖r‖ of a gradient g and its reference r, at the values that onnxruntime computed, so that rounding puts no element on the other side of a kink. Up to 1e-3 is right; in float16, up to 0.1 more than rounding of the forward changes r. Blank if differences judge |
| trained | The share of the numbers of the module, or else of the file, that are parameters |
| same parameters as the module | yes: the numbers trained by default are those of the module's parameters that require a gradient and influence the loss, whatever their names, shapes and orders. warned: others are trained, and an `OnnxBackpropWarning` names each such tensor, or counts it. no: there is no such warning. Blank if there is no module, the file is quantised, or nothing is trained. float16 files are compared with the module's numbers, rounded. If a tool has folded a BatchNormalization into a weight, a warning must say so |
| convert s, peak MB | One call of `training_graph`: seconds of processor, and the peak memory of the whole process |
| steps/s, PyTorch, times | Steps of AdamW, here and in PyTorch eager on one thread or all, whichever is faster. PyTorch runs the module; if there is none, the file node by node, in italics |

Steps are repeated only briefly and other work may have used the same cores: these rates show what is slow. docs/performance.md measures what
is fast.
"""


def write(path: Path, verdicts: Verdicts, unmade: list[tuple[str, str, str]], left: int = 0) -> None:
    """left: how many files of the list have not been judged."""
    partly = [f"Not the whole list: {left} files of it have not been judged in this run.\n"] if left else []
    parts = [
        HEAD,
        *partly,
        *_summary(verdicts),
        *_table(verdicts),
        *_refusals(verdicts),
        *_rest(verdicts),
        *_differing(verdicts),
        *_unmade(unmade),
    ]
    path.write_text("\n".join(parts).rstrip() + "\n")


def _summary(verdicts: Verdicts) -> Iterable[str]:
    counts = Counter(str(v["verdict"]) for v in verdicts)
    names = ("right", "refused", "wrong", "traceback", "NaN", "undecided")
    yield f"Written on {date.today()} ({platform.system()}, {platform.machine()})."
    yield f"{len(verdicts)} files: " + ", ".join(f"**{counts[name]} {name}**" for name in names) + "."
    slow = [v for v in verdicts if v.get("seconds", 0) > SECONDS]
    large = [v for v in verdicts if _excess(v) > 0]
    converted = [v for v in verdicts if not math.isnan(v.get("seconds", math.nan))]
    if converted:
        longest = max(v["seconds"] for v in converted)
        most = max(_multiple(v) for v in converted)
        yield (
            f"Conversions above {SECONDS:g} s of processor: {len(slow)} (longest {longest:.1f} s); above "
            f"{TIMES:g} times the file and {MORE:g} MB: {len(large)} (the most: {most:.1f} times and {MORE:g} MB)."
        )
    plain = [v for v in verdicts if v.get("module") and v["variant"] == "as is"]
    ratios = [r for v in plain if (r := _ratio(v)) and not math.isnan(r)]
    if ratios:
        yield (
            f"Steps per second beside PyTorch eager, {len(ratios)} files as they are, with a module: geometric mean "
            f"{statistics.geometric_mean(ratios):.2f} times, median {statistics.median(ratios):.2f}, the least {min(ratios):.2f}."
        )
    unclear = [v for v in verdicts if v["verdict"] == "refused" and not v.get("clear", True)]
    same = Counter(str(v["same"]) for v in verdicts if v.get("same"))
    if same:
        yield "Same parameters as the module: " + ", ".join(f"{same[word]} {word}" for word in SAME) + "."
    yield f"Refusals that name no operator and node or tensor of the file: {len(unclear)}."
    yield ""


def _multiple(v: dict[str, Any]) -> float:
    return max(0.0, (v["megabytes"] - MORE) / v["file_megabytes"])


def _excess(v: dict[str, Any]) -> float:
    if math.isnan(v.get("megabytes", math.nan)):
        return 0.0
    return v["megabytes"] - TIMES * v["file_megabytes"] - MORE


def _ratio(v: dict[str, Any]) -> float:
    rate, theirs = v.get("rate", math.nan), v.get("torch_rate", math.nan)
    return rate / theirs if theirs and not math.isnan(theirs) else math.nan


def _table(verdicts: Verdicts) -> Iterable[str]:
    yield "| model | from | variant | verdict | gap | parameters | trained | same parameters as the module | convert s | file MB | peak MB | steps/s | PyTorch | times |"
    yield "|---|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|"
    last = None
    for v in verdicts:
        name, origin = (v["source"], v["origin"]) if v["source"] != last else ("", "")
        last = v["source"]
        verdict = v["verdict"] if v["verdict"] in ("right", "refused") else f"**{v['verdict']}**"
        share = v.get("share", math.nan)
        mark = "" if v.get("module") else "*"
        ratio = _ratio(v)
        cells = [
            name,
            origin,
            v["variant"],
            verdict,
            _number(v.get("error"), ".0e"),
            str(v.get("parameters") or ""),
            "" if math.isnan(share) else f"{100 * share:.0f} %",
            "**no**" if v.get("same") == "no" else v.get("same", ""),
            _number(v.get("seconds"), ".1f"),
            _number(v.get("file_megabytes"), ".1f"),
            _number(v.get("megabytes"), ".0f"),
            _number(v.get("rate"), ".3g"),
            _number(v.get("torch_rate"), ".3g"),
            "" if math.isnan(ratio) else f"{mark}{ratio:.2f}{mark}",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _number(value: float | None, how: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, how)


def _refusals(verdicts: Verdicts) -> Iterable[str]:
    refused = [v for v in verdicts if v["verdict"] == "refused"]
    if refused:
        yield "## Refused\n"
        yield from _sentences(refused)


def _rest(verdicts: Verdicts) -> Iterable[str]:
    rest = [v for v in verdicts if v["verdict"] not in ("right", "refused")]
    if rest:
        yield "## Neither right nor refused\n"
        yield from _sentences(rest)


def _differing(verdicts: Verdicts) -> Iterable[str]:
    for same, head in (("no", "Other parameters, and no warning"), ("warned", "Other parameters, and a warning")):
        these = [v for v in verdicts if v.get("same") == same]
        if these:
            yield f"## {head}\n"
            yield from _sentences(these, "differing")


def _sentences(verdicts: Verdicts, key: str = "sentence") -> Iterable[str]:
    """Every sentence once, with the files that it is said of."""
    grouped: dict[str, list[str]] = {}
    for v in verdicts:
        sentence = " ".join(str(v[key]).split())
        grouped.setdefault(sentence if len(sentence) < 420 else sentence[:400] + " …", []).append(
            f"{v['source']} ({v['variant']})"
        )
    for sentence, names in grouped.items():
        shown = re.sub(r"([*_<>|])", r"\\\1", sentence)
        yield f"- {shown}  "
        yield f"  {', '.join(names)}"
    yield ""


def _unmade(unmade: list[tuple[str, str, str]]) -> Iterable[str]:
    if unmade:
        yield "## Not made\n"
        yield "The other tool fails on the file:\n"
        for name, variant, words in unmade:
            yield f"- {name} ({variant}): {' '.join(words.split())[:160]}"
