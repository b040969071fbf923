"""`make mutants`: python -m tests.mutants [--count 300] [--seed 0] [--only PATH] [--again] [--record]"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from . import page, runner
from .contexts import Contexts, test_files
from .draw import drawn, sources
from .mutations import Mutation
from .runner import Job, Process, Verdict

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"


def recorded(trees: list[Path], kernels: Path) -> None:
    """Record the files of tests that have no record yet."""
    folder = BUILD / "contexts"
    folder.mkdir(exist_ok=True)
    waiting = [f for f in test_files(ROOT) if not (folder / f"{f.replace('/', '-')}.json").is_file()]
    running: dict[Path, tuple[str, Process]] = {}
    if waiting:
        print(f"which test runs which function: {len(waiting)} files of tests", flush=True)
    while waiting or running:
        for tree in trees:
            if tree in running:
                _, process = running[tree]
                if process.ended() is not None:
                    del running[tree]
                elif time.monotonic() > process.end:
                    process.kill()
                    del running[tree]
            elif waiting:
                file = waiting.pop()
                running[tree] = file, runner.record(tree, file, folder, kernels, 400.0)
        time.sleep(0.05)


def tested(trees: list[Path], mutations: list[Mutation], contexts: Contexts, kernels: Path, limit: float, kept: Path):
    """The verdicts, as they come; each is written down, so that `--again` can go on."""
    waiting, running = list(reversed(mutations)), dict[Path, Job]()
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    done, start = 0, time.monotonic()
    try:
        while waiting or running:
            for tree in trees:
                if tree in running:
                    job = running[tree]
                    if verdict := job.poll():
                        del running[tree]
                        done += 1
                        known[job.mutation.key] = asdict(verdict)
                        kept.write_text(json.dumps(known, indent=0))
                        word = f"killed by {verdict.by}" if verdict.killed else f"SURVIVES {verdict.tests} tests"
                        where = f"{job.mutation.path}:{job.mutation.line} {job.mutation.what}"
                        print(
                            f"{done} of {len(mutations)}, {time.monotonic() - start:.0f} s: {where}: {word}", flush=True
                        )
                elif waiting:
                    running[tree] = Job(tree, waiting.pop(), contexts, kernels, limit)
            time.sleep(0.02)
    finally:
        for job in running.values():
            job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATH", help="mutants of files whose path begins so; no page")
    parser.add_argument(
        "--again", action="store_true", help="go on: without the mutants that are killed, or survive for a reason"
    )
    parser.add_argument("--record", action="store_true", help="record anew which test runs which function")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of tests for a mutant, twice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    arguments = parser.parse_args()
    mutations, missing = drawn(ROOT, arguments.count, arguments.seed, arguments.only)
    if arguments.list:
        for mutation in mutations:
            print(
                f"{mutation.kind}: {mutation.path}:{mutation.line} {mutation.scope}: {mutation.what}: {mutation.source}"
            )
        return
    kernels = BUILD / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    trees = [BUILD / f"tree{n}" for n in range(arguments.jobs)]
    for tree in trees:
        runner.copied(ROOT, tree)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(kernels), "PYTHONPATH": str(trees[0])}
    subprocess.run([sys.executable, "-m", "tests.ort_ops.compile_kernels"], cwd=trees[0], env=environment, check=True)
    runner.warm()
    if arguments.record:
        shutil.rmtree(BUILD / "contexts", ignore_errors=True)
    recorded(trees, kernels)
    contexts = Contexts(BUILD / "contexts", sources(ROOT))
    kept = BUILD / f"verdicts-{arguments.seed}.json"
    known = json.loads(kept.read_text()) if arguments.again and kept.is_file() else {}
    settled = {m.key for m in mutations if m.key in known and (known[m.key]["killed"] or page.reason(m))}
    left = sorted((m for m in mutations if m.key not in settled), key=lambda m: m.key not in known)
    if not arguments.again:
        kept.unlink(missing_ok=True)
    tested(trees, left, contexts, kernels, arguments.limit, kept)
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    results = [(m, Verdict(**known[m.key])) for m in mutations]
    dead = sum(verdict.killed for _, verdict in results)
    minutes = sum(verdict.seconds for _, verdict in results) / 60 / len(trees)
    heading = (
        f"Seed {arguments.seed}: {len(results)} mutants, {dead} killed, in {minutes:.0f} minutes on {len(trees)} cores."
    )
    print(heading)
    if not arguments.only:
        page.write(ROOT / "docs" / "mutants.md", results, missing, heading)


if __name__ == "__main__":
    main()
