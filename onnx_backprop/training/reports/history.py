"""What a training has been like: a record for every step, as a table in a file and as a plot."""

import csv
import io
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from onnx_backprop.converters.pages import Points, chart, fragment
from onnx_backprop.converters.pages import text as escaped
from onnx_backprop.converters.prepare.writing.files import check_writable
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import replacing

_FEW = 10  # numbers of an array that are shown
_POINTS = 1024  # even; of a curve that grows with every step


class Measured(float):
    """The loss of an evaluation. metrics: the number, or the array of numbers, of each metric by its name."""

    metrics: dict[str, Any]

    def __new__(cls, loss: float, metrics: Mapping[str, Any] | None = None) -> Self:
        """The loss and the metrics."""
        result = super().__new__(cls, loss)
        result.metrics = dict(metrics or {})
        return result

    def __repr__(self) -> str:
        """The loss, and the metrics beside it; `format` and `%` take the loss alone."""
        metrics = ", ".join(f"{name} {_short(value)}" for name, value in self.metrics.items())
        return f"{float(self)!r} ({metrics})" if metrics else repr(float(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle and copy need."""
        return type(self).__new__, (type(self), float(self)), vars(self)


def _short(value: Any) -> str:
    """A metric in a few characters."""
    if isinstance(value, int | float):
        return f"{value:.4g}"
    few = value.ndim == 1 and value.size <= _FEW
    return f"[{', '.join(f'{number:.4g}' for number in value)}]" if few else f"of shape {list(value.shape)}"


class TokenLoss(Measured):
    """A mean over tokens; `metrics` has its perplexity. tokens: how many, or the sum of their weights."""

    tokens: float

    def __new__(cls, loss: float, tokens: float = 0.0, metrics: Mapping[str, Any] | None = None) -> Self:
        """Loss, tokens and metrics."""
        result = super().__new__(cls, loss)
        result.tokens = tokens
        result.metrics = {"perplexity": result.perplexity, **(metrics or {})}
        return result

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where float64 does not hold it."""
        try:
            return math.exp(self)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Record:
    """One step. evaluation: the loss of the evaluation data, where it was measured behind this step.

    skipped: how many steps up to this one have left out their update; None where the loss is not scaled.
    metrics: of the evaluation, by name: numbers, and lists of numbers.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    evaluation: float | None = None
    skipped: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """exp(evaluation) where that is a mean over tokens."""
        return self.metrics.get("perplexity")

    def known(self) -> dict[str, Any]:
        """What there is of it by name, metrics beside the rest, without what is None."""
        plain = {name: getattr(self, name) for name in COLUMNS}
        return {name: value for name, value in (plain | self.metrics).items() if value is not None}


class Records(list[Record]):
    """The records of a training, one for every step; a notebook shows the curve of their losses."""

    def __repr__(self) -> str:
        """How many there are, and what the loss was in the first and in the last."""
        if not self:
            return "<Records: no steps>"
        first, last = self[0], self[-1]
        return f"<Records: steps {first.step} … {last.step}, loss {first.loss:.4g} -> {last.loss:.4g}>"

    def curves(self) -> dict[str, dict[str, Points]]:
        """Curves over the steps by the name of their axis: losses, each metric that is a number, the learning rate."""
        losses: dict[str, Points] = {"loss": [(r.step, r.loss) for r in self]}
        if measured := [(r.step, r.evaluation) for r in self if r.evaluation is not None]:
            losses["evaluation"] = measured
        result: dict[str, dict[str, Points]] = {"loss": losses}
        for name in dict.fromkeys(name for r in self for name in r.metrics):
            points = [(r.step, r.metrics[name]) for r in self if isinstance(r.metrics.get(name), int | float)]
            if points:
                result[name] = {name: points}
        result["learning rate"] = {"learning rate": [(r.step, r.learning_rate) for r in self]}
        return result

    def chart(self) -> str:
        """Losses over steps, metrics, and the learning rate, as a part of a page."""
        if not self:
            return "<p>nothing was measured</p>"
        ends = float(self[0].step), float(self[-1].step)
        return "".join(chart(curves, "step", y, ends=ends) for y, curves in self.curves().items())

    def summary(self) -> str:
        """What came of it, in lines: steps and time, losses at first and in the end, the best of each evaluation."""
        if not self:
            return "no steps"
        seconds = sum(r.seconds for r in self)
        lines = [f"steps: {len(self):,} in {seconds:.1f} s", f"loss: {self[0].loss:.4g} -> {self[-1].loss:.4g}"]
        for name, curves in self.curves().items():
            points = curves.get("evaluation" if name == "loss" else name, ())
            if points and name != "learning rate":
                what = "evaluation" if name == "loss" else name
                values = [value for _, value in points]
                lines.append(f"{what}: {values[0]:.4g} -> {values[-1]:.4g} ({min(values):.4g} … {max(values):.4g})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return fragment(f"<p>{escaped(repr(self)[1:-1])}</p>", self.chart())


class Losses:
    """The losses of all steps so far in a bounded number of points: means of runs of 1, 2, 4, … steps."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.last = math.nan
        self._each, self._run = 1, array("d")

    def __repr__(self) -> str:
        """How many points there are, and the last loss."""
        return f"<Losses: {len(self.points)} points, the last loss {self.last:.4g}>"

    def add(self, step: int, loss: float) -> None:
        """The loss of a step behind all those that came before."""
        self.last = loss
        self._run.append(loss)
        if len(self._run) == self._each:
            self.points.append((step - (self._each - 1) / 2, sum(self._run) / self._each))
            del self._run[:]
            if len(self.points) == _POINTS:
                pairs = zip(self.points[::2], self.points[1::2], strict=True)
                self.points = [((a + b) / 2, (x + y) / 2) for (a, x), (b, y) in pairs]
                self._each *= 2


COLUMNS = tuple(f.name for f in fields(Record) if f.name != "metrics")


class Log:
    """A file that gets a line for every record: CSV, or JSON lines where the name ends in .jsonl.

    A file that is there already keeps the records of the steps before `start` and loses the others, which a training
    resumed from an earlier checkpoint goes through once more.
    """

    def __init__(self, path: str | Path, *, start: int, metrics: Sequence[str] = ()) -> None:
        """metrics: names that have a column.

        Errors: InvalidArgumentError for another suffix, or a file that cannot be written or is no log.
        """
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise InvalidArgumentError(f"log: expected a name that ends in .csv or .jsonl, got {self.path.name}")
        check_writable(path)
        try:
            kept = [r for r in read_log(self.path) if r.step < start] if self.path.is_file() and start else []
            self._metrics = tuple(dict.fromkeys([*metrics, *(name for r in kept for name in r.metrics)]))
            text = ("" if self._json else _row((*COLUMNS, *self._metrics))) + "".join(map(self._line, kept))
            with replacing(self.path) as (file,):
                file.write(text.encode())
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as e:
            raise InvalidArgumentError(f"cannot write the log {path}: {e.strerror or e}") from e

    @property
    def _json(self) -> bool:
        return self.path.suffix == ".jsonl"

    def _line(self, record: Record) -> str:
        known = record.known()
        if self._json:
            return json.dumps(known) + "\n"
        return _row(["" if (v := known.get(name)) is None else repr(v) for name in (*COLUMNS, *self._metrics)])

    def write(self, record: Record) -> None:
        """Append a record; the line is with the system when this returns, or InvalidArgumentError says why not."""
        with self._refusing_os_errors():
            self._file.write(self._line(record))
            self._file.flush()

    def close(self) -> None:
        """Bring everything to the disk."""
        with self._refusing_os_errors(), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextmanager
    def _refusing_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise InvalidArgumentError(f"cannot write the log {self.path}: {e.strerror or e}") from e


def _row(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def read_log(path: str | Path) -> list[Record]:
    """The records of a log; a last line that a killed process has left unfinished is passed over."""
    lines_of_json = Path(path).suffix == ".jsonl"
    start = "{" if lines_of_json else ",".join(COLUMNS)
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = text.split("\n")[:-1]
        if lines_of_json:
            records = [_of_known(json.loads(line)) for line in lines]
        else:
            header, *rows = csv.reader(lines) if lines else [[]]
            names = (*COLUMNS, *header[len(COLUMNS) :])
            records = [_of_known({n: _parsed(t) for n, t in zip(names, row, strict=False) if t}) for row in rows]
    except (ValueError, TypeError, csv.Error) as e:
        raise InvalidArgumentError(f"{path} is no log: {e}") from e
    if text and not text.startswith(start):
        raise InvalidArgumentError(f"{path} is no log: expected it to start with {start}")
    return records


def _of_known(known: dict[str, Any]) -> Record:
    """The record that `known` has given."""
    metrics = {name: value for name, value in known.items() if name not in COLUMNS}
    return Record(**{name: value for name, value in known.items() if name in COLUMNS}, metrics=metrics)


def _parsed(text: str) -> Any:
    """A number, or a list of them, as `repr` writes it: NaN and infinity have no form in JSON of their own there."""
    if text.startswith("["):
        return json.loads(text.replace("nan", "NaN").replace("inf", "Infinity"))
    try:
        return int(text)
    except ValueError:
        return float(text)
