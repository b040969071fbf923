"""A tiny part of `make fuzz`, and that the pool sees what it is there to see."""

from __future__ import annotations

import gc
import os
import re
import time

import numpy as np
import pytest

from tests.declarations.calls import Call
from tests.fuzz import calls, pool, targets

CASES = {"models": 250, "npz": 150, "checkpoints": 80}


@pytest.mark.parametrize("group", list(CASES))
def test_mutated_files(group: str) -> None:
    for door in targets.GROUPS[group]:
        targets.TARGETS[door].files()

    def step(number: int) -> str:
        door, _, content = targets.case(group, 0, number)
        return f"{targets.attempt(door, content)}; {door}"

    answers = list(pool.run(range(CASES[group]), step))
    assert len(answers) == CASES[group]
    assert [a for a in answers if a.what.startswith(pool.BAD)] == []
    assert {a.what.partition(";")[0] for a in answers} >= {"answered"}


def test_cases_are_the_same_every_time() -> None:
    for group in targets.GROUPS:
        assert targets.case(group, 3, 5) == targets.case(group, 3, 5)
        assert targets.case(group, 3, 5) != targets.case(group, 3, 6)


def test_what_ends_a_process_is_told_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is slow, one waits and one computes."""
    monkeypatch.setattr(pool, "PATIENCE", 15)

    def step(case: int) -> str:
        if case == 1:
            os.abort()
        if case == 3:
            time.sleep(60)
        while case == 4:
            pass
        if case == 5:
            np.ones(2**28)
        if case == 6:
            np.ones(7 * 2**22)[:] = 2  # less than the limit, which is of addresses
        return "answered"

    answers = {a.case: a.what for a in pool.run(range(8), step, seconds=1, size=2**28)}
    assert list(answers) == list(range(8))
    assert re.match(r"crash: the process ended with -6; step at test_fuzz\.py:\d+; _work at pool\.py:\d+; ", answers[1])
    assert (answers[3], answers[4]) == ("slow: more than 15 s", "slow: more than 1 s")
    assert answers[5].startswith("crash")  # the exception of a step
    assert answers[6].startswith("big")
    assert all(answers[n] == "answered" for n in (0, 2, 7))


def test_what_is_garbage_before_is_left_alone() -> None:
    """As onnxruntime's sessions have to be, whose threads a forked process has not: their end is a fault there."""

    class Held:
        def __init__(self) -> None:
            self.cycle, self.process = self, os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.process:
                os.abort()

    def step(_: int) -> str:
        gc.collect()
        return "answered"

    gc.disable()
    try:
        Held()
        assert [a.what for a in pool.run(range(2), step)] == ["answered"] * 2
    finally:
        gc.enable()
        gc.collect()


WRONG = {
    "BiasAddBackward": ({"data_format": "NXC"}, [(3,)]),
    "SoftMaxBackward rank": ({"axis": 0}, [(3, 4), (1, 3, 4)]),
    "SoftMaxBackward rank of both": ({"axis": -1}, [(), ()]),
    "SoftMaxBackward axis": ({"axis": 13}, [(1, 13), (1, 13)]),
    "ReLUBackward": ({}, [(1, 3), (3,)]),
    "BatchNormForwardTraining": (
        {"epsilon": 0.5, "momentum": 0.5, "data_format": "NCX"},
        [(1, 3, 4), (3,), (1, 3), None, None],
    ),
    "BatchNormTrainingBackward": ({"epsilon": 0.5, "data_format": "NCX"}, [(1, 3, 4), (1, 3, 4), None, None, (1, 3)]),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_bodies_refuse_what_the_reference_refuses(name: str) -> None:
    """With ranks that the model does not say."""
    attributes, shapes = WRONG[name]
    inputs = [None if shape is None else np.ones(shape, np.float32) for shape in shapes]
    call = Call(name.split()[0], attributes, inputs, 0)
    assert calls.attempt(call) == "refused"


def test_wrong_calls_with_undeclared_shapes() -> None:
    assert {calls.attempt(calls.drawn(1, n)) for n in range(40)} == {"answered", "refused"}
