"""The same training here and in PyTorch: python -m tests.fidelity [--only NAME] [--again] [--report] [--jobs N]

Each subject, a module, is exported, trained here and trained in PyTorch in a process of its own. Answers are kept in
build/fidelity, so that a run that was stopped goes on where it was; --again judges anew, as does another package.
Writes docs/fidelity.md when nothing was left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fidelity.case import MODES
from tests.fidelity.case import main as main_of_case
from tests.fidelity.exporters import exporters
from tests.fidelity.report import LEFT, write
from tests.support.kept_answers import drop_stale, package_digest

BUILD, PAGE = Path("build/fidelity"), Path("docs/fidelity.md")
TIMEOUT, CASES = 600, len(MODES) * len(exporters())
SERVER = multiprocessing.get_context("forkserver")  # which imports what takes seconds once


def _judged(name: str, *, again: bool) -> list[dict[str, Any]]:
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.*") if again else ():
        path.unlink()
    while True:
        process = SERVER.Process(target=main_of_case, args=(name, folder))
        process.start()
        process.join(TIMEOUT)
        code = process.exitcode
        words = f"not done after {TIMEOUT} s" if code is None else f"the process ended with {code}"
        process.kill()
        process.join()
        started = next(folder.glob("*.started"), None)
        if started is None:
            break
        mode, _, exporter = started.stem.partition("-")
        answer = {"subject": name, "kind": "", "mode": mode, "exporter": exporter, "verdict": "wrong"}
        started.with_suffix(".json").write_text(json.dumps({**answer, "stage": "process", "sentence": words}))
        started.unlink()
    answers = _kept(name)
    if len(answers) < CASES:
        print(f"{name}: the module does not train in PyTorch: {words}", flush=True)
    return answers


def _kept(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((BUILD / name).glob("*.json"))]


def _line(answer: dict[str, Any]) -> str:
    sentence = " ".join(f"{answer['stage']}: {answer['sentence']}".split())
    more = "" if answer["verdict"] == "right" else f" {sentence[:250]}"
    return f"{answer['subject']} ({answer['exporter']}, {answer['mode']}): {answer['verdict']}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of the names of the subjects, separated by commas")
    parser.add_argument("--again", action="store_true", help="judge again what has been judged")
    parser.add_argument("--report", action="store_true", help="only write docs/fidelity.md of what has been judged")
    parser.add_argument("--jobs", type=int, default=2, help="subjects at a time")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    SERVER.set_forkserver_preload(["tests.fidelity.preloaded"])
    from tests.fidelity.catalog import names as all_names  # which needs torch

    if not options.report:
        drop_stale(BUILD, "*/*.*", package_digest())
    names = [name for name in all_names() if any(part in name for part in options.only.split(","))]
    answers: list[dict[str, Any]] = []
    lacking: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        judge = _kept if options.report else lambda name: _judged(name, again=options.again)
        for name, judged in zip(names, pool.map(judge, names), strict=True):
            answers += judged
            lacking += [name] if len(judged) < CASES else []
            for answer in () if options.report else judged:
                print(_line(answer), flush=True)
    counts = Counter(str(answer["verdict"]) for answer in answers)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    if not options.only:
        write(PAGE, answers, lacking)
    print(f"fidelity: {summary or 'nothing judged'}; {len(lacking)} of {len(names)} modules lack an answer")
    return 1 if not counts or lacking or LEFT & set(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
