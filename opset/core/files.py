"""Writing files: one is complete or it is not there, whatever ends the writing."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from onnx_backprop.opset.core.signals import Deferred


@contextmanager
def replacing(*paths: str | os.PathLike[str], mark: str | None = None) -> Iterator[tuple[BinaryIO, ...]]:
    """Files to write, which get their names, replacing what had them, once all are complete and on the disk.

    Until then they lie in the same folder under other names, and an exception removes them. mark: what tells these
    names from others; by default the process and a random number, so that several may write at once. With one that is
    given, a process that is killed, which removes nothing, leaves one file at most however often it is. Links are
    followed.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    mark = f"{os.getpid()}.{secrets.token_hex(4)}" if mark is None else mark
    temporary = [target.with_name(f".{target.name}.{mark}.tmp") for target in targets]
    try:
        with ExitStack() as stack:
            files = tuple(stack.enter_context(path.open("wb")) for path in temporary)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        with Deferred():  # all of them or none
            for path, target in zip(temporary, targets, strict=True):
                path.replace(target)
        for folder in {target.parent for target in targets}:
            _sync_folder(folder)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def remove_rest(folder: Path, process: int) -> None:
    """Remove what a process that has been killed was about to write."""
    for path in folder.glob(f".*.{process}.*.tmp"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Bring a renaming to the disk, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
