"""The same doors and changes, led by coverage: python -m tests.fuzz.guided [DOOR …] --runs 20000 --seed 1

Needs atheris. Each door has a process of its own, which ends at the first finding; the file that led to it is kept in
fuzz-findings/. Inputs that reached new lines are kept in build/fuzz/<door>, from which the next run goes on.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["onnx_backprop"]):
    from tests.fuzz import pool, targets

FINDINGS = Path("fuzz-findings")


class FindingError(Exception):
    """What no door may do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("doors", nargs="*", choices=[[], *targets.TARGETS], metavar="DOOR", help="default: all")
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        _guide(arguments.doors[0], arguments.runs, arguments.seed)  # which ends the process
    bad = 0
    for door in arguments.doors or targets.TARGETS:
        options = ["--alone", "--runs", str(arguments.runs), "--seed", str(arguments.seed)]
        command = [sys.executable, "-m", "tests.fuzz.guided", door, *options]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        progress = [line for line in lines if "cov: " in line or "FindingError" in line or "ERROR: libFuzzer" in line]
        print(
            f"{door}: {'clean' if done.returncode == 0 else 'found something'}; {progress[-1:] or lines[-1:]}",
            flush=True,
        )
        bad += done.returncode != 0
    return 1 if bad else 0


def _guide(door: str, runs: int, seed: int) -> None:
    target = targets.TARGETS[door]
    corpus = Path("build/fuzz") / door
    for folder in (corpus, FINDINGS):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in target.files().items():
        (corpus / name).write_bytes(content)

    def one(content: bytes) -> None:
        answer = targets.attempt(door, content)
        kind = answer.partition(":")[0]
        if kind in pool.BAD and not (kind == "big" and target.runs):
            raise FindingError(answer)

    def change(content: bytes, size: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):  # of what is no such file any more
                return target.change(content, rng)[:size]
        return atheris.Mutate(content, size)

    limits = [f"-runs={runs}", f"-seed={seed}", f"-timeout={int(pool.SECONDS)}", "-rss_limit_mb=4096", "-max_len=65536"]
    arguments = [sys.argv[0], *limits, f"-artifact_prefix={FINDINGS}/{door}-", str(corpus)]
    atheris.Setup(arguments, one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
