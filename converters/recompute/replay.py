"""What a choice of values to compute again comes to: the copies that run, when, and how much lies in memory at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.recompute.program import Buffer, GraphProgram
from onnx_backprop.opset.graphs.facts import IN_PLACE


class ImpossibleError(Exception):
    """A value would have to be computed again that cannot be."""


@dataclass(frozen=True)
class ReplayChoice:
    """dropped: saved buffers to let go after the forward part. held: others to keep, that copies read."""

    dropped: frozenset[Buffer] = frozenset()
    held: frozenset[Buffer] = frozenset()


class Replay:
    """The run of a program under a choice.

    copies_at: for every position of the backward part the nodes that run again in front of it, in order. cost: of
    these. until: by buffer of the forward part that is not as it was, the last position that reads it. memory: bytes
    that are there while each node runs.
    """

    def __init__(self, program: GraphProgram, choice: ReplayChoice) -> None:
        self.program, self.choice = program, choice
        self.copies_at: dict[int, list[ir.Node]] = defaultdict(list)
        self.copied: dict[Buffer, int] = {}  # when
        self.copy_read: dict[Buffer, int] = {}  # until when
        self.until: dict[Buffer, int] = {}
        self._within: dict[int, dict[Buffer, int]] = defaultdict(dict)  # by position, the last copy there that reads it
        for buffer in choice.dropped:
            self.until[buffer] = max((buffer.created, *buffer.read[-1:]))
        uses = [(n, buffer) for buffer in choice.dropped for n in buffer.read_back]
        # a node's buffers by their names: a set has no order
        for n, buffer in sorted(uses, key=lambda use: (use[0], use[1].created, str(use[1].value.name))):
            if buffer not in self.copied:
                self._copy(buffer, n)
            self.copy_read[buffer] = max(self.copy_read[buffer], n)
        self.cost = sum(program.costs[node] for nodes in self.copies_at.values() for node in nodes)
        self.memory = program.memory + self._changes()

    @property
    def peak(self) -> int:
        """The most that is in memory at once."""
        return int(self.memory.max(initial=0))

    def available(self, buffer: Buffer | None) -> bool:
        """Whether the copies can read what the forward part has made."""
        if buffer is None:
            return True
        if buffer in self.choice.dropped:
            return False
        program = self.program
        if buffer in self.choice.held:
            return True
        small = buffer.size <= program.small
        return (small or buffer in program.saved) and any(program.can_hold(v) for v in buffer.members)

    def _copy(self, buffer: Buffer, n: int) -> None:
        """Run the node that makes a buffer, and what that needs, in front of the node at a position."""
        stack: list[tuple[Buffer, bool]] = [(buffer, False)]
        begun: set[Buffer] = set()
        while stack:
            current, ready = stack.pop()
            if current in self.copied:
                continue
            if not ready and (current in begun or not self.program.can_copy(current.node)):
                raise ImpossibleError  # where begun, a view of it takes its own lengths
            begun.add(current)
            inputs = self.program.inputs_of(current)
            again = {read: must or not self.available(read) for read, must in inputs.items()}
            if not ready:
                stack.append((current, True))
                stack.extend((read, False) for read, must in again.items() if must and read not in self.copied)
                continue
            place = len(self.copies_at[n])
            for read, must in again.items():
                if not must:
                    self.until[read] = max(self.until.get(read, self.program.last(read)), n)
                    continue
                self.copy_read[read] = max(self.copy_read[read], n)
                if self.copied[read] == n:
                    self._within[n][read] = place
            self.copies_at[n].append(current.node)
            for value in current.node.outputs:
                original = self.program.buffer_of.get(value)
                if original is not None and original not in self.copied:
                    self.copied[original] = self.copy_read[original] = n

    def _changes(self) -> np.ndarray:
        program = self.program
        delta = np.zeros(len(program.nodes) + 1, np.int64)
        for buffer, last in self.until.items():
            before, now = program.end(buffer, program.last(buffer)), program.end(buffer, last)
            if before != now:
                low, high = sorted((before, now))
                size = buffer.size if now > before else -buffer.size
                delta[low + 1] += size
                delta[high + 1] -= size
        for buffer, n in self.copied.items():
            if self.copy_read[buffer] > n or buffer in self.choice.dropped:
                delta[n] += buffer.size
                delta[program.end(buffer, max(self.copy_read[buffer], n)) + 1] -= buffer.size
        result = np.cumsum(delta)[:-1]
        for n, nodes in self.copies_at.items():
            result[n] += self._passing(n, nodes)
        return result

    def _passing(self, n: int, nodes: Iterable[ir.Node]) -> int:
        """The most that the copies in front of a position need for what no later node reads."""
        live, most = 0, 0
        within = self._within[n]
        for place, node in enumerate(nodes):
            outputs = [self.program.buffer_of[v] for v in node.outputs if v in self.program.buffer_of]
            new = sum(b.size for b in outputs if self._passes(b, n))
            gone = [b for b, last in within.items() if last == place and self._passes(b, n)]
            over = node in IN_PLACE and any(b.size == outputs[0].size for b in gone)
            live += new
            most = max(most, live - (outputs[0].size if over else 0))
            live -= sum(b.size for b in gone) + sum(b.size for b in outputs if self._passes(b, n) and b not in within)
        return most

    def _passes(self, buffer: Buffer, n: int) -> bool:
        return self.copy_read[buffer] == n and buffer not in self.choice.dropped and self.copied[buffer] == n
