"""docs/mutants.md: what the tests found, and the survivors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .draw import ROOMS
from .mutations import KINDS, Mutation
from .reasons import REASONS
from .runner import Verdict

_HEAD = """# Mutants

How well the tests guard the code. `make mutants` changes one fact, threshold or formula and runs the tests that reach
it. It does so at 300 random places, equally many from each room and of each kind: an entry removed from a table of
names (`entry`), another number in a table or a condition, a comparison, an operator (`arithmetic`: + and -, `op.Mul`
and `op.Div`), a sign, an axis, min and max (`extreme`), a dropped `not`, a refusal that never refuses. Earlier
survivors are always among them. A mutant that fails no test is a survivor: either a test is missing, or the change
affects no result.

Tests run in a copy of the tree, in processes forked from one that has imported NumPy, ONNX and onnxruntime.
build/mutants/contexts records which test runs which function (`ARGS=--record` records again). Tests named after an
entry removed from a table, or in a file named after the module, run first, then the fastest that run the changed
function. The first failure kills a mutant; a minute of processor time without one makes a survivor. Kernels that the
change reaches are compiled again.
`ARGS="--count 100 --seed 1"` draws others, `ARGS="--only converters/rules"` limits them to one place, and `ARGS=--again`
continues a run, survivors first. Tests of speed, of processes, of the command line and of texts do not run.
"""


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def reason(mutation: Mutation) -> str:
    """Why no test could kill it, if that is so."""
    return REASONS.get((f"{mutation.path}:{mutation.scope}", mutation.what), "")


def write(path: Path, results: list[tuple[Mutation, Verdict]], missing: list[str], heading: str) -> None:
    """The page of a run."""
    drawn, killed = Counter(), Counter()
    for mutation, verdict in results:
        drawn[mutation.room, mutation.kind] += 1
        killed[mutation.room, mutation.kind] += verdict.killed
    lines = [_HEAD, "## Outcome", "", heading, "", "Killed, of those drawn:", ""]
    lines += [_row("", *ROOMS, "all"), _row("---", *["---:"] * (len(ROOMS) + 1))]
    for kinds, name in (*(((kind,), kind) for kind in KINDS), (KINDS, "all")):
        cells = []
        for rooms in (*((room,) for room in ROOMS), ROOMS):
            keys = [(room, kind) for room in rooms for kind in kinds]
            cells.append(f"{sum(killed[k] for k in keys)} / {sum(drawn[k] for k in keys)}")
        lines.append(_row(name, *cells))
    left = [m for m, verdict in results if not verdict.killed]
    lines += ["", "## Survivors", ""]
    for title, chosen in (
        ("No test can kill these:", [m for m in left if reason(m)]),
        ("These are open:", [m for m in left if not reason(m)]),
    ):
        if chosen:
            lines += [title, "", _row("where", "what", "line", "reason"), _row(*["---"] * 4)]
            for m in sorted(chosen, key=lambda m: m.key):
                source = m.source.replace("|", "\\|")
                lines.append(_row(f"`{m.path}` {m.scope}", m.what.replace("|", "\\|"), f"`` {source} ``", reason(m)))
            lines.append("")
    if missing:
        lines += ["Earlier survivors that the code no longer has: " + "; ".join(missing) + ".", ""]
    path.write_text("\n".join(lines).rstrip() + "\n")
