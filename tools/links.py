"""Links of a page of the repository where the page stands elsewhere: on a package index, on npm.

`[project.urls]` of pyproject.toml is the one place that has addresses: Repository, and Documentation where the site is.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def absolute(markdown: str, about: dict[str, Any], folder: str = "") -> str:
    """The page with links to files of this version in the repository; folder: what the page lies in.

    Without a URL of the repository a link becomes its words, and a picture nothing.
    """
    repository = about.get("urls", {}).get("Repository", "").rstrip("/")

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if _ELSEWHERE.match(target):
            return match[0]
        if not repository:
            return "" if picture else words
        path = f"{folder}/{target}" if folder else target
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{about['version']}/{path})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, markdown))
