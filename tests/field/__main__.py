"""Real files, judged one by one: python -m tests.field [--only NAME] [--variant VARIANT] [--again] [--report]

Every file is made, changed and judged in processes of their own. Files and answers are kept in build/field, so that a
run that was stopped goes on where it was; --again judges anew, as does another package. Writes docs/field.md when nothing was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.field.report import write
from tests.field.sources import Source, sources
from tests.field.variants import variants
from tests.support.kept_answers import drop_stale, package_digest

BUILD = Path("build/field")
PROCESSOR_SECONDS, SECONDS = 1200, 3600  # at most, of one process; the first does not depend on what else is running


def _process(*arguments: str) -> tuple[bool, str]:
    """Whether a module of ours ended well, and the last of what it said."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            env=environment,
            check=False,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS)),
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {SECONDS} s"
    if done.returncode == -signal.SIGKILL:
        return False, f"stopped after {PROCESSOR_SECONDS} s of processor, or for want of memory"
    lines = done.stderr.strip().splitlines()
    return done.returncode == 0, "" if done.returncode == 0 else f"{done.returncode}: {lines[-1] if lines else ''}"


def _file_of(source: Source, variant: str, base: Path | None, *, again: bool) -> tuple[Path | None, str]:
    """The file of a variant, or why there is none: that is the other tool's doing, not ours."""
    folder = BUILD / source.name / variant.replace(" ", "-")
    path, failed = folder / "model.onnx", folder / "failed.txt"
    if again:
        failed.unlink(missing_ok=True)
    if failed.exists():
        return None, failed.read_text()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "draft.onnx"
        well, words = _process("tests.field.variants", variant, source.name, str(base), str(draft))
        if not well or not draft.exists():
            failed.write_text(words)
            return None, words
        shutil.move(draft, path)
    return path, ""


def _judged(source: Source, variant: str, path: Path, *, again: bool) -> dict[str, object]:
    answer = path.with_name("verdict.json")
    if again:
        answer.unlink(missing_ok=True)
    if not answer.exists():
        well, words = _process("tests.field.verdict", source.name, variant, str(path), str(answer))
        if not well:
            return {
                "source": source.name,
                "variant": variant,
                "origin": source.origin,
                "verdict": "traceback",
                "stage": "process",
                "sentence": words,
            }
    return json.loads(answer.read_text())


def _kept() -> tuple[list[dict[str, object]], list[tuple[str, str, str]]]:
    """The verdicts that lie in build/field, and what could not be made."""
    verdicts: list[dict[str, object]] = []
    unmade: list[tuple[str, str, str]] = []
    for source in sources().values():
        for variant in ("as is", *variants(source)):
            folder = BUILD / source.name / variant.replace(" ", "-")
            if (folder / "verdict.json").exists():
                verdicts.append(json.loads((folder / "verdict.json").read_text()))
            elif (folder / "failed.txt").exists():
                unmade.append((source.name, variant, (folder / "failed.txt").read_text()))
    return verdicts, unmade


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the name of the sources to judge")
    parser.add_argument("--variant", default="", help="a part of the name of the variants to judge")
    parser.add_argument("--again", action="store_true", help="judge again what has been judged")
    parser.add_argument("--report", action="store_true", help="only write docs/field.md of what has been judged")
    options = parser.parse_args()
    if options.report:
        verdicts, unmade = _kept()
        lacking = {name for name, variant, _ in unmade if variant == "as is"}  # and so all its variants
        whole = sum(1 + len(() if s.name in lacking else variants(s)) for s in sources().values())
        write(Path("docs/field.md"), verdicts, unmade, whole - len(verdicts) - len(unmade))
        return 0
    drop_stale(BUILD, "*/**/verdict.json", package_digest())
    verdicts, unmade = [], []
    for source in sources().values():
        if options.only not in source.name:
            continue
        base, words = _file_of(source, "as is", None, again=options.again)
        if base is None:
            unmade.append((source.name, "as is", words))
            print(f"{source.name}: not made: {words}", flush=True)
            continue
        for variant in ("as is", *variants(source)):
            if options.variant not in variant:
                continue
            start = time.monotonic()
            path, words = _file_of(source, variant, base, again=options.again)
            if path is None:
                unmade.append((source.name, variant, words))
                print(f"{source.name} ({variant}): not made: {words[:150]}", flush=True)
                continue
            verdict = _judged(source, variant, path, again=options.again)
            verdicts.append(verdict)
            more = (
                f" {verdict['stage']}: {' '.join(str(verdict['sentence']).split())[:250]}"
                if verdict["verdict"] != "right"
                else ""
            )
            print(
                f"{source.name} ({variant}): {verdict['verdict']}{more} [{time.monotonic() - start:.0f} s]", flush=True
            )
    counts = Counter(str(verdict["verdict"]) for verdict in verdicts)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"field: {summary or 'nothing judged'}; {len(unmade)} files that other tools did not make")
    if not options.only and not options.variant:
        write(Path("docs/field.md"), verdicts, unmade)
    return 0 if counts and set(counts) <= {"right", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
