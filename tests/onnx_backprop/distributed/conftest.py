"""No process of a job outlives its test, whatever becomes of that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mpi import end_jobs


@pytest.fixture(autouse=True)
def jobs_end() -> Iterator[None]:
    left: list[str] = []
    try:
        yield
    finally:
        left = end_jobs(seconds=2)
    assert not left
