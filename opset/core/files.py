"""Writing files: one is complete or it is not there, whatever ends the writing and whoever else writes there."""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.signals import Deferred

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out, and what a killed process leaves behind stays
    fcntl = None

_RANDOM = 8  # bytes


def named(path: object) -> str | os.PathLike[str]:
    """The path; InvalidArgumentError for what names no file."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"path: expected the name of a file, got {path!r}")
    if isinstance(path, str) and "://" in path and not os.path.isdir(os.path.dirname(path)):
        raise InvalidArgumentError(
            f"path: {path} is a URL. Name a file of this machine, and copy it there or from there, as fsspec does"
        )
    return path


@contextmanager
def replacing(*paths: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, ...]]:
    """Files to write, which get their names, replacing what had them, once all are complete and on the disk.

    Until then they lie in the same folder under random names, and an exception removes them. A process that is killed
    removes nothing; who next writes to the same path does, since the system unlocks the files of the dead. Links are
    followed.
    """
    targets = [Path(os.path.realpath(named(path))) for path in paths]
    temporaries: list[Path] = []
    try:
        for target in targets:
            remove_rest(target.parent, glob.escape(target.name))
        with ExitStack() as stack:
            files = tuple(stack.enter_context(_opened(target, temporaries)) for target in targets)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            if fcntl is None:
                stack.close()  # Windows renames no open file
            with Deferred():  # all of them or none
                for file, target in zip(files, targets, strict=True):
                    Path(file.name).replace(target)
        for folder in {target.parent for target in targets}:
            _sync_folder(folder)
    finally:
        for path in temporaries:
            path.unlink(missing_ok=True)


def remove_rest(folder: Path, name: str = "*") -> None:
    """Remove what processes that are no more were about to write, to a name or to any that fits a pattern."""
    remove_unused(folder.glob(f".{name}.{'[0-9a-f]' * 2 * _RANDOM}.tmp"))


def remove_unused(paths: Iterable[Path]) -> None:
    """Remove those of the files that nobody is writing in `replacing`, as far as the system lets that be known."""
    for path in paths:
        if fcntl is not None:
            with suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where somebody writes it
                path.unlink()


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Whether nobody else is in such a block for this path, which then holds until the end of this one.

    A file `.<name>.lock` beside the path is locked. A process that is killed leaves it there, unlocked. Where the
    system has no such locks the answer is always yes.
    """
    if fcntl is None:  # Windows, which would not let go of the name of an open file either
        yield True
        return
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with ExitStack() as stack:
        file = stack.enter_context(_open_or_make(lock))
        while (alone := _take(file, wait=False)) and not _has_name(file, lock):  # its owner has just removed it
            file = stack.enter_context(_open_or_make(lock))
        try:
            yield alone
        finally:
            if alone:
                lock.unlink(missing_ok=True)
                _release(file)


def _open_or_make(path: Path) -> BinaryIO:
    """For reading, which is all that a lock needs, so that what another user has left stops nobody."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))


def _opened(target: Path, temporaries: list[Path]) -> BinaryIO:
    """A new file beside a target, locked while it is open; its name is in `temporaries` before it exists."""
    while True:
        temporaries.append(target.with_name(f".{target.name}.{os.urandom(_RANDOM).hex()}.tmp"))
        file = temporaries[-1].open("xb")
        _take(file, wait=True)
        if _has_name(file, temporaries[-1]):  # nobody has taken it for a rest before it was locked
            return file
        file.close()


def _take(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file, or have it without a lock where the system has none; False where somebody else has it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def _release(file: BinaryIO) -> None:
    """Unlock a file for processes that were forked meanwhile too, for which closing it here would not do."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _has_name(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Bring a renaming to the disk, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
