"""What `mkdocs build` does besides: pages from the root of the repository, notebooks that are run, text without HTML.

README.md is the first page, command.md what the command says of itself. The pages in NOTEBOOKS are notebooks too: their
blocks of Python are run, what they print stands on the page, and the notebook can be downloaded there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

from onnx_backprop.command.main import main
from tools.links import project

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NOTEBOOKS = ("tutorial", "finetune", "scipy")
_PYTHON = re.compile(r"(?<!-->\n)^```python\n(.*?)\n```\n", re.M | re.S)  # but what a comment in front of it excepts
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


class _PlainText(Extension):
    """`<x>_grad` in running text is no tag."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name is Markdown's
        md.inlinePatterns.deregister("html")


def on_config(config: MkDocsConfig) -> None:
    """Give Markdown the extension."""
    os.environ["COLUMNS"] = "100"  # of the command's help
    addresses = project().get("urls", {})
    config.repo_url, config.site_url = addresses.get("Repository"), addresses.get("Documentation")
    config.markdown_extensions.append(_PlainText())  # type: ignore[arg-type]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from the root, and put pages with outputs in the place of NOTEBOOKS."""
    for source, target in FROM_ROOT.items():
        files.append(File.generated(config, target, content=_LINK.sub(_from_root, (ROOT / source).read_text("utf-8"))))
    files.append(File.generated(config, "command.md", content="".join(_command())))
    for name in NOTEBOOKS:
        page = files.get_file_from_path(f"{name}.md")
        assert page is not None
        notebook = _run(page.content_string)
        files.remove(page)
        files.append(File.generated(config, page.src_uri, content="".join(_shown(name, notebook))))
        files.append(File.generated(config, f"{name}.ipynb", content=nbformat.writes(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """There is no network: of links to elsewhere only the form is checked."""
    for link in _LINK.findall(markdown):
        parts = urlsplit(link)
        if (parts.scheme or parts.netloc) and not (parts.scheme == "https" and "." in parts.netloc):
            raise PluginError(f"{page.file.src_uri}: {link} is no link to elsewhere: expected https://host/…")


def _from_root(match: re.Match[str]) -> str:
    """A link of a file in the root, as the site has it."""
    path, mark, anchor = match[1].partition("#")
    return FROM_ROOT.get(path, path.removeprefix("docs/")) + mark + anchor


def _command() -> Iterator[str]:
    """The help of `onnx-backprop` and of each of its commands."""
    overview = _help([])
    names = re.findall(r"^ {4}(\w+) {2,}", overview, re.M)
    assert "train" in names, overview
    yield f"# The command\n\n```text\n{overview}```\n\n"
    for name in names:
        if name != "demo":  # a script of the source tree
            yield f"## {name}\n\n```text\n{_help([name])}```\n\n"


def _help(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return said.getvalue()


def _run(text: str) -> nbformat.NotebookNode:
    """The notebook of a page, its cells run one after the other in a folder of their own; what one raises is raised."""
    cells: list[nbformat.NotebookNode] = []
    for n, part in enumerate(_PYTHON.split(text)):
        make = nbformat.v4.new_code_cell if n % 2 else nbformat.v4.new_markdown_cell
        if part.strip():
            cells.append(make(part.strip("\n"), id=f"cell-{n}"))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    os.environ["TQDM_DISABLE"] = "1"  # bars are for those who wait
    quiet = ["--IPKernelApp.log_level=ERROR"]
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=120, extra_arguments=quiet, resources=where).execute()
    return notebook


def _shown(name: str, notebook: nbformat.NotebookNode) -> Iterator[str]:
    """The page again, with what each cell has put out behind it."""
    for n, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            title, break_, rest = cell.source.partition("\n") if n == 0 else ("", "", cell.source)
            yield f"{title}\n\n[This page as a notebook]({name}.ipynb)\n{break_}{rest}\n\n" if n == 0 else f"{rest}\n\n"
            continue
        yield f"```python\n{cell.source}\n```\n\n"
        for output in cell.outputs:
            data = output.get("data", {})
            text = output.get("text", "") if output.get("name") == "stdout" else data.get("text/plain", "")
            if "text/html" in data:
                yield f"{data['text/html']}\n\n"
            elif text:
                yield f"```text\n{text.rstrip()}\n```\n\n"
