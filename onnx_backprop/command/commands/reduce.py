"""`onnx-backprop reduce`: write the smallest part of a model with which a command still fails."""

import argparse
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from onnx import ModelProto

from onnx_backprop.command.options import say, shared
from onnx_backprop.command.parser import Command, argument
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.diagnosis.reduce import reduce
from onnx_backprop.opset.core.errors import InvalidArgumentError

_MODEL = "{}"
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # names and numbers, which may be others in a part of the model


class _Failure:
    """What a command does with a model, and whether it does the same with another."""

    def __init__(self, text: str, words: str | None, folder: Path, seconds: float) -> None:
        self._words, self._seconds, self._path = words, seconds, folder / "model.onnx"
        self._command = [part.replace(_MODEL, str(self._path)) for part in shlex.split(text)]
        self._wanted: tuple[int, str] | None = None
        self.others: Counter[str] = Counter()  # last lines of other failures

    def __call__(self, model: ModelProto) -> bool:
        save_model(model, self._path)
        outcome = self._outcome()
        if self._wanted is None and outcome[0]:
            self._wanted = outcome
        elif outcome[0] and outcome != self._wanted:
            self.others[outcome[1]] += 1
        return outcome == self._wanted

    def _outcome(self) -> tuple[int, str]:
        """The exit code, 0 without the words, and the last line without names and numbers."""
        try:
            done = subprocess.run(
                self._command, capture_output=True, text=True, errors="replace", timeout=self._seconds
            )
        except subprocess.TimeoutExpired:
            return -1, "too slow"
        except OSError as e:
            raise InvalidArgumentError(f"--failing: {self._command[0]} does not run: {e.strerror}") from e
        text = done.stderr or done.stdout
        if self._words is not None:
            return (done.returncode if self._words in done.stdout + done.stderr else 0), ""
        last = (text.strip().splitlines() or [""])[-1]
        return done.returncode, _PARTICULAR.sub("…", last)


def run(arguments: argparse.Namespace) -> int:
    """Write the part."""
    if _MODEL not in arguments.failing:
        raise InvalidArgumentError(
            f"--failing: expected {_MODEL} where the model's path is to stand, got {arguments.failing!r}"
        )
    with tempfile.TemporaryDirectory() as folder:
        fails = _Failure(arguments.failing, arguments.words, Path(folder), arguments.seconds)
        small = reduce(arguments.model, fails, progress=lambda count: say(arguments, f"{count} nodes"))
    save_model(small, arguments.output)
    for line, count in fails.others.most_common(1):
        say(
            arguments, f"{sum(fails.others.values())} parts failed otherwise and were not kept, {count} of them: {line}"
        )
    say(arguments, f"written: {arguments.output}, {len(small.graph.node)} nodes with which the command fails alike")
    return 0


COMMAND = Command(
    description="Removes nodes of the main graph, then outputs, as long as the command fails in the same way: with the "
    "same exit code, not 0, and the same last line except for names and numbers.",
    run=run,
    arguments=[
        *shared("model"),
        argument("-o", "--output", metavar="OUT.onnx", required=True, help="the model to write", file="written model"),
        argument(
            "--failing",
            metavar="COMMAND",
            required=True,
            help="the failing command, with {} for the model, as 'onnx-backprop convert {} -o t.onnx --force'",
        ),
        argument(
            "--words", help="text that its output must contain (default: its last line, except for names and numbers)"
        ),
        argument("--seconds", default=300.0, least=0, help="a longer run counts as another failure (%(default)s)"),
        *shared("--limit", "--force", "--quiet"),
    ],
)
