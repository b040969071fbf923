"""The mutations themselves: what is found in a text, what is drawn, what a mutant's file is."""

from __future__ import annotations

from pathlib import Path

from .contexts import Contexts, Readers
from .draw import ROOMS, drawn, review, sources
from .mutations import KINDS, candidates, is_other_code
from .reasons import REASONS

ROOT = Path(__file__).parents[2]
TEXT = '''"""A module: 1 < 2, "Add"."""
NAMES = frozenset({"Add", "Mul"})
PASSES = {"Exp": 2, "Softmax": 3}
LIMIT = 1 << 16


def rule(op, x, n):
    """dx = -x, at least 0."""
    if not n:
        raise ValueError(f"{n - 1}")
    y = op.Sub(x, op.ReduceSum(x, axis=-1))
    return -max(n, 2) if n < 3 and x.shape[0] is not None else op.Neg(y)
'''
EXPECTED = {
    'NAMES = frozenset({"Mul"})',
    'NAMES = frozenset({"Add"})',
    'PASSES = {"Softmax": 3}',
    'PASSES = {"Exp": 2}',
    'PASSES = {"Exp": 3, "Softmax": 3}',
    'PASSES = {"Exp": 2, "Softmax": 4}',
    "LIMIT = 2 << 16",
    "LIMIT = 1 << 8",
    "if (n):",
    "if False:",
    "y = op.Add(x, op.ReduceSum(x, axis=-1))",
    "y = op.Sub(x, op.ReduceSum(x, axis=0))",
    "return max(n, 2) if n < 3 and x.shape[0] is not None else op.Neg(y)",
    "return -min(n, 2) if n < 3 and x.shape[0] is not None else op.Neg(y)",
    "return -max(n, 2) if n <= 3 and x.shape[0] is not None else op.Neg(y)",
    "return -max(n, 2) if n < 4 and x.shape[0] is not None else op.Neg(y)",
    "return -max(n, 2) if n < 3 and x.shape[1] is not None else op.Neg(y)",
    "return -max(n, 2) if n < 3 and x.shape[0] is None else op.Neg(y)",
    "return -max(n, 2) if n < 3 and x.shape[0] is not None else op.Identity(y)",
}


def test_what_can_be_changed() -> None:
    """Neither text nor messages, and each change in one line."""
    code = TEXT.encode()
    before = TEXT.splitlines()
    changed = set()
    for mutation in candidates("opset/text.py", code):
        after = mutation.applied(code).decode().splitlines()
        (line,) = (line for line, old in zip(after, before, strict=True) if line != old)
        assert is_other_code(mutation, code)
        assert before[mutation.line - 1].strip() == mutation.source
        changed.add(line.strip())
    assert changed == EXPECTED


def test_what_cannot_be_read_or_changes_nothing() -> None:
    code = b"x = 1 < 2\n"
    (mutation, *_) = (m for m in candidates("opset/text.py", code) if m.kind == "comparison")
    assert not is_other_code(mutation, mutation.applied(code)[:4])
    same = type(mutation)(**vars(mutation) | {"text": "<"})
    assert not is_other_code(same, code)


def test_the_sample() -> None:
    """The same for a seed, of every room and kind, the review's first."""
    mutations, missing = drawn(ROOT, 80, 3)
    files = sources(ROOT)
    keys, other = ([m.key for m in drawn(ROOT, 80, seed)[0]] for seed in (3, 4))
    assert keys == [m.key for m in mutations]
    assert len(set(keys)) == 80
    assert len(set(keys) & set(other)) < 40
    reviewed = [m.key for m in review([m for path, code in files.items() for m in candidates(path, code)])[0]]
    first = len(reviewed)
    assert keys[:first] == reviewed
    rest = mutations[first:]
    assert {m.room for m in rest} == set(ROOMS)
    assert {m.kind for m in rest} == set(KINDS)
    counts = [sum(m.room == room for m in rest) for room in ROOMS]
    assert max(counts) - min(counts) <= len(KINDS)
    assert len(missing) + first >= 14


def test_reasons_are_those_of_mutants() -> None:
    """None of a function or a number that is gone."""
    paths = {where.partition(":")[0] for where, _ in REASONS}
    mutations = [m for path in paths for m in candidates(path, (ROOT / path).read_bytes())]
    assert {*REASONS} <= {(f"{m.path}:{m.scope}", m.what) for m in mutations}


def test_keys_are_of_one_mutation_each() -> None:
    for path in ("converters/rules/activation.py", "ort_ops/convolution/problem.py", "opset/core/op.py"):
        keys = [m.key for m in candidates(path, (ROOT / path).read_bytes())]
        assert len(keys) == len(set(keys)) > 5


def test_who_reads_a_name() -> None:
    files = {
        "a.py": b"_T = {1}\nU = {*_T}\n\ndef f():\n    return _T\n",
        "b.py": b"from a import U\n_T = 2\n\ndef g():\n    return U\n\ndef h():\n    return _T\n",
    }
    assert Readers(files)("a.py", "_T") == {"a.py:f", "b.py:g"}


def test_which_tests_run(tmp_path: Path) -> None:
    """Those that run the function, one case of each after the other, the fastest first; else those of its module."""
    (tmp_path / "x.json").write_text(
        '{"tests/t.py::a[1]": [2.0, ["opset/text.py:rule"]], "tests/t.py::a[2]": [1.0, ["opset/text.py:rule"]],'
        ' "tests/t.py::b": [3.0, ["opset/text.py:rule", "opset/text.py:other"]], "tests/t.py::c": [0.1, ["x.py:f"]],'
        ' "tests/t.py::slow": [99.0, ["opset/text.py:rule"]]}'
    )
    contexts = Contexts(tmp_path, {"opset/text.py": TEXT.encode()})
    mutations = {m.scope: m for m in candidates("opset/text.py", TEXT.encode())}
    assert contexts.order(mutations["rule"]) == ["tests/t.py::a[2]", "tests/t.py::b", "tests/t.py::a[1]"]
    assert set(contexts.order(mutations["NAMES"])) == {"tests/t.py::a[1]", "tests/t.py::a[2]", "tests/t.py::b"}


def test_every_kind_is_in_every_room() -> None:
    pairs = {(m.room, m.kind) for path, code in sources(ROOT).items() for m in candidates(path, code)}
    assert pairs == {(room, kind) for room in ROOMS for kind in KINDS}
