"""The programs of examples/ whose compilers are here: a training with the compiled library, and without one."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.ort_ops.runtime.scratch import POOL_SLOTS
from tests.plugin import languages
from tests.plugin.test_library import SIZES, batches, compiled, library_in, small
from tests.plugin.test_library import pytestmark as needs_a_compiler

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


@pytest.mark.skipif(sys.platform != "linux", reason="threads are killed by a call of Linux")
def test_others_train_on_where_threads_were_killed_in_a_kernel(folder: Path, tmp_path: Path) -> None:
    """More of them than the pool has blocks."""
    try:
        program = languages.Program([languages.built(Path(__file__).with_name("killed.cpp"), tmp_path)])
    except languages.MissingError as e:
        pytest.skip(str(e))
    data = batches(SIZES[0])
    trainer = ob.Trainer(small(), learning_rate=0.01)
    parts = [{name: array[n] for name, array in data.items()} for n in range(6)]
    (tmp_path / "batches").write_bytes(b"".join(array.tobytes() for part in parts for array in part.values()))
    killed, *losses = program.run(
        folder, library_in(folder), tmp_path / "batches", 6, 0.01, 2 * POOL_SLOTS
    ).splitlines()
    assert int(killed) == 2 * POOL_SLOTS
    np.testing.assert_allclose([float(loss) for loss in losses], [trainer.step(part) for part in parts], rtol=1e-6)


@pytest.mark.parametrize("name", ["csharp/Train.cs", "java/Train.java", "javascript/train.mjs", "swift/train.swift"])
def test_a_program_is_short(name: str) -> None:
    lines = (languages.EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 150
    assert re.search(r"FOLDER LIBRARY BATCHES STEPS RATE \[THREADS\]", "\n".join(lines[:8]))
