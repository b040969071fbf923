"""docs/fidelity.md, from the answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Answers = Sequence[dict[str, Any]]
LEFT = {"wrong", "refused"}  # what must not be
VERDICTS = ("right", "warned", "wrong", "refused", "not exported", "not in the file")

HEAD = """# The same training

Whether an exported module trains as the module does in PyTorch. `make fidelity` exports small modules, one for each kind of parameter,
constant, statistic and stop, and architectures with random weights; trains each file here and each module in PyTorch; and writes this page.
Exporters have their defaults: TorchScript (in train mode with `training=TRAINING` and `do_constant_folding=False`), dynamo, and
`ob.torch.export`. So has the training here, except `loss`, `optimizer` and, in train mode, `training_mode=True`.

| Verdict | Meaning |
|---|---|
| right | All of these hold. set: the trained numbers are those of the parameters that require a gradient and influence the loss, whatever their names and orders. gradients: those of the first step are PyTorch's in float64 to a thousandth, tensor by tensor. sgd, adamw: 20 losses of SGD with momentum 0.9 and of AdamW agree with PyTorch's to 1e-4, or to 1e-3 if PyTorch's float32 is itself that far from its float64. patterns: with `frozen=` for the first module and a tenth of the rate for the second, by module names, the same tensors move to the same values, and a frozen module keeps its statistics |
| warned | Other numbers are trained, and an `OnnxBackpropWarning` names every such tensor |
| wrong | None of this |
| refused | One of our errors |
| not exported | The exporter fails |
| not in the file | The exporter leaves out what the training depends on, such as `detach`; nothing is judged |

Names that end in `_perturbed` are modules whose constructor leaves zeros or ones; they are trained from other values.

Five trainings measure how far PyTorch's float32 is from its float64: of the module, and of four whose parameters differ from it by a factor
of 2⁻²², a few units in the last place. It is 1e-7 in most trainings and may be 1e-3: AdamW makes a whole step of a gradient that is zero but
for rounding, and if the input of a Relu is rounded to the other side of 0, the gradients of one step differ. A training uses the largest
rate at which the five agree to 2e-5, of 0.03, 0.003 and 0.0003 for SGD and 0.001 and 0.0001 for AdamW, or the rate at which they agree best.
Gradients and final values may differ by four times the worst of the five, plus a thousandth of a gradient and a tenth of the way of a value.
A gradient that is zero in exact arithmetic, such as that of the bias of keys before a softmax, may differ by 1e-6 of the largest gradient,
if in float64 it is below 1e-12 of that.
"""


def write(path: Path, answers: Answers, lacking: Sequence[str]) -> None:
    """lacking: the subjects without an answer."""
    path.write_text("\n".join([HEAD, *_counts(answers), *_lacking(lacking), *_cases(answers)]).rstrip() + "\n")


def _counts(answers: Answers) -> Iterable[str]:
    subjects = {a["subject"] for a in answers}
    yield f"{len(subjects)} modules, {len(answers)} cases.\n"
    yield from _table("exporter, mode", answers, lambda a: f"{a['exporter']}, {a['mode']}")
    yield from _table("kind", answers, lambda a: str(a["kind"]))


def _table(head: str, answers: Answers, row: Any) -> Iterable[str]:
    yield f"| {head} | {' | '.join(VERDICTS)} |"
    yield "|---|" + "---:|" * len(VERDICTS)
    for name in dict.fromkeys(sorted(row(a) for a in answers) if head != "kind" else map(row, answers)):
        counts = Counter(a["verdict"] for a in answers if row(a) == name)
        yield f"| {name} | {' | '.join(str(counts[v] or '') for v in VERDICTS)} |"
    yield ""


def _lacking(names: Sequence[str]) -> Iterable[str]:
    if names:
        yield f"Not judged: {', '.join(names)}.\n"


def _cases(answers: Answers) -> Iterable[str]:
    for verdict in ("wrong", "refused", "warned", "not exported", "not in the file"):
        selected = [a for a in answers if a["verdict"] == verdict]
        if selected:
            yield f"## {verdict.capitalize()}\n"
            yield from _sentences(selected)


def _sentences(answers: Answers) -> Iterable[str]:
    """Every sentence of a subject once, with the exporters and modes that it is said of."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for a in answers:
        sentence = " ".join(f"{a['stage']}: {a['sentence']}".removeprefix(": ").split())
        short = sentence if len(sentence) < 320 else sentence[:300] + " …"
        grouped.setdefault((a["subject"], short), []).append(f"{a['exporter']} {a['mode']}")
    for (subject, sentence), cases in grouped.items():
        shown = re.sub(r"([*_<>|\[\]])", r"\\\1", sentence)
        yield f"- **{subject}** ({', '.join(cases)}): {shown}"
    yield ""
