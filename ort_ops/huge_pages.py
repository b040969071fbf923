"""What steps read and write in huge pages: 2 MiB for an entry of the processor's table of addresses (TLB), not 4 KiB.

Most distributions of Linux give them on request alone, and onnxruntime does not ask: its memory is the C library's.
So what lies in memory is put together afterwards (MADV_COLLAPSE), in blocks that are full: that adds no memory.
ONNX_BACKPROP_HUGE_PAGES=0 leaves it out, as a system does that has none, or is set never to give any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

VARIABLE = "ONNX_BACKPROP_HUGE_PAGES"
_RUNS = (3, 33)  # a block costs 0.5 to 3 ms, once; by the second, batches of other shapes have come
_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_PAGE = mmap.PAGESIZE
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_…; before 6.1 Linux has the first alone, and does it later, by itself
_PIECE = 64  # blocks whose pages are read at once
_LEAST = 1.0  # seconds that putting pages together may take, or as long as a run and what came with it
_OURS_ALONE = 0x81  # bits 63 and 56 of the entry of a page in memory that no other process has, as a forked one would


@cache
def block_bytes() -> int:
    """The length of a huge page; 0 where there are none, or none are wanted."""
    try:
        linux = sys.platform == "linux"  # under wine the files are there, too
        wanted = linux and os.environ.get(VARIABLE) != "0" and os.access(_PAGES, os.R_OK)
        allowed = wanted and "[never]" not in (_FOLDER / "enabled").read_text()
        return int((_FOLDER / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def ask(address: int, length: int) -> None:
    """Have huge pages for whole blocks of memory that nothing has been written to."""
    if (size := block_bytes()) and length >= size:
        first, end = -(-address // size) * size, (address + length) // size * size
        if end > first:
            _madvise()(first, end - first, _HUGEPAGE)


class HugePages:
    """For memory that is mapped from here on, by whomever: of what was there before, a process may have much more."""

    def __init__(self) -> None:
        self._before: list[tuple[int, int]] | None = None
        self._runs, self._began = count(1), perf_counter()
        if block_bytes():
            with suppress(OSError, ValueError):
                self._before = [ends for ends, name in _mapped() if name != b"[heap]"]

    def about_to_run(self) -> None:
        """A run is to begin; before some of them, pages are put together."""
        if self._before is None:
            return
        before, self._began = self._began, perf_counter()
        if next(self._runs) in _RUNS:
            with suppress(OSError, ValueError):  # of a mapping that is gone meanwhile
                self.collapse(max(_LEAST, self._began - before))

    def collapse(self, seconds: float = inf) -> int:
        """Put the pages of full blocks together until the time is over, for data may lie there too; how many blocks."""
        size, full, end = block_bytes(), 0, perf_counter() + seconds
        # of length 0, it says whether Linux has it; it does not undo what somebody has asked for a range, as the other
        advice = _HUGEPAGE if _madvise()(None, 0, _COLLAPSE) else _COLLAPSE
        with _PAGES.open("rb", buffering=0) as pages:
            for blocks in self._new_blocks():
                begin, entries = int(blocks[0]), size // _PAGE
                read = os.pread(pages.fileno(), 8 * entries * blocks.size, 8 * (begin // _PAGE))
                flags = np.frombuffer(read, np.uint8)[7::8] & _OURS_ALONE
                is_full = (flags == _OURS_ALONE).reshape(-1, entries).all(1)
                for first, last in _ranges(is_full):
                    _madvise()(begin + first * size, (last - first) * size, advice)
                full += int(is_full.sum())
                if perf_counter() > end:
                    break
        return full

    def _new_blocks(self) -> Iterator[np.ndarray]:
        """The addresses of blocks that were not mapped before, some that follow each other at a time."""
        size = block_bytes()
        begins, ends = np.array([(0, 0), *(self._before or ())]).T
        for (begin, end), _ in _mapped():
            blocks = np.arange(-(-begin // size) * size, end - size + 1, size)
            is_new = ends[np.searchsorted(begins, blocks + size) - 1] <= blocks
            for first, last in _ranges(is_new):
                for place in range(first, last, _PIECE):
                    yield blocks[place : min(place + _PIECE, last)]


def _ranges(chosen: np.ndarray) -> list[list[int]]:
    """[first, last + 1] of each range of what is chosen."""
    return np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2).tolist()


def _mapped() -> list[tuple[tuple[int, int], bytes]]:
    """Memory that is no file's and no stack's: ((begin, end), name), in order of addresses."""
    result: list[tuple[tuple[int, int], bytes]] = []
    for line in _MAPS.read_bytes().split(b"\n"):  # names of files are any bytes
        addresses, allowed, _, _, inode, *name = line.split(None, 5) or [b""] * 5
        if (allowed, inode) == (b"rw-p", b"0") and (not name or name[0].startswith((b"[heap]", b"[anon:"))):
            begin, end = addresses.split(b"-")
            result.append(((int(begin, 16), int(end, 16)), b"".join(name)))
    return result
