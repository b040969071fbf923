"""Huge pages: of memory mapped since, full blocks alone are put together, and keep what is in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.ort_ops import huge_pages
from onnx_backprop.ort_ops.huge_pages import HugePages, ask, block_bytes

SIZE = block_bytes()
needs_them = pytest.mark.skipif(not 0 < SIZE <= 32 << 20, reason="this system gives no huge pages on request")


@pytest.fixture
def fresh() -> Iterator[None]:
    block_bytes.cache_clear()
    yield
    block_bytes.cache_clear()


class Blocks:
    """Memory of whole blocks; the advice is one that its neighbours have not, which it would be listed with."""

    def __init__(self, count: int, advice: int = mmap.MADV_DONTFORK) -> None:
        self._map = mmap.mmap(-1, (count + 1) * SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(advice)
        whole = np.frombuffer(self._map, np.uint8)
        skipped = -whole.ctypes.data % SIZE
        self.bytes = whole[skipped : skipped + count * SIZE].reshape(count, -1)
        self._range = whole.ctypes.data, whole.ctypes.data + whole.size

    def _listed(self, what: str) -> list[str]:
        """What /proc/self/smaps says of it."""
        result: list[str] = []
        for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
            begin, end = (int(a, 16) for a in entry.split(" ", 1)[0].split("-")) if entry else (0, 0)
            if begin < self._range[1] and end > self._range[0]:
                assert self._range[0] <= begin < end <= self._range[1], "it is listed with a neighbour"
                result += re.findall(rf"^{what}: +(.*)", entry, re.MULTILINE)
        return result

    def _bytes(self, what: str) -> int:
        return sum(int(size.removesuffix(" kB")) * 1024 for size in self._listed(what))

    @property
    def huge(self) -> float:
        return self._bytes("AnonHugePages") / SIZE

    @property
    def resident(self) -> int:
        return self._bytes("Rss")

    @property
    def flags(self) -> list[str]:
        return " ".join(self._listed("VmFlags")).split()


def test_windows_asks_for_none_though_wine_shows_the_files(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    assert block_bytes() == 0


@needs_them
def test_full_blocks_that_came_since_are_put_together() -> None:
    numbers = np.arange(SIZE // 4, dtype=np.uint32).view(np.uint8)
    before = Blocks(2, mmap.MADV_DONTDUMP)
    before.bytes[:] = numbers
    pages = HugePages()
    since = Blocks(5)
    since.bytes[[0, 3, 4]] = numbers
    since.bytes[1, : SIZE // 2] = 7
    assert not since.bytes[2].any()  # of which every page now is the one of zeros that all processes share
    resident = since.resident
    try:
        ctypes.set_errno(0)
        collapsed = pages.collapse()
    finally:
        supported = ctypes.get_errno() == 0
    assert collapsed >= 3
    if supported:
        assert (before.huge, since.huge) == (0, 3)
    assert since.resident == resident
    np.testing.assert_array_equal(since.bytes[[0, 3, 4]], np.stack([numbers] * 3))
    assert (since.bytes[1, : SIZE // 2] == 7).all()
    assert not since.bytes[1, SIZE // 2 :].any()


@needs_them
def test_whole_blocks_are_asked_for() -> None:
    blocks = Blocks(4)
    ask(blocks.bytes.ctypes.data + 64, 3 * SIZE)  # two whole ones, and parts of two more
    blocks.bytes[:, 0] = 1
    assert blocks.huge == 2


@needs_them
def test_older_mappings_are_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have reserved any number, and there are 4 KiB to read for a block of 2 MiB."""
    monkeypatch.setattr(huge_pages, "_PIECE", 8)
    before = Blocks(512, mmap.MADV_DONTDUMP)
    pages = HugePages()
    since = Blocks(9)
    pread, read = os.pread, list[int]()
    monkeypatch.setattr(os, "pread", lambda file, n, at: read.append(n) or pread(file, n, at))
    pages.collapse()
    block = 8 * SIZE // mmap.PAGESIZE
    assert max(read) == 8 * block
    assert len(before.bytes) * block > sum(read) > len(since.bytes) * block


@needs_them
def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be any number of blocks, of data that came since; it takes a second, or as long as a run."""
    monkeypatch.setattr(huge_pages, "_PIECE", 4)
    pages, given = HugePages(), list[float]()
    since = Blocks(12)
    since.bytes[:] = 1
    assert pages.collapse(0.0) <= 4
    assert pages.collapse() >= 12
    now = iter([0.0, 0.5, 5.5])
    monkeypatch.setattr(huge_pages, "perf_counter", lambda: next(now))
    monkeypatch.setattr(HugePages, "collapse", lambda _, seconds: given.append(seconds))
    for _ in range(3):
        pages.about_to_run()
    assert given == [5.0]


@needs_them
def test_files_of_any_name_are_mapped(tmp_path: Path) -> None:
    """Of bytes that are no text, and of what ends a line for Python alone."""
    path = bytes(tmp_path) + b"/\xff \x1c\r\x85 b"
    Path(os.fsdecode(path)).write_bytes(bytes(mmap.PAGESIZE))
    with Path(os.fsdecode(path)).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        pages = HugePages()
        since = Blocks(1)
        since.bytes[:] = 1
        assert pages.collapse() >= 1


@needs_them
def test_small_pages_that_are_asked_for_stay() -> None:
    pages = HugePages()
    since = Blocks(2, mmap.MADV_NOHUGEPAGE)
    since.bytes[:] = 1
    pages.collapse()
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(huge_pages._COLLAPSE, 0, 0)
    except OSError:
        pytest.skip("before Linux 6.1")
    assert "hg" not in since.flags


@needs_them
def test_a_trainer_has_them_before_the_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[N,1] x) => (float[N,1] y) <float[1] w = {2}> {y = Mul(x, w)}'
    )
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"))
    at = list[int]()
    monkeypatch.setattr(HugePages, "collapse", lambda *_: at.append(trainer.steps))
    for _ in range(34):
        trainer.step(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))
    assert at == [2, 32]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("why", ["variable", "never", "another system", "no /proc"])
def test_none_are_asked_for_where_there_are_none(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_FOLDER", tmp_path)
    monkeypatch.setattr(HugePages, "collapse", lambda *_: pytest.fail("there are none"))
    if why != "another system":
        (tmp_path / "enabled").write_text("always madvise [never]" if why == "never" else "always [madvise] never")
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    if why == "no /proc":
        monkeypatch.setattr(huge_pages, "_PAGES", tmp_path / "pagemap")
    if why == "variable":
        monkeypatch.setenv(huge_pages.VARIABLE, "0")
    pages = HugePages()
    for _ in range(4):
        pages.about_to_run()
    assert block_bytes() == 0
