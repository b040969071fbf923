"""The reference on the site has every public name; what MkDocs checks beyond that, `make docs` does."""

from __future__ import annotations

import re

import pytest

import onnx_backprop as ob
from onnx_backprop import artifacts
from tests.conformance import __main__ as conformance
from tests.docs.blocks import ROOT, blocks
from tests.fidelity import report as fidelity
from tests.field import report as field


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, re.M)}
    shown |= {name for members in re.findall(r"members: \[(.*)\]", text) for name in members.split(", ")}
    shown |= set(re.findall(r"^ +- (\w+)$", text, re.M)) | set(re.findall(r"`onnx_backprop\.(\w+)`", text))
    assert [name for name in (*ob.__all__, *artifacts.__all__) if name not in shown] == []


@pytest.mark.parametrize(
    ("page", "head"), [("conformance", conformance.HEAD), ("fidelity", fidelity.HEAD), ("field", field.HEAD)]
)
def test_generated_pages_begin_as_their_generators_write_them(page: str, head: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text("utf-8").startswith(head)


def test_the_rule_that_contributing_shows_is_in_the_code() -> None:
    (block,) = (block for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python")
    assert f"\n{block.text}\n" in (ROOT / "converters" / "rules" / "norm.py").read_text("utf-8")
