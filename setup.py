"""The page of an index: README.md, whose links lead to nothing there as they are; all else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))
from tools.links import ROOT, absolute, project

setup(
    long_description=absolute((ROOT / "README.md").read_text("utf-8"), project()),
    long_description_content_type="text/markdown",
)
