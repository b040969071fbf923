"""Which mutants are run: those of a review, and a sample of each room and kind."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from .mutations import KINDS, Mutation, candidates, is_other_code

ROOMS = ("opset", "ort_ops", "converters", "onnx_backprop")
# What `make test` runs no Python test of: with PyTorch (`make torch`), in browsers, and text for people.
LEFT_OUT = (
    "onnx_backprop/torch/",
    "onnx_backprop/web/",
    "onnx_backprop/command/",
    "converters/pages",
    "converters/tables",
    "converters/parameters/report",
    "converters/parameters/table",
)
MOST = 30  # names in a table of the review
# Changes that survived the tests of their own folders in a review, as (other names of the table, names left out).
REVIEW = (
    ("Cast Div Mul Transpose", "Cast Div"),
    ("Cast Dropout Expand Mean Pad", "Expand"),
    ("RandomNormal RandomUniformLike Bernoulli Multinomial", "Multinomial"),
    ("GlobalMaxPool Max Min ReduceMax ReduceMin", "GlobalMaxPool ReduceMin"),
    ("Add Cast Concat Gather Shape Size Slice Squeeze Sub Unsqueeze", "Slice"),
    ("Cast Concat Gather Identity Reshape Slice Squeeze Unsqueeze", "Cast Concat Gather Identity Reshape Slice"),
)


def sources(root: Path) -> dict[str, bytes]:
    """The modules of the rooms, by their paths from the root."""
    paths = (p for room in ROOMS for p in sorted((root / room).rglob("*.py")) if p.resolve() == p)
    texts = {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}
    return {path: code for path, code in texts.items() if not path.startswith(LEFT_OUT)}


def review(mutations: Iterable[Mutation]) -> tuple[list[Mutation], list[str]]:
    """The mutants of the review, found by what their tables hold; and in words those that the code no longer has."""
    mutations = list(mutations)
    chosen, missing = [], []
    for names, left_out in REVIEW:
        for name in left_out.split():
            tables = [
                m
                for m in mutations
                if m.what == f"without {name!r}" and m.table.issuperset(names.split()) and len(m.table) < MOST
            ]
            chosen += [m for m in tables if len(m.table) == min(len(other.table) for other in tables)]
            missing += [] if tables else [f"{name} in a table of {names}"]
    passes = [m for m in mutations if m.kind == "number" and m.source.startswith('"Softmax": 3')]
    chosen += [replace(m, text="1", what="3 -> 1") for m in passes]
    missing += [] if passes else ["the three passes over memory of Softmax"]
    return chosen, missing


def drawn(root: Path, count: int, seed: int, only: str = "") -> tuple[list[Mutation], list[str]]:
    """So many mutants, the review's first; the same number of each room, and of each kind in it, while there are some.

    A mutant's turn depends on the seed and on the line that it changes, so that edits elsewhere keep the sample.
    """
    files = {path: code for path, code in sources(root).items() if path.startswith(only)}
    mutations = [m for path, code in files.items() for m in candidates(path, code)]
    first, missing = review(mutations)
    taken = {m.key: m for m in first}
    turn: Callable[[Mutation], bytes] = lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest()  # noqa: E731
    waiting: dict[tuple[str, str], list[Mutation]] = defaultdict(list)
    for mutation in sorted(mutations, key=turn, reverse=True):
        waiting[mutation.room, mutation.kind].append(mutation)
    while len(taken) < count and any(waiting.values()):
        for kind in KINDS:
            for room in ROOMS:
                group = waiting[room, kind]
                while group and len(taken) < count:
                    mutation = group.pop()
                    if mutation.key not in taken and is_other_code(mutation, files[mutation.path]):
                        taken[mutation.key] = mutation
                        break
    return list(taken.values())[: max(count, 0)], missing
