"""Archives that have equal bytes whenever and wherever they are built."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import time
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path


def parts(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files in an archive."""
    if name.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((part, archive.read(part)) for part in archive.namelist())
    elif name.endswith("gz"):
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            yield from ((m.name, archive.extractfile(m).read()) for m in archive if m.isfile())  # type: ignore[union-attr]
    else:
        yield name, content


def tidy_sdist(path: Path, epoch: int) -> dict[str, bytes]:
    """The archive with its files in order, at one time, of nobody."""
    raw = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old, key=lambda m: m.name):
            member.uid = member.gid = 0
            member.uname, member.gname, member.mtime, member.pax_headers = "", "", epoch, {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return {path.name: gzip.compress(raw.getvalue(), mtime=epoch)}


def tidy_wheel(path: Path, epoch: int) -> dict[str, bytes]:
    """The wheel with its files in order, at one time."""
    return {path.name: zipped(dict(parts(path.name, path.read_bytes())), epoch)}


def zipped(files: Mapping[str, bytes], epoch: int) -> bytes:
    """A wheel: its files in order, at one time, with a RECORD of them."""
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    lines = [f"{record},,"]
    for name in sorted(files.keys() - {record}):
        digest = urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name])}")
    files, raw = {**files, record: "\n".join([*sorted(lines), ""]).encode()}, io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files, key=lambda n: (".dist-info/" in n, n)):
            about = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            about.compress_type, about.external_attr, about.create_system = zipfile.ZIP_DEFLATED, 0o100644 << 16, 3
            archive.writestr(about, files[name])
    return raw.getvalue()
