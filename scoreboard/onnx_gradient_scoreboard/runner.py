"""Asks producers, each in a process of its own environment, within limits of time and memory."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from onnx_gradient_scoreboard.cases import Case, operators
from onnx_gradient_scoreboard.networks import networks
from onnx_gradient_scoreboard.producers import Producer
from onnx_gradient_scoreboard.questions import KINDS, Question, ask, cotangents
from onnx_gradient_scoreboard.reference import Reference, reference
from onnx_gradient_scoreboard.verdicts import verdict
from onnx_gradient_scoreboard.worker import pack_question, unpack

SECONDS = 900.0  # of the clock: what waits for nothing and computes nothing is slow too; see worker.SECONDS
_ONE_AT_A_TIME = threading.Lock()  # of what all producers share: cases and references
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """One cell: a question of a case to a producer, and its verdict; "not asked" with the reason."""

    case: str
    operator: str
    attributes: str
    question: str
    opset: int
    verdict: str
    text: str


class ProducerError(RuntimeError):
    """A producer whose adapter cannot be imported in its environment."""


class Worker:
    """The process of a producer, started when it is first asked and again after it ended."""

    def __init__(self, producer: Producer, python: Path) -> None:
        self.producer, self.python = producer, python
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Question) -> tuple[dict, dict[str, np.ndarray]] | str:
        """Header and arrays of its answer, or "crashed", or "slow"."""
        if self.process is None:
            paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
            command = [str(self.python), "-m", "onnx_gradient_scoreboard.worker", self.producer.adapter]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
            started = self._receive()
            if isinstance(started, str):
                raise ProducerError(f"{self.producer.name} does not start ({started}): {' '.join(command)}")
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(pack_question(question))
        except BrokenPipeError:
            return self._ended("crashed")
        return self._receive()

    def _receive(self) -> tuple[dict, dict[str, np.ndarray]] | str:
        deadline, buffer = time.monotonic() + SECONDS, b""
        assert self.process is not None
        assert self.process.stdout is not None
        while len(buffer) < 8 or len(buffer) < 8 + struct.unpack("<Q", buffer[:8])[0]:
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                return self._ended("slow")
            part = self.process.stdout.read(1 << 20)
            if not part:
                return self._ended("slow" if self.process.wait() == -signal.SIGPROF else "crashed")
            buffer += part
        return unpack(buffer[8:])

    def _ended(self, how: str) -> str:
        self.close()
        return how

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@cache
def _known(name: str, by_first: bool) -> tuple[Case, Reference | str]:
    case = cases()[name]
    if by_first and len(case.inputs) > 1:
        case = replace(case, inputs=case.inputs[:1])
        return case, reference(case)
    return _known(name, False) if by_first else (case, reference(case))


def known(name: str, *, by_first: bool) -> tuple[Case, Reference | str]:
    """A case, as it is or by its first input alone, with its reference, or why it is not asked."""
    with _ONE_AT_A_TIME:
        return _known(name, by_first)


@cache
def cases() -> dict[str, Case]:
    """Networks and operators, by name."""
    return networks() | operators()


def chosen(each: int) -> list[str]:
    """Names of cases, at most so many of an operator, spread over those that there are; 0: all."""
    by_operator = defaultdict[str, list[str]](list)
    for name, case in operators().items():
        by_operator[case.operator].append(name)
    spread = (names[:: -(-len(names) // each) if each else 1] for names in by_operator.values())
    return [*networks(), *(name for names in spread for name in names)]


def results(worker: Worker, names: Sequence[str], kinds: Sequence[str] = KINDS) -> Iterator[Result]:
    """Every question of the cases that a producer is asked, one after the other."""
    for name in names:
        for kind in kinds:
            if kind in worker.producer.asked:
                yield _result(worker, name, kind)


def _result(worker: Worker, name: str, kind: str) -> Result:
    producer = worker.producer
    case, expected = known(name, by_first=producer.files)
    first, last = producer.opsets
    opset = max((o for o in case.opsets if first <= o <= last), default=0)
    used = {node.op_type for node in case.model.graph.node}
    reasons = [f"{op}: {why}" for op, why in producer.passes.items() if op in used]
    if opset == 0:
        reasons.append(f"at opset {case.opsets[0]} to {case.opsets[-1]}, it documents {first} to {last}")
    if isinstance(expected, str):
        reasons.append(f"no sure reference: {expected}")
    elif kind == "second" and expected.second is None:
        reasons.append("no sure second differences")
    if reasons or isinstance(expected, str):
        return _record(case, kind, opset, "not asked", "; ".join(reasons))
    by_weights = "inputs" not in producer.asked
    chosen = {n: expected.seeds[n] for n in case.inputs} if kind == "jvp" else cotangents(case, expected.seeds)
    question = ask(case, kind, opset, expected.seeds if kind == "second" else chosen, by_weights=by_weights)
    answer = worker.ask(question)
    if isinstance(answer, str):
        return _record(case, kind, opset, answer, "")
    return _record(case, kind, opset, *verdict(case, question, expected, *answer, producer.package))


def _record(case: Case, kind: str, opset: int, what: str, text: str) -> Result:
    text = text if len(text) < 600 else f"{text[:300]} … {text[-300:]}"
    return Result(case.name, case.operator, case.attributes(), kind, opset, what, text)
