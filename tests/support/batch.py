"""Many small models in one session: they run together, each is compared by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto

from tests.support.renamed import joined

C, A = TypeVar("C"), TypeVar("A")
SHOWN = 5  # messages of one batch


def check_each(cases: Sequence[C], run: Callable[[Sequence[C]], Sequence[A]], check: Callable[[C, A], object]) -> None:
    """Run all cases together and check the answer of each. What is wrong runs again alone, for the message.

    A case that is right alone and wrong among the others fails too, and so do cases that run alone and not together.
    """
    try:
        answers: Sequence[A | Exception] = run(cases)
    except Exception as together:  # noqa: BLE001 - the cases that fail alone are named below
        answers = [together] * len(cases)
    wrong = []
    for case, answer in zip(cases, answers, strict=True):
        if among := _failure(check, case, answer):
            try:
                (answer,) = run([case])
                alone = _failure(check, case, answer)
            except Exception as e:  # noqa: BLE001 - it is shown
                alone = e
            where = "" if alone else f" (right alone, wrong among {len(cases)})"
            wrong.append(f"{case}{where}: {type(alone or among).__name__}: {alone or among}")
    if wrong:
        pytest.fail("\n\n".join([f"{len(wrong)} of {len(cases)} are wrong", *wrong[:SHOWN]]), pytrace=False)


def _failure(check: Callable[[C, A], object], case: C, answer: A | Exception) -> BaseException | None:
    if isinstance(answer, Exception):
        return answer
    try:
        check(case, answer)
    except (Exception, pytest.fail.Exception) as e:  # noqa: BLE001 - it is shown
        return e
    return None


def together(
    models: Sequence[ModelProto],
    feeds: Sequence[Mapping[str, np.ndarray]],
    session: Callable[[ModelProto], onnxruntime.InferenceSession],
) -> Callable[[], list[list[np.ndarray]]]:
    """A session on all models at once; a call runs it and returns the outputs of each. Feeds that nothing takes stay out."""
    opened = session(joined(models))
    accepted = {value.name for value in opened.get_inputs()}
    fed = {f"{n}/{name}": array for n, given in enumerate(feeds) for name, array in given.items()}
    fed = {name: array for name, array in fed.items() if name in accepted}

    def run() -> list[list[np.ndarray]]:
        answers = iter(opened.run(None, fed))
        return [[np.asarray(answer) for answer in islice(answers, len(model.graph.output))] for model in models]

    return run
