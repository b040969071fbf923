"""What grids of nodes share: sessions, counts of what is right and what is not, and their text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob


def session_on(model: ModelProto, *, ours: bool = False) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if ours:
        return ob.session(model, kernels=None, session_options=options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def reason(message: str, most: int) -> str:
    """An error of onnxruntime without its numbers, in at most so many characters."""
    text = re.sub(r".*(Status Message|Error\]|FAIL :|exception:)", "", message.replace("\n", " "))
    return re.sub(r"\s+", " ", re.sub(r"[-{]?\d[\d,}]*", "#", text)).strip(" :")[:most]


@dataclass
class Report:
    """Counts of one operator or family: right, refused by onnxruntime or by us (with reasons), and what is wrong."""

    right: int = 0
    not_run: Counter[str] = field(default_factory=Counter)
    refused: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.right + len(self.wrong) + self.not_run.total() + sum(map(len, self.refused.values()))

    def add(self, case: Any, verdict: str | None) -> None:
        if verdict is None:
            self.right += 1
        else:
            self.wrong.append(f"{case}: {verdict}")


def check_batch(
    batch: Sequence[Any],
    verdicts: Callable[[Sequence[Any]], Sequence[str | None]],
    reports: Mapping[str, Report],
    family: str,
    most: int,
) -> None:
    """Add what is wrong with each case, None where nothing is, to the report that its attribute `family` names."""
    try:
        for case, verdict in zip(batch, verdicts(batch), strict=True):
            reports[getattr(case, family)].add(case, verdict)
    except Exception:  # noqa: BLE001 - one of them; each alone tells which
        for case in batch:
            counts = reports[getattr(case, family)]
            try:
                counts.add(case, *verdicts([case]))
            except ob.OnnxBackpropError as e:
                counts.refused[f"{type(e).__name__}: {reason(e.message, most)}"].append(str(case))
            except Exception as e:  # noqa: BLE001 - a run that fails where the forward runs
                counts.wrong.append(f"{case}: failed: {e}")


def show(reports: Mapping[str, Report]) -> str:
    """The reports as text."""
    lines = []
    for family, counts in reports.items():
        refused = sum(len(names) for names in counts.refused.values())
        lines.append(
            f"{family}: {counts.right} right, {len(counts.wrong)} wrong, {refused} refused, "
            f"{counts.not_run.total()} not run by onnxruntime"
        )
        lines += [f"  not run: {n} × {why}" for why, n in counts.not_run.most_common()]
        lines += [f"  refused: {len(names)} × {why}, as {names[0]}" for why, names in counts.refused.items()]
        lines += [f"  WRONG: {what}" for what in counts.wrong[:20]]
    return "\n".join(lines)
