"""Mutated files at every public door: python -m tests.fuzz --models 50000 --npz 20000 --checkpoints 20000 --seed 1

"slow to run" and "big to run" is what a model itself asks for, where a door runs it.
--kernels 1000: calls of our operators, most of them wrong, with undeclared shapes (`calls`).

A case is a number: `--seed` and it say which file is changed how, and which door opens it. Each runs in a forked process
with 10 seconds of processor and 2 GB to itself. What ends otherwise than in an answer or an error of ours is printed, and its file
written into `--keep`; `--replay DOOR FILE` tries one again, in this process.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import pool, targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for group in (*targets.GROUPS, "kernels"):
        parser.add_argument(f"--{group}", type=int, default=0, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--step", type=int, default=1, help="every how many-th case, to share the work")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="the folder for what breaks something")
    parser.add_argument("--replay", nargs=2, metavar=("DOOR", "FILE"))
    arguments = parser.parse_args()
    if arguments.replay:
        door, path = arguments.replay
        targets.TARGETS[door].call(Path(path))
        return 0
    asked = {group: n for group in (*targets.GROUPS, "kernels") if (n := vars(arguments)[group])}
    if not asked:
        parser.error("expected a number of cases, as --models 5000")
    bad = sum(_files(group, arguments) for group in targets.GROUPS) + _calls(arguments)
    summary = ", ".join(f"{n:,} {group}" for group, n in asked.items())
    print(f"fuzz: seed {arguments.seed}, {summary}: {bad} bad")
    return int(bad > 0)


def _files(group: str, arguments: argparse.Namespace) -> int:
    """Run the cases of a group; how many were bad."""
    seed = arguments.seed
    if vars(arguments)[group]:
        for door in targets.GROUPS[group]:
            targets.TARGETS[door].files()  # once, before any process begins

    def step(number: int) -> str:
        door, _, content = targets.case(group, seed, number)
        return targets.attempt(door, content)

    def keep(number: int) -> str:
        door, start, content = targets.case(group, seed, number)
        arguments.keep.mkdir(parents=True, exist_ok=True)
        path = arguments.keep / f"{group}-{seed}-{number}-{door}"
        path.write_bytes(content)
        return f"{door} of {start!r}, {path}"

    def runs(number: int) -> bool:
        return targets.TARGETS[targets.case(group, seed, number)[0]].runs

    return _group(group, arguments, step, keep, runs)


def _calls(arguments: argparse.Namespace) -> int:
    if not arguments.kernels:
        return 0
    from tests.fuzz import calls  # which loads the native kernels

    seed = arguments.seed
    return _group(
        "kernels", arguments, lambda n: calls.attempt(calls.drawn(seed, n)), lambda n: repr(calls.drawn(seed, n))
    )


def _group(
    group: str,
    arguments: argparse.Namespace,
    step: Callable[[int], str],
    keep: Callable[[int], str],
    runs: Callable[[int], bool] = lambda _: False,
) -> int:
    counts: Counter[str] = Counter()
    bad = 0
    for answer in pool.run(range(arguments.first, vars(arguments)[group], arguments.step), step):
        kind = answer.what.partition(":")[0]
        if kind in ("slow", "big") and runs(answer.case):
            kind = f"{kind} to run"
        counts[answer.what if kind == "refused" else kind] += 1
        if kind in pool.BAD:
            bad += 1
            print(f"{group} {answer.case}: {answer.what} ({keep(answer.case)})", flush=True)
    if counts:
        summary = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        print(f"{group}: {counts.total()} cases, seed {arguments.seed}, {bad} bad: {summary}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
