"""Fixtures for every test."""

from __future__ import annotations

import zlib

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only; pytest shows the seed when the test fails."""
    seed = zlib.crc32(request.node.nodeid.encode())
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
