"""Answers that a long run keeps, so that it goes on where it was stopped: those of another package are dropped."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("opset", "ort_ops", "converters", "onnx_backprop")


def package_digest() -> str:
    """SHA-256 of the package's Python files and their names."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def drop_stale(folder: Path, pattern: str, digest: str) -> int:
    """How many answers in a folder, the files of a pattern, another package had given: they are deleted."""
    stamp = folder / "package.txt"
    if stamp.exists() and stamp.read_text() == digest:
        return 0
    stale = list(folder.glob(pattern))
    for path in stale:
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
    return len(stale)
