"""The same training here and in PyTorch: python -m tests.fidelity [--only NAME] [--again] [--report] [--jobs N]

Each subject, a module, is exported, trained here and trained in PyTorch in a process of its own. Answers are kept in
build/fidelity, so that a run that was stopped goes on where it was; --again judges anew. Writes docs/fidelity.md when
nothing was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fidelity.report import LEFT, write

BUILD, PAGE = Path("build/fidelity"), Path("docs/fidelity.md")
TIMEOUT = 300


def _names() -> list[str]:
    """In a process of its own: modules need torch."""
    code = "import json; from tests.fidelity.catalog import names; print(json.dumps(names()))"
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def _judged(name: str, *, again: bool) -> list[dict[str, Any]]:
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.*") if again else ():
        path.unlink()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    while True:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.fidelity.case", name, str(folder)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                env=environment,
                check=False,
            )
            well, words = done.returncode == 0, f"{done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
        except subprocess.TimeoutExpired:
            well, words = False, f"not done after {TIMEOUT} s"
        started = next(folder.glob("*.started"), None)
        if well or started is None:
            break
        mode, _, exporter = started.stem.partition("-")
        answer = {"subject": name, "kind": "", "mode": mode, "exporter": exporter, "verdict": "wrong"}
        started.with_suffix(".json").write_text(json.dumps({**answer, "stage": "process", "sentence": words}))
        started.unlink()
    if not well:
        print(f"{name}: the module itself does not train in PyTorch: {words}", flush=True)
    return _kept(name)


def _kept(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((BUILD / name).glob("*.json"))]


def _line(answer: dict[str, Any]) -> str:
    sentence = " ".join(f"{answer['stage']}: {answer['sentence']}".split())
    more = "" if answer["verdict"] == "right" else f" {sentence[:250]}"
    return f"{answer['subject']} ({answer['exporter']}, {answer['mode']}): {answer['verdict']}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the name of the subjects")
    parser.add_argument("--again", action="store_true", help="judge again what has been judged")
    parser.add_argument("--report", action="store_true", help="only write docs/fidelity.md of what has been judged")
    parser.add_argument("--jobs", type=int, default=2, help="subjects at a time")
    options = parser.parse_args()
    names = [name for name in _names() if options.only in name]
    answers: list[dict[str, Any]] = []
    lacking: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        judge = _kept if options.report else lambda name: _judged(name, again=options.again)
        for name, found in zip(names, pool.map(judge, names), strict=True):
            answers += found
            lacking += [] if found else [name]
            for answer in () if options.report else found:
                print(_line(answer), flush=True)
    counts = Counter(str(answer["verdict"]) for answer in answers)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if not options.only:
        write(PAGE, answers, lacking)
    return 1 if lacking or LEFT & set(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
