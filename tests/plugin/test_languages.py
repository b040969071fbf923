"""The programs of examples/ whose compilers are here: a training with the compiled library, and without one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.plugin import languages
from tests.plugin.test_library import SIZES, batches, compiled, pytestmark as needs_a_compiler, small, library_in

pytestmark = needs_a_compiler
PROGRAMS = {"cpp": languages.cpp, "javascript": languages.node}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> languages.Program:
    try:
        return PROGRAMS[request.param](tmp_path_factory.mktemp(request.param))
    except languages.MissingError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("with_library", [True, False], ids=["library", "standard operators"])
def test_a_program_trains_goes_on_and_exports(
    program: languages.Program, folder: Path, tmp_path: Path, with_library: bool
) -> None:
    work = tmp_path / "compiled"
    shutil.copytree(folder, work)
    library = library_in(work) if with_library else "-"
    languages.check(program, work, library, small(), batches(SIZES[0]))


def test_the_checkpoint_of_another_graph_is_refused(program: languages.Program, folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "compiled"
    shutil.copytree(folder, work)
    (work / "batches").write_bytes(b"".join(array[0].tobytes() for array in batches(SIZES[0]).values()))
    program.run(work, "-", work / "batches", 1, 0.01)
    path = work / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[1,3,3,3]', b'"shape":[3,1,3,3]'))
    with pytest.raises(AssertionError, match="of another graph"):
        program.run(work, "-", work / "batches", 1, 0.01)


@pytest.mark.parametrize("name", ["csharp/Train.cs", "java/Train.java", "javascript/train.mjs", "swift/train.swift"])
def test_a_program_is_short(name: str) -> None:
    lines = (languages.EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 150
    assert re.search(r"FOLDER LIBRARY BATCHES STEPS RATE \[THREADS\]", "\n".join(lines[:8]))
