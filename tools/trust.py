"""Run long targets of the Makefile, what became of each into docs/trust.md: `make trust ARGS="--only fuzz kill"`.

A target ends with lines that sum it up, and with a status that is not 0 where something is wrong: both make its row.
Each run gets a SEED that no run had. Words behind `--` are the targets' own: `ARGS="--only fuzz -- --models 5000"`.
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
PACKAGE = ("onnx_backprop", "onnx_backprop_command.py", "converters", "opset", "ort_ops", "models", "scoreboard")
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
HEAD = """# What was run, on which commit

The last run of each target that takes longer than `make test` may. `make trust` writes this page. "Not run" means not
yet run by it; "passed" is exit status 0; "3 older" means that three commits to the package have come since (commits to
tests, tools and pages alone do not count); "changed" means with uncommitted changes.

| Target | Outcome | Summary | Date | Commit | Took | Details |
|---|---|---|---|---|---|---|
"""
_PYTEST = re.compile(r"=*\s*((?:\d+ [a-z]+,? ?)+ in \d[\d.]*s.*?)\s*=*")


def git(*words: str) -> str:
    """What git answers; nothing where it knows no such commit."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def outcome(target: str, log: str, code: int) -> str:
    """The lines that begin with the target's name, and those in which pytest counts; else the last, as of a failure."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("make")]
    texts = {x: match[1] if (match := _PYTEST.fullmatch(x)) else x.removeprefix(f"{target}: ") for x in lines}
    summary = [text for line, text in texts.items() if text != line]
    last = [texts[lines[-1]]] if lines and (code or not summary) else []
    return "; ".join(dict.fromkeys([*summary, *last]))[:400].replace("|", "/")


def run(target: str, words: str) -> list[str]:
    """The cells of a row; the log goes to build/trust/."""
    LOGS.mkdir(parents=True, exist_ok=True)
    shown = f'make {target} ARGS="{words}"' if words else f"make {target}"
    print(f"===== {shown}", flush=True)
    commit = git("rev-parse", "--short", "HEAD") + (", changed" if git("status", "--porcelain", ":!docs") else "")
    start, day = time.time(), f"{datetime.now(UTC):%Y-%m-%d}"
    command = [os.environ.get("MAKE", "make"), "--no-print-directory", target, f"ARGS={words}", f"SEED={int(start)}"]
    with (LOGS / f"{target}.log").open("w+", encoding="utf-8", errors="replace") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        log.seek(0)
        says, minutes = outcome(target, log.read(), code), (time.time() - start) / 60
    print(f"{target}: status {code}: {says}", flush=True)
    took = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
    verdict = f"**failed**, status {code}" if code else "passed"
    return [f"`{shown}`", verdict, says, day, commit, took, DETAILS[target]]


def rows() -> dict[str, list[str]]:
    """What the page has, by target."""
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `make ")]
    return {row[0].split()[1].strip("`"): row for row in cells}


def write(known: dict[str, list[str]]) -> None:
    lines = []
    for target, details in DETAILS.items():
        row = known.get(target, [f"`make {target}`", "not run", "", "", "", "", details])
        if commit := row[4]:
            words = [word for word in commit.split(", ") if not word.endswith("older")]
            older = git("rev-list", "--count", f"{words[0]}..HEAD", "--", *PACKAGE) or "many"
            row[4] = ", ".join(words if older == "0" else [*words, f"{older} older"])
        lines.append(f"| {' | '.join(row)} |\n")
    draft = PAGE.with_suffix(f".{os.getpid()}")
    draft.write_text(HEAD + "".join(lines), "utf-8")
    draft.replace(PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make trust", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=DETAILS, default=list(DETAILS), metavar="TARGET")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    failed = 0
    for target in parser.parse_args(sys.argv[1:end]).only:
        row = run(target, " ".join(sys.argv[end + 1 :]))
        failed += row[1] != "passed"
        write(rows() | {target: row})
    print(f"trust: {failed} failed; logs in {LOGS.relative_to(ROOT)}/")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
