"""Checkpoints that are damaged at random: bytes, the header's JSON, and what is said about the training."""

from __future__ import annotations

import json
import random
from typing import Any

from onnx_backprop.training.checkpoint import KEY

ANYTHING: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, -(10**30), 0.5, -0.5, 1e300, float("nan"), float("inf"),
    "", "1", "Cosine", "\ud800", [], [1], [[]], {}, {"name": "Constant"}, {"name": ["Constant"]}, {"format": 1},
    {"name": "Constant", "rate": "x"}, {"name": "Cosine", "rate": 0.1, "steps": 0}, {"name": "Step", "rate": 0.25, "every": 3},
    {"name": "Cosine", "rate": {"name": "Constant", "rate": 1.0}, "steps": 2}, {"name": "Warmup", "after": 0.1, "steps": 2},
    {"name": "Warmup", "after": {"name": "Constant", "rate": 0.5}, "steps": 2}, {"name": "Constant", "rate": None},
    {"name": "Constant", "rate": 10**400}, {"name": "Constant", "rate": 0.1, "more": 1}, "F64", "F16", "I64", "F8_E4M3",
]  # fmt: skip


def deep(depth: int) -> str:
    return '{"name": "Warmup", "steps": 1, "after": ' * depth + "0" + "}" * depth


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, rest: bytes, length: int | None = None) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return (len(text) if length is None else length).to_bytes(8, "little") + text + rest


def changed(value: Any, rng: random.Random) -> Any:
    """The value with something inside replaced, removed, added or doubled."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        places: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = rng.choice(places)
        copy: Any = value.copy()
        how = rng.random()
        if how < 0.2:
            del copy[place]
        elif how < 0.3 and isinstance(copy, dict):
            copy[rng.choice(["", "steps", "more", "w1 "])] = copy[place]
        elif how < 0.4:
            copy[place] = copy[rng.choice(places)]
        else:
            copy[place] = changed(copy[place], rng)
        return copy
    return rng.choice(ANYTHING)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Another content, in most cases not a checkpoint."""
    header, rest = split(content)
    how = rng.randrange(8)
    if how == 0:
        place = rng.randrange(len(content))
        return content[:place] + rng.randbytes(1) + content[place + 1 :]
    if how == 1:
        start, stop = sorted(rng.choices(range(len(content)), k=2))
        return content[:start] + rng.choice([b"", rng.randbytes(9), content[start:stop] * 2]) + content[stop:]
    if how == 2:
        return joined(header, rest, rng.choice([0, 1, rng.randrange(2 * len(content)), 2**31, 2**63, 2**64 - 1]))
    if how == 3:
        return joined(changed(header, rng), rest)
    if how == 4:
        return joined(header, rest[: rng.randrange(len(rest) + 1)] if rng.random() < 0.5 else rest + rng.randbytes(5))
    metadata = header["__metadata__"]
    about = changed(json.loads(metadata[KEY]), rng)
    text = rng.choice([json.dumps(about)] * 9 + [deep(10 ** rng.randrange(5)), "", "NaN", '{"format": 1}'])
    if rng.random() < 0.1:
        text = json.dumps({**json.loads(metadata[KEY]), "schedule": 7}).replace("7", deep(10 ** rng.randrange(5)))
    return joined({**header, "__metadata__": {**metadata, KEY: text}}, rest)
