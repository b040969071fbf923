"""What steps read and write in huge pages: 2 MiB for an entry of the processor's table of addresses (TLB), not 4 KiB.

Most distributions of Linux give them on request alone, and onnxruntime does not ask: its memory is the C library's.
So what lies in memory is put together afterwards (MADV_COLLAPSE), in blocks that are full: that adds no memory.
ONNX_BACKPROP_HUGE_PAGES=0 leaves it out, as a system does that has none, or is set never to give any.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "ONNX_BACKPROP_HUGE_PAGES"
_RUNS = (3, 33)  # a block costs 0.5 to 3 ms, once; by the second, batches of other shapes have come
_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_PAGE = mmap.PAGESIZE
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_…; before 6.1 Linux has the first alone, and does it later, by itself
_OURS_ALONE = 0x81  # bits 63 and 56 of the entry of a page in memory that no other process has, as a forked one would


@cache
def block_bytes() -> int:
    """The length of a huge page; 0 where there are none, or none are wanted."""
    try:
        wanted = os.environ.get(VARIABLE) != "0" and os.access(_PAGES, os.R_OK)
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
        self._before = [ends for ends, name in _mapped() if name != "[heap]"] if block_bytes() else None
        self._runs = count(1)

    def about_to_run(self) -> None:
        """A run is to begin; before some of them, pages are put together."""
        if self._before is not None and next(self._runs) in _RUNS:
            with suppress(OSError, ValueError):  # of a mapping that is gone meanwhile
                self.collapse()

    def collapse(self) -> int:
        """Put the pages of full blocks together; how many blocks are full."""
        size, blocks_taken = block_bytes(), 0
        begins, ends = np.array([(0, 0), *(self._before or ())]).T
        with _PAGES.open("rb", buffering=0) as pages:
            for (begin, end), _ in _mapped():
                blocks = np.arange(-(-begin // size) * size, end - size + 1, size)
                if not blocks.size:
                    continue
                entries = os.pread(pages.fileno(), 8 * (blocks.size * size // _PAGE), 8 * (int(blocks[0]) // _PAGE))
                full = (np.frombuffer(entries, np.uint8)[7::8] & _OURS_ALONE == _OURS_ALONE).reshape(blocks.size, -1)
                taken = full.all(1) & (ends[np.searchsorted(begins, blocks + size) - 1] <= blocks)
                edges = np.flatnonzero(np.diff(taken, prepend=False, append=False)).reshape(-1, 2)
                for first, last in (blocks[0] + size * edges).tolist():
                    if _madvise()(first, last - first, _COLLAPSE) and ctypes.get_errno() == errno.EINVAL:
                        _madvise()(first, last - first, _HUGEPAGE)
                    blocks_taken += (last - first) // size
        return blocks_taken


def _mapped() -> list[tuple[tuple[int, int], str]]:
    """Memory that is no file's and no stack's: ((begin, end), name), in order of addresses."""
    mappings = []
    for line in _MAPS.read_text().splitlines():
        addresses, allowed, _, _, inode, *name = line.split(None, 5)
        if (allowed, inode) == ("rw-p", "0") and (not name or name[0].startswith(("[heap]", "[anon:"))):
            begin, end = addresses.split("-")
            mappings.append(((int(begin, 16), int(end, 16)), "".join(name)))
    return mappings
