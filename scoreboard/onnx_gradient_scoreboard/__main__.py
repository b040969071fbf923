"""`python -m onnx_gradient_scoreboard`: all cells, or those of --producer and --case, which one command reproduces.

--build makes the environments of the producers; --environments says where they are. Answers of a whole run go to
RESULTS/<producer>.jsonl, --write makes the pages of what lies there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from onnx_gradient_scoreboard.environments import build, interpreter, versions
from onnx_gradient_scoreboard.producers import PRODUCERS
from onnx_gradient_scoreboard.report import write
from onnx_gradient_scoreboard.runner import ProducerError, Worker, cases, chosen, results

_HELD = {"right", "sentence", "not asked"}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m onnx_gradient_scoreboard", description=__doc__)
    parser.add_argument("--producer", action="append", choices=list(PRODUCERS), help="default: all that are installed")
    parser.add_argument("--case", action="append", help="a name, see --list; default: all")
    parser.add_argument("--list", action="store_true", help="the cases, with operator, attributes and opsets")
    parser.add_argument("--build", action="store_true", help="make the environments first, those that are missing")
    parser.add_argument("--environments", type=Path, default=Path(".venv-scoreboard"))
    parser.add_argument("--results", type=Path, default=Path("build/scoreboard"))
    parser.add_argument(
        "--each", type=int, default=4, metavar="N", help="cases of an operator at most, 0: all; default: 4"
    )
    parser.add_argument("--pages", action="store_true", help="ask nobody: the pages of the results that are there")
    parser.add_argument(
        "--hold", action="append", default=[], choices=list(PRODUCERS), metavar="PRODUCER",
        help="end with 1 unless all that it was asked is right or refused by a sentence",
    )  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="scoreboard.md and scoreboard.html there")
    given = parser.parse_args()
    if given.list:
        for name, case in cases().items():
            print(f"{name}: {case.operator} <{case.attributes()}> at opset {case.opsets[0]} to {case.opsets[-1]}")
        return 0
    unknown = set(given.case or ()) - set(cases() if given.case else ())
    if unknown:
        parser.error(f"expected names of cases, got {', '.join(sorted(unknown))}. --list names them")
    workers = []
    for producer in [] if given.pages else [PRODUCERS[name] for name in given.producer or PRODUCERS]:
        if given.build:
            build(producer, given.environments)
        python = interpreter(producer, given.environments)
        if python is None:
            print(f"{producer.name}: not in {given.environments}. --build installs it", file=sys.stderr)
        else:
            workers.append(Worker(producer, python))
    names = given.case or (chosen(given.each) if workers else [])
    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        ask = partial(_ask, names=names, folder=None if given.case else given.results)
        answers = dict(zip((worker.producer.name for worker in workers), pool.map(ask, workers), strict=True))
    if given.write:
        write(given.results, given.write)
    failed = [name for name, counts in answers.items() if counts is None]
    held = [] if given.pages else [name for name in given.hold if name in (given.producer or PRODUCERS)]
    failed += [name for name in held if not answers.get(name) or set(answers[name] or ()) - _HELD]
    total = sum(counts.total() for counts in answers.values() if counts)
    print(
        f"scoreboard: {len(answers)} producers, {total:,} questions; not as it should be: {', '.join(failed) or 'none'}"
    )
    return int(bool(failed))


def _ask(worker: Worker, names: list[str], folder: Path | None) -> Counter[str] | None:
    """All questions about these cases, into a file of a folder, or printed; the verdicts, None if it does not start."""
    producer, counts = worker.producer, Counter[str]()
    path = (folder or Path(tempfile.gettempdir())) / f"{producer.name.replace(', ', '-')}.jsonl"
    part = path.with_suffix(f".{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("w", encoding="utf-8") as file:
            print(json.dumps({"producer": producer.name, "versions": versions(producer, worker.python)}), file=file)
            for result in results(worker, names):
                counts[result.verdict] += 1
                print(json.dumps(asdict(result)), file=file, flush=True)
                if folder is None:
                    print(
                        f"{producer.name}, {result.case}@{result.opset}, {result.question}: {result.verdict}.",
                        result.text,
                    )
        if folder is not None:
            part.replace(path)
            print(f"{producer.name}: {dict(counts)}", flush=True)
    except ProducerError as e:
        print(e, file=sys.stderr)
        return None
    else:
        return counts
    finally:
        part.unlink(missing_ok=True)
        worker.close()


if __name__ == "__main__":
    sys.exit(main())
