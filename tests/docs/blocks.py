"""The code blocks of README.md, CONTRIBUTING.md and docs/, and how each language is run.

A page's blocks run one after the other in one folder, as somebody who follows the page would run them; those of Python
share their names. What cannot run here has a line above it, `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.command.main import main
from tests.onnx_backprop.web.javascript import WEB, node, runtime

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(.*)$")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
# An X that a line of JavaScript prints, as it says behind it: `console.log(…); // X: more words`
_PRINTED = re.compile(r"console\.log\(.*\); // ([^:\n]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line of text, from 1. not_run: why it does not run here."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page; one without a language is text."""
    lines = page.read_text("utf-8").splitlines()
    fences = [(number, fence[1]) for number, line in enumerate(lines) if (fence := _FENCE.match(line))]
    assert len(fences) % 2 == 0, f"{page}: a block without an end"
    for (start, language), (end, _) in zip(fences[::2], fences[1::2], strict=True):
        marked = _NOT_RUN.fullmatch(lines[start - 1]) if start else None
        yield Block(page, start + 2, language, "\n".join(lines[start + 1 : end]), marked[1] if marked else "")


def examples(docstring: str) -> list[str]:
    """The code of a docstring: what is indented behind an empty line."""
    return [textwrap.dedent(text).rstrip() for text in re.findall(r"(?<=\n\n)(?: {4}.*(?:\n+|\Z))+", docstring)]


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block in the current folder; an AssertionError or its own exception where it fails."""
    RUNNERS[block.language](block, names)


def _python(block: Block, names: dict[str, Any]) -> None:
    if "mpi4py" in block.text:  # MPI stays in a process to its end
        arrays = {name: value for name, value in names.items() if isinstance(value, np.ndarray)}
        np.savez("names.npz", **arrays)
        Path("block.py").write_text(f"import numpy\nglobals().update(numpy.load('names.npz'))\n{block.text}")
        _ranks("2", [sys.executable, "block.py"])
        return
    padding = "\n" * (block.line - 1)  # tracebacks tell the line of the page
    exec(compile(padding + block.text, str(block.page), "exec"), names)


def _shell(block: Block, _: dict[str, Any]) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            assert words[0] in _COMMANDS, f"{block}: what runs {words[0]!r}? Add it to tests/docs/blocks.py"
            _COMMANDS[words[0]](words)


def _command(words: list[str]) -> None:
    if words[1] == "serve":  # goes on until somebody ends it
        words = [*words, "--help"]
    words = [re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", word) for word in words]
    try:
        code = main(words[1:])
    except SystemExit as e:
        code = e.code
    assert code == 0, f"{shlex.join(words)}: exit code {code}"


def _mpiexec(words: list[str]) -> None:
    assert (words[1], words[3]) == ("-n", "onnx-backprop"), words
    _ranks(words[2], [sys.executable, "-m", "onnx_backprop", *words[4:]])


def _ranks(count: str, command: list[str]) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")  # that of the package mpich
    done = subprocess.run([mpiexec, "-n", count, *command], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def _pip(words: list[str]) -> None:
    """Nothing is installed; extras of ours exist."""
    assert words[1] == "install", words
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:^|\s)(?:\.|onnx-backprop)\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(known), extras


def _make(words: list[str]) -> None:
    """Nothing is made; the target exists, and `make help` tells it."""
    assert re.search(rf"^{words[1]}:.*## ", (ROOT / "Makefile").read_text(), re.M), words


def _toml(block: Block, _: dict[str, Any]) -> None:
    """The entry points are those of the example."""
    example = tomllib.loads((ROOT / "examples" / "extension" / "pyproject.toml").read_text())
    assert tomllib.loads(block.text)["project"].items() <= example["project"].items(), str(block)


def _javascript(block: Block, _: dict[str, Any]) -> None:
    """In Node, on the packages that are here; a script gets the name of the folder that `web` has written."""
    example = (WEB / "example.js").read_text().partition("\n")[2].strip()
    assert "onnx-backprop'" not in block.text or block.text.strip() == example, f"{block} is not example.js"
    text = block.text
    for name, module in _MODULES.items():
        text = text.replace(f"from '{name}'", f"from '{module().as_uri()}'")
    script = Path("block.mjs")
    script.write_text(text)
    done = subprocess.run([node(), script, "site"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{block}: {done.stderr[-2000:]}"
    for printed in _PRINTED.findall(block.text):
        assert printed.strip() in done.stdout, f"{block}: {printed!r} is not in {done.stdout!r}"


_MODULES: dict[str, Callable[[], Path]] = {
    "onnxruntime-node": runtime,
    "onnx-backprop": lambda: WEB / "trainer.js",
    "onnx-backprop/rows": lambda: WEB / "rows.js",
}
_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "onnx-backprop": _command,
    "mpiexec": _mpiexec,
    "pip": _pip,
    "make": _make,
}
RUNNERS: dict[str, Callable[[Block, dict[str, Any]], None]] = {"python": _python, "bash": _shell, "js": _javascript}
RUNNERS["toml"] = _toml
