"""`make trust`: what it takes of a log, and the page that keeps other rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import trust


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("fuzz 3: slow\nfuzz: seed 7, 5 models: 1 bad\nmake: *** [Makefile:93: fuzz] Error 1\n", 1, "seed 7, 5 models: 1 bad"),
        ("== 3 passed, 1 skipped in 9.1s ==\n20 kills\n==== 1 failed, 2 passed in 71.40s (0:01:11) ====\n", 0,
         "3 passed, 1 skipped in 9.1s; 1 failed, 2 passed in 71.40s (0:01:11)"),
        ("fuzz: seed 7, 0 bad\nTraceback\nKeyError: 'a|b'\n", 1, "seed 7, 0 bad; KeyError: 'a/b'"),
        ("\nas it should be\n\n", 0, "as it should be"),
        ("", 2, ""),
    ],
)  # fmt: skip
def test_outcome_of_a_log(log: str, code: int, says: str) -> None:
    assert trust.outcome("fuzz", log, code) == says


def test_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of an older commit says so, one of this commit does not, and the others are not run."""
    monkeypatch.setattr(trust, "PAGE", tmp_path / "trust.md")
    older = {"a1, changed..HEAD": "wrong", "a1..HEAD": "3", "b2..HEAD": "0"}
    monkeypatch.setattr(trust, "git", lambda *words: older[words[2]])
    kill = ["`make kill`", "passed", "4 passed", "2026-11-27", "a1, changed", "9 min", "x"]
    fuzz = ['`make fuzz ARGS="--models 5"`', "passed", "0 bad", "2026-11-27", "b2", "1 min", "y"]
    trust.write({"kill": kill})
    trust.write(trust.rows() | {"fuzz": fuzz})
    trust.write(trust.rows())
    rows = trust.rows()
    assert rows["kill"] == [*kill[:4], "a1, changed, 3 older", *kill[5:]]
    assert rows["fuzz"] == fuzz
    assert {row[1] for target, row in rows.items() if target not in ("kill", "fuzz")} == {"not run"}
    assert list(rows) == list(trust.DETAILS)
