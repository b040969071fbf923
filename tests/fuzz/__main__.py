"""Mutated files at every public door: python -m tests.fuzz --models 50000 --npz 20000 --checkpoints 20000 --seed 1

A case is a number: `--seed` and it say which file is changed how, and which door opens it. Each runs in a forked process
with 10 seconds and 2 GB to itself. What ends otherwise than in an answer or an error of ours is printed, and its file
written into `--keep`; `--replay DOOR FILE` tries one again, in this process.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz import pool, targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for group in targets.GROUPS:
        parser.add_argument(f"--{group}", type=int, default=0, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--step", type=int, default=1, help="every how many-th case, to share the work")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-findings"), help="where files are written that break something"
    )
    parser.add_argument("--replay", nargs=2, metavar=("DOOR", "FILE"))
    arguments = parser.parse_args()
    if arguments.replay:
        door, path = arguments.replay
        targets.TARGETS[door].call(Path(path))
        return 0
    bad = sum(_group(group, arguments) for group in targets.GROUPS)
    return 1 if bad else 0


def _group(group: str, arguments: argparse.Namespace) -> int:
    """Run the cases of a group; how many were bad."""
    count, seed = vars(arguments)[group], arguments.seed
    if not count:
        return 0
    for door in targets.GROUPS[group]:
        targets.TARGETS[door].files()  # once, before any process begins

    def step(number: int) -> str:
        door, _, content = targets.case(group, seed, number)
        return targets.attempt(door, content)

    counts: Counter[str] = Counter()
    bad = 0
    for answer in pool.run(range(arguments.first, count, arguments.step), step):
        kind = answer.what.partition(":")[0]
        counts[answer.what if kind == "refused" else kind] += 1
        if kind in pool.BAD:
            bad += 1
            door, start, content = targets.case(group, seed, answer.case)
            arguments.keep.mkdir(parents=True, exist_ok=True)
            path = arguments.keep / f"{group}-{seed}-{answer.case}-{door}"
            path.write_bytes(content)
            print(f"{group} {answer.case}, {door} of {start!r}: {answer.what} ({path})", flush=True)
    print(f"{group}: {sum(counts.values())} cases, seed {seed}: {pool.summary(counts)}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
