"""Every code block of README.md, CONTRIBUTING.md and docs/ runs, or says on the page why it does not run here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, RUNNERS, Block, blocks, run
from tests.docs.setups import SETUPS

_ELSEWHERE = "tests/onnx_backprop/text/test_page.py runs it"
PAGE_OF_TEXT, OF_GENAI = f'needs the extra "text"; {_ELSEWHERE}', f"needs onnxruntime-genai; {_ELSEWHERE}"
OF_ADAPTERS = "needs a folder of onnxruntime-genai's builder; tests/onnx_backprop/web/test_trainer_js.py runs it"
# All that is not run; whatever is added here is added on the page too, with its reason.
NOT_RUN = {
    "CONTRIBUTING.md": ["the rule exists, and a second one for an operator is refused"],
    "docs/casadi.md": ["needs CasADi; tests/doors/test_casadi.py runs it"],
    "docs/data.md": ["needs albumentations; tests/onnx_backprop/training/test_images.py runs it"],
    "docs/deploy.md": ["needs onnxruntime's headers", "needs .NET"],
    "docs/plugin.md": ["needs a C compiler; tests/plugin/test_library.py runs the commands"],
    "docs/devices.md": ["needs the device"],
    "docs/distributed.md": ["needs Slurm; not tried by us", "needs Kubernetes; not tried by us"],
    "docs/jax.md": ["needs JAX; make doors runs it"] * 2,
    "docs/flower.md": ["needs Flower; make doors runs it"] * 2,
    "docs/privacy.md": ["needs Opacus; make doors runs it"],
    "docs/pytensor.md": ["needs PyMC; make doors runs it"],
    "docs/fmi.md": ["needs FMPy; tests/doors/test_fmi.py runs it"] * 2,
    "docs/language_models.md": [PAGE_OF_TEXT, OF_GENAI, *[PAGE_OF_TEXT] * 5],
    "docs/web.md": [OF_ADAPTERS],
    "docs/migrating.md": ["needs onnxruntime-training"],
    "docs/pytorch.md": ["needs PyTorch", "needs PyTorch"],
    "docs/tutorial.md": ["needs PyTorch"],
}
DOORS = ("attribution", "casadi", "flower", "fmi", "jax", "openmdao", "privacy", "pytensor", "scipy")
CODE = {page: fenced for page in PAGES if (fenced := [block for block in blocks(page) if block.language])}
_LOOKS_LIKE_CODE = re.compile(
    r"^\s*(\$|>>>|(pip|make|python|mpiexec|onnx-backprop|import|from|npm|node)\s|trainer\.|ob\.)", re.M
)


@pytest.mark.parametrize("page", CODE, ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup = SETUPS.get(str(page.relative_to(ROOT)), dict)
    names = {"__name__": page.stem, **setup()}
    for block in CODE[page]:
        if not block.not_run:
            run(block, names)


@pytest.mark.parametrize("page", DOORS)
def test_a_door_is_one_screen(page: str) -> None:
    assert len((ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines()) <= 60


def test_what_is_not_run_says_why() -> None:
    skipped: dict[str, list[str]] = {}
    for page, code in CODE.items():
        for block in code:
            if block.not_run:
                skipped.setdefault(str(page.relative_to(ROOT)), []).append(block.not_run)
    assert skipped == NOT_RUN


def test_no_code_is_passed_off_as_text() -> None:
    unknown = [str(b) for page in CODE for b in CODE[page] if b.language not in RUNNERS and not b.not_run]
    assert not unknown, "languages that nothing runs"
    text = [b for page in PAGES for b in blocks(page) if not b.language]
    assert len(text) > 10
    assert [str(b) for b in text if _LOOKS_LIKE_CODE.search(b.text)] == []
    hidden = [p.name for p in PAGES if re.search(r"^([ \t]+```|[ \t]*~~~)", p.read_text("utf-8"), re.M)]
    assert hidden == [], "fences begin a line, with ```"
    indented = [
        p.name for p in PAGES if re.search(r"^\n {4,}(onnx-backprop|pip|make|python) ", p.read_text("utf-8"), re.M)
    ]
    assert indented == [], "code belongs in fences"


def test_a_block_that_fails_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in (
        ("python", "assert 1 + 1 == 3"),
        ("bash", "onnx-backprop check no.onnx"),
        ("bash", "pip install 'onnx-backprop[nothing]'"),
        ("bash", "make nothing"),
        ("bash", "ls"),
        ("js", "console.log(1); // 2"),
    ):
        with pytest.raises(AssertionError):
            run(Block(ROOT / "README.md", 1, language, text), {})
