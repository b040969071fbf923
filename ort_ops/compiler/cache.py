"""The cache of machine code, from one process to the next."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from onnx_backprop.opset.core.files import replacing

logger = logging.getLogger("onnx_backprop")
_PACKAGE = __name__.partition(".")[0]


@cache
def cache_folder() -> Path | None:
    """Where machine code is cached; None where nothing can be written."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


def _folders() -> Iterator[Path]:
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given) / _PACKAGE
        return
    yield Path(__file__).resolve().parents[1] / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user who has no home, as in a container
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _PACKAGE


def read(path: Path) -> bytes | None:
    """What was written, None unless the file is whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() == data[:32]:
        return data[32:]
    _say_damaged(path.parent)
    return None


@cache
def _say_damaged(folder: Path) -> None:
    """Once, however many files."""
    logger.warning("machine code in %s is damaged; what is needed of it is compiled anew", folder)


def write(path: Path, code: bytes) -> None:
    """Appears whole or not at all; where it cannot be written, the next process compiles again."""
    with contextlib.suppress(OSError), replacing(path) as (file,):
        file.write(hashlib.sha256(code).digest() + code)
