"""Run long targets of the Makefile and write what became of each into docs/trust.md: `make trust ARGS="--only fuzz kill"`.

A target ends with a line that says what came out, and with a status that is not 0 where something is wrong: both make its
row. Rows of targets that are not run stay, and say by how many commits they are older. Words behind `--` are the targets'
own: `make trust ARGS="--only fuzz -- --models 5000 --seed 8"`. Ends with 1 where a target does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, LOGS = ROOT / "docs" / "trust.md", ROOT / "build" / "trust"
DETAILS = {
    "conformance": "[conformance.md](conformance.md)",
    "field": "[field.md](field.md)",
    "fidelity": "[fidelity.md](fidelity.md)",
    "fuzz": "[security.md](security.md)",
    "kill": "`tests/onnx_backprop/training/test_kill.py`",
    "interrupt": "`tests/interrupted.py`",
    "distributed": "[distributed.md](distributed.md)",
    "runtimes": "[runtimes.md](runtimes.md)",
    "processors": "[processors.md](processors.md)",
    "browser": "[web.md](web.md)",
    "devices": "[devices.md](devices.md)",
    "plugin": "[plugin.md](plugin.md)",
    "doors": "`tests/doors/`",
    "torch": "[pytorch.md](pytorch.md)",
    "quantized": "[quantized.md](quantized.md)",
    "search": "[search.md](search.md)",
    "endurance": "`tests/ort_ops/guarded.py`, `sessions_in_memory.py` there, `tests/onnx_backprop/training/long.py`",
    "scoreboard": "[scoreboard.md](scoreboard.md)",
}
NEW_SEEDS = ("fuzz", "search")  # get a seed that no run had, the seconds since 1970, where none is given
USUAL = {"fuzz": "--models 50000 --npz 20000 --checkpoints 20000 --kernels 5000", "search": "--hours 1"}
HEAD = """# What was run, on which commit

Written by `make trust`, a row for each target that takes longer than `make test` may. A row is the last run of its target:
**passed** is exit status 0, the outcome is the target's own last line. "3 older" is a run that many commits before the
last one of this page, not counting those that change pages alone; "changed": files were changed that were not committed.

| Target | Outcome | In its words | Date | Commit | Took | Details |
|---|---|---|---|---|---|---|
"""
_PYTEST = re.compile(r"=*\s*((?:\d+ [a-z]+,? ?)+ in \d[\d.]*s.*?)\s*=*")


def git(*words: str) -> str:
    """What git answers; nothing where it knows no such commit."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def outcome(log: str) -> str:
    """The last line, and those in which pytest counts; not what make says of a failure."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("make")]
    counts = [match[1] for line in lines[:-1] if (match := _PYTEST.fullmatch(line))]
    last = lines[-1] if lines else "nothing was printed"
    match = _PYTEST.fullmatch(last)
    return "; ".join([*counts, match[1] if match else last])[:300].replace("|", "/")


def run(target: str, words: list[str]) -> list[str]:
    """The cells of a row; the log goes to build/trust/ and to the screen."""
    if target in NEW_SEEDS and "--seed" not in words:
        words = [*(words or USUAL[target].split()), "--seed", str(int(time.time()))]
    LOGS.mkdir(parents=True, exist_ok=True)
    told = f'{target} ARGS="{" ".join(words)}"' if words else target
    print(f"===== make {told}", flush=True)
    commit = git("rev-parse", "--short", "HEAD") + (", changed" if git("status", "--porcelain", ":!docs") else "")
    start = time.monotonic()
    with (LOGS / f"{target}.log").open("w+", encoding="utf-8", errors="replace") as log:
        command = [os.environ.get("MAKE", "make"), "--no-print-directory", target, f"ARGS={' '.join(words)}"]
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        log.seek(0)
        says = outcome(log.read())
    minutes = (time.monotonic() - start) / 60
    print(f"{target}: status {code}, {minutes:.1f} minutes: {says}", flush=True)
    verdict = f"**failed**, status {code}" if code else "passed"
    took = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
    return [f"`make {told}`", verdict, says, f"{datetime.now(UTC):%Y-%m-%d}", commit, took, DETAILS[target]]


def rows() -> dict[str, list[str]]:
    """What the page has, by target."""
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `make ")]
    return {row[0].split()[1].strip("`"): row for row in cells}


def write(known: dict[str, list[str]]) -> None:
    lines = []
    for target, details in DETAILS.items():
        row = known.get(target, [f"`make {target}`", "not run", "", "", "", "", details])
        if row[4]:
            commit, *changed = row[4].split(", ")
            older = git("rev-list", "--count", f"{commit}..HEAD", "--", ":!docs")
            row[4] = ", ".join([commit, *(c for c in changed if c == "changed"), *([f"{older or 'many'} older"] * (older != "0"))])
        lines.append(f"| {' | '.join(row)} |")
    draft = PAGE.with_suffix(f".{os.getpid()}")
    draft.write_text(HEAD + "\n".join(lines) + "\n", "utf-8")
    draft.replace(PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DETAILS, default=list(DETAILS), metavar="TARGET")
    own, words = sys.argv[1:], list[str]()
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    targets: list[str] = parser.parse_args(own).only
    failed = 0
    for target in targets:
        row = run(target, words)
        failed += row[1] != "passed"
        write(rows() | {target: row})
    print(f"trust: {len(targets)} targets, {failed} failed; {PAGE.relative_to(ROOT)}, logs in {LOGS.relative_to(ROOT)}/")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
