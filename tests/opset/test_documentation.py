"""docs/operators.md is what the schemas say today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onnx.defs import OpSchema, get_schema

import onnx_backprop as ob
from onnx_backprop.opset import OPS
from tests.docs import operators_page as documentation
from tests.docs.operators_page import operators_markdown

ROOT = Path(__file__).parents[2]


def test_the_page_is_fresh() -> None:
    page = ROOT / documentation.PATH
    assert page.is_file(), f"run `{documentation.COMMAND}` in {ROOT}"
    fresh = page.read_text("utf-8") == operators_markdown()
    assert fresh, f"{documentation.PATH} is stale: run `{documentation.COMMAND}` (or `make docs`)"


def sections() -> dict[str, str]:
    head, *rest = re.split(r"^## ", operators_markdown(), flags=re.M)
    assert "Do not edit" in head
    assert documentation.COMMAND in head
    return {text.partition("\n")[0]: text for text in rest}


def test_one_section_per_operator_with_everything_the_schema_states() -> None:
    assert list(sections()) == [op.name for op in OPS]
    for name, text in sections().items():
        schema = get_schema(name, ob.OPSET_VERSION, ob.DOMAIN)
        assert f"```\n{(schema.doc or '').splitlines()[0]}\n```" in text, "the formula, in a code block"
        for label in ("Shapes", "Errors", "Source"):
            assert f"\n**{label}**" in text
        rows = {row.split(" | ")[0].lstrip("| "): row for row in text.splitlines() if row.startswith("| `")}
        formals = [*schema.inputs, *schema.outputs]
        for label in (
            *(f"`{a}`" for a in schema.attributes),
            *(f"`{t.type_param_str}`" for t in schema.type_constraints),
        ):
            assert label in rows
        for formal in formals:
            optional = " (optional)" if formal.option == OpSchema.FormalParameterOption.Optional else ""
            assert f"\n| `{formal.name}`{optional} | `{formal.type_str}` | " in text


def test_the_columns_of_an_attribute() -> None:
    text = sections()["ConvolutionBackwardData"]
    assert re.search(r"^\| `strides` \| ints \| required \| Stride along", text, re.M)
    assert re.search(r"^\| `groups` \| int \| `1` \| Number of groups", text, re.M)
    assert re.search(r"^\| `auto_pad` \| string \| `None` \| None: use `pads_begin`", text, re.M)
    assert re.search(r"^\| `dst_shape` \| ints \| absent \| Full shape of `diff_src`", text, re.M)
    assert re.search(r"^\| `scales` \| floats \| required \| ", sections()["ResampleGrad"], re.M)


def test_tables_are_well_formed() -> None:
    """Every row of a table has as many cells as its head; a bar inside a cell is escaped."""
    columns = 0
    for line in operators_markdown().splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        columns = columns or cells
        assert cells == columns, line
    assert documentation._row(["a|b", "c"]) == r"| a\|b | c |"


def test_command_writes_the_page_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    command = [sys.executable, "-W", "error", *documentation.COMMAND.split()[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [p.name for p in (tmp_path / "docs").iterdir()] == ["operators.md"]
    assert (tmp_path / documentation.PATH).read_bytes() == operators_markdown().encode()


def test_command_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no directory docs here. Run it in the root of a checkout"):
        documentation.main()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "operators.md"
    page.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise PermissionError(target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PermissionError):
        documentation.write(page)
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]
