"""Machine code in this process without LLVM, whose library takes 46 MiB: ELF objects for x86-64, as LLVM writes them.

Their code names all that it reads and calls by addresses of 64 bits, which are all there is to fill in.
"""

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

_MAGIC, _KIND = b"\x7fELF\x02\x01\x01", (1, 62)  # of 64 bits, little-endian; relocatable, for x86-64
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # sh_type
_WRITTEN, _ALLOCATED, _EXECUTED = 1, 2, 4  # sh_flags
_UNDEFINED = 0  # st_shndx
_ADDRESS = 1  # R_X86_64_64: the address of a symbol, and a number


class _Section(NamedTuple):
    """A section's header. Of relocations link and info are the sections of their symbols and of what they change."""

    name: int
    kind: int
    flags: int
    address: int
    start: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


def load(code: bytes, symbol: str, others: Mapping[str, int]) -> int | None:
    """The address of a function of an object; None for what it takes LLVM to load.

    others: the addresses of what it calls, by their symbols; what is not among them is the C library's.

    Errors: OSError where the system forbids it, as SELinux and systemd's MemoryDenyWriteExecute may.
    """
    if sys.platform != "linux" or not code.startswith(_MAGIC) or struct.unpack_from("<HH", code, 16) != _KIND:
        return None
    first, count = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<H", code, 60)[0]
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", code, first + 64 * n)) for n in range(count)]
    held = [n for n, s in enumerate(sections) if s.kind == _PROGBITS and s.flags & _ALLOCATED]
    if not held or any(sections[n].flags & _WRITTEN for n in held):
        return None
    places, size, executed = dict[int, int](), 0, 0
    for flag in (_EXECUTED, 0):  # each on pages of its own
        for n in (n for n in held if sections[n].flags & _EXECUTED == flag):
            places[n] = _up(size, max(1, sections[n].alignment))
            size = places[n] + sections[n].size
        size = _up(size, mmap.PAGESIZE)
        executed = executed or size
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for n, place in places.items():
        memory[place : place + sections[n].size] = code[sections[n].start : sections[n].start + sections[n].size]
    entry: int | None = None
    for table in (s for s in sections if s.kind == _SYMTAB):
        addresses = _symbols(code, sections, table, {n: base + place for n, place in places.items()}, others)
        for changes in (s for s in sections if s.kind == _RELA and s.info in places):
            for at in range(changes.start, changes.start + changes.size, 24):
                offset, kind, index, number = struct.unpack_from("<QIIq", code, at)
                address = addresses[index][1]
                if kind != _ADDRESS or address is None:
                    return None
                struct.pack_into("<Q", memory, places[changes.info] + offset, (address + number) % 2**64)
        entry = dict(addresses).get(symbol)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # sessions call it when nothing else of Python is left
    protect = _c_library().mprotect
    for start, end, use in ((0, executed, mmap.PROT_READ | mmap.PROT_EXEC), (executed, size, mmap.PROT_READ)):
        if end > start and protect(ctypes.c_void_p(base + start), ctypes.c_size_t(end - start), use):
            reason = os.strerror(ctypes.get_errno())  # LLVM does not look, and the first call would end the process
            raise OSError(f"this system lets no code be executed that a process has made: {reason}")
    return entry


def _symbols(
    code: bytes, sections: list[_Section], table: _Section, places: Mapping[int, int], others: Mapping[str, int]
) -> list[tuple[str, int | None]]:
    """Name and address of every symbol of a table; None where it has none here."""
    names, symbols = sections[table.link].start, list[tuple[str, int | None]]()
    for at in range(table.start, table.start + table.size, 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
        text = code[names + name : code.index(b"\0", names + name)].decode()
        if section == _UNDEFINED:
            symbols.append((text, others.get(text) or _of_c(text)))
        else:
            symbols.append((text, places[section] + value if section in places else None))
    return symbols


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _of_c(name: str) -> int | None:
    function = getattr(_c_library(), name, None) if name else None
    return ctypes.cast(function, ctypes.c_void_p).value if function else None
