"""Files that several write at once, and what processes that were killed leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_backprop.opset.core.files import locked, remove_rest, replacing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def elsewhere(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that has begun something in a folder and said so."""
    start = f"import sys; sys.path[:] = {sys.path}\nfrom onnx_backprop.opset.core.files import *\n"
    process = subprocess.Popen([sys.executable, "-c", start + code], cwd=folder, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def ended(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    with process:
        assert process.wait() == -number


WRITING = """
with replacing("file") as (file,):
    file.write(b"a part")
    file.flush()
    print("begun", flush=True)
    input()
"""


def test_two_writers_of_one_path_write_two_files(tmp_path: Path) -> None:
    """Under one temporary name the second would write into the file of the first."""
    with replacing(tmp_path / "file") as (first,):
        first.write(b"first, which is longer")
        with replacing(tmp_path / "file") as (second,):
            second.write(b"second")
        assert (tmp_path / "file").read_bytes() == b"second"
    assert (tmp_path / "file").read_bytes() == b"first, which is longer"
    assert names(tmp_path) == ["file"]


def test_what_the_dead_have_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    dead, living = elsewhere(tmp_path, WRITING), elsewhere(tmp_path, WRITING)
    (tmp_path / ".file.mine.tmp").touch()
    ended(dead, signal.SIGKILL)
    assert len(names(tmp_path)) == 3
    with replacing(tmp_path / "file") as (file,):
        file.write(b"whole")
    assert len(names(tmp_path)) == 3
    with replacing(tmp_path / "another"):
        pass
    living.communicate("\n")
    assert living.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"a part"
    assert names(tmp_path) == [".file.mine.tmp", "another", "file"]


def test_rests_of_any_name(tmp_path: Path) -> None:
    ended(elsewhere(tmp_path, WRITING), signal.SIGKILL)
    remove_rest(tmp_path)
    assert names(tmp_path) == []


def test_a_file_that_was_taken_for_a_rest_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its locking."""
    import fcntl

    flock, calls = fcntl.flock, []

    def late(file: object, how: int) -> None:
        if not calls:
            calls.append(how)
            remove_rest(tmp_path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing(tmp_path / "file") as (file,):
        file.write(b"whole")
    assert calls
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert names(tmp_path) == ["file"]


def test_without_locks_files_are_whole_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refused(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    (tmp_path / f".file.{16 * '0'}.tmp").touch()
    with locked(tmp_path / "file") as first, locked(tmp_path / "file") as second, replacing(tmp_path / "file"):
        assert (first, second) == (True, True)
    assert names(tmp_path) == [f".file.{16 * '0'}.tmp", "file"]


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "with locked('file') as alone:\n    print('begun', flush=True)\n    input()"
    process = elsewhere(tmp_path, code)
    with locked(tmp_path / "file") as alone:
        assert not alone
    process.send_signal(signal.SIGSTOP)
    with locked(tmp_path / "file") as alone, locked(tmp_path / "another") as other:
        assert (alone, other) == (False, True)
    ended(process, signal.SIGKILL)
    assert names(tmp_path) == [".file.lock"]
    for _ in range(2):
        with locked(tmp_path / "file") as alone, locked(tmp_path / "file") as again:
            assert (alone, again) == (True, False)
        assert names(tmp_path) == []


FULL = """
import errno, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with replacing("file") as (file,):
        file.write(bytes(2000))
except OSError as e:
    print("begun" if e.errno == errno.EFBIG else e)
"""


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with elsewhere(tmp_path, FULL) as process:
        process.communicate()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_to_a_name_of_the_same_folder(tmp_path: Path) -> None:
    os.symlink("file", tmp_path / "link")
    with locked(tmp_path / "file") as one, locked(tmp_path / "link") as other:
        assert (one, other) == (True, False)
