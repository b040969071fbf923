"""Search random models for gradients that are wrong: `make search ARGS="--hours 2 --seed 7"`, docs/search.md.

Every model goes to every oracle of `oracles.py`, in a forked process whose end is a finding too. What is found is shrunk
and kept as `<seed>-<number>-<oracle>.onnx` with its feeds in .npz; --replay FILE examines such a file again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from tests.fuzz import pool
from tests.search.draw import drawn
from tests.search.dress import dress
from tests.search.generate import Feeds
from tests.search.oracles import ORACLES, examine, kind
from tests.search.shrink import shrunk

SECONDS, BYTES = 400.0, 8 * 2**30  # of one model with all its oracles, shrinking included
SHRUNK = 2  # findings of one kind that are made small


def dressed(seed: int, number: int) -> tuple[ModelProto, Feeds]:
    """The model of a number, as a file has it."""
    return dress(*drawn(seed, number), np.random.default_rng([seed, number, 1]))


def attempt(seed: int, number: int, keep: Path, oracles: Iterable[str] = ORACLES) -> str:
    """What all oracles say of a model, a line of the log for each; the findings in short."""
    model, feeds = dressed(seed, number)
    failures: list[str] = []
    with (keep / f"{seed}.jsonl").open("a") as log:
        for name in oracles:
            print(json.dumps([number, name, "begun"]), file=log, flush=True)
            verdict, text = examine(model, feeds, name)
            print(json.dumps([number, name, verdict, text[:400]]), file=log, flush=True)
            if verdict == "wrong":
                failures.append(f"{name}: {kind(text)}")
                _keep(model, feeds, name, text, keep / f"{seed}-{number}-{name}")
    return f"untyped: {failures[0]}" if failures else "answered"


def _keep(model: ModelProto, feeds: Feeds, name: str, text: str, path: Path) -> None:
    alike = kind(text)[:50]
    kinds = path.parent / "kinds.txt"
    known = kinds.read_text().splitlines() if kinds.exists() else []

    def shows(model: ModelProto, feeds: Feeds) -> bool:
        verdict, other = examine(model, feeds, name)
        return verdict == "wrong" and kind(other)[:50] == alike

    if known.count(alike) < SHRUNK and "TimeoutError" not in alike:
        model, feeds = shrunk(model, feeds, shows)
        with kinds.open("a") as file:
            print(alike, file=file)
    path.with_suffix(".onnx").write_bytes(model.SerializeToString())
    np.savez(path.with_suffix(".npz"), **{f"{n}": v for n, v in enumerate(feeds.values())}, names=np.array(list(feeds)))


def replay(path: Path) -> int:
    model = onnx.load(path)
    with np.load(path.with_suffix(".npz")) as arrays:
        feeds = {str(name): arrays[str(n)] for n, name in enumerate(arrays["names"])}
    answers = {name: examine(model, feeds, name) for name in ORACLES}
    print(onnx.printer.to_text(model))
    for name, (verdict, text) in answers.items():
        print(f"{name}: {verdict} {text}")
    return int(any(verdict == "wrong" for verdict, _ in answers.values()))


def summary(log: Path) -> str:
    """How many models, and what each oracle said how often, refusals by their sentences."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = [line for line in lines if line[2] != "begun"]
    verdicts = Counter((name, verdict) for _, name, verdict, _ in done)
    refusals = Counter(kind(text) for _, _, verdict, text in done if verdict == "refused")
    rows = [f"{len({line[0] for line in lines})} models"]
    for name in ORACLES:
        tally = ", ".join(f"{n} {v}" for (o, v), n in sorted(verdicts.items()) if o == name)
        rows.append(f"{name}: {tally}")
    return "\n".join([*rows, "refused:", *(f"{n} {text}" for text, n in refusals.most_common())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--models", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    parser.add_argument("--keep", type=Path, default=Path("search-findings"), help="the folder for logs and findings")
    parser.add_argument("--only", nargs="+", choices=list(ORACLES), default=list(ORACLES), help="these oracles")
    parser.add_argument("--replay", type=Path)
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay)
    keep: Path = arguments.keep
    keep.mkdir(parents=True, exist_ok=True)
    until, bad = time.monotonic() + 3600 * arguments.hours, 0
    tried = 0
    numbers = range(arguments.first, arguments.first + arguments.models)
    for answer in pool.run(
        numbers, lambda n: attempt(arguments.seed, n, keep, arguments.only), seconds=SECONDS, size=BYTES
    ):
        tried += 1
        if answer.what.startswith(pool.BAD):
            bad += 1
            print(f"{arguments.seed} {answer.case}: {answer.what}", flush=True)
        if time.monotonic() > until:
            break
    print(summary(keep / f"{arguments.seed}.jsonl"))
    print(f"search: seed {arguments.seed}, {tried} models, {bad} with findings")
    return int(bad > 0 or not tried)


if __name__ == "__main__":
    sys.exit(main())
