"""What a check of gradients found."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto

from onnx_backprop.converters import pages
from onnx_backprop.converters.check.differences import KINK, RIGHT, UNDECIDED, WRONG, Answer
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.tables import table, wrapped
from onnx_backprop.opset.core.errors import InvalidArgumentError

_ROWS = 30  # that a page lists at once
_SEVERITY = {RIGHT: 0, KINK: 1, UNDECIDED: 1, WRONG: 2}


@dataclass(frozen=True)
class Result:
    """The verdict for one variable, or for some together.

    variables: their names. answer: the verdict with its numbers. note: what there is to say beside them.
    """

    variables: str
    answer: Answer
    note: str = ""

    @property
    def verdict(self) -> str:
        """`right`, `wrong`, `undecided`, or `kink`: the point lies on a kink, where differences show no gradient."""
        return self.answer.verdict

    @property
    def badness(self) -> tuple[int, float]:
        """Orders results from right to worst."""
        error = self.answer.error
        return _SEVERITY[self.verdict], math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class NodeResult:
    """The worst verdict among the inputs of one node, checked alone; rounding: the largest error of its gradients."""

    op_type: str
    node: str
    worst: Result
    rounding: float = 0.0

    @property
    def verdict(self) -> str:
        """As that of a `Result`."""
        return self.worst.verdict

    @property
    def badness(self) -> tuple[int, float]:
        """Orders results from right to worst."""
        return self.worst.badness


@dataclass(frozen=True)
class Rounding:
    """How far a gradient g of the model's float type is from g₆₄, that of the same graph in float64.

    largest: max |g - g₆₄| / max |g₆₄|. typical: the same of root mean squares. size: max |g₆₄|. Where g₆₄ is zero, the
    differences themselves.
    """

    variable: str
    largest: float
    typical: float
    size: float

    def __str__(self) -> str:
        if self.largest > 1:
            return f"gradient of {self.variable}: nothing but rounding, of {self.largest * self.size:.1e}"
        return f"gradient of {self.variable}: an error of at most {self.largest:.1e} of its largest entry"


@dataclass(frozen=True, repr=False)
class GradientReport:
    """The result of `check_gradients`; `print` shows it as tables.

    results: a verdict for each variable, or group of variables. forward: what the gradients were compared with. seed:
    repeats the check. nodes: a verdict for each checked node, the worst first. repro: the smallest sub-model whose
    gradients are wrong, with its inputs' values as defaults, or None. rounding: of each variable, the largest error
    first, if requested.
    """

    results: tuple[Result, ...]
    forward: str
    seed: int
    nodes: tuple[NodeResult, ...] = ()
    repro: ModelProto | None = field(default=None, repr=False)
    rounding: tuple[Rounding, ...] = ()

    @property
    def verdict(self) -> str:
        """`wrong` if the whole model or any node is; `right` if the whole is; else `undecided`.

        If the differences of the whole model are undecided, it is right if all nodes that were checked are.
        """
        whole = verdict_of(self.results)
        nodes = verdict_of([node.worst for node in self.nodes])
        if WRONG in (whole, nodes):
            return WRONG
        return RIGHT if whole == RIGHT or (self.nodes and nodes == RIGHT) else UNDECIDED

    @property
    def ok(self) -> bool:
        """Whether the gradients are right."""
        return self.verdict == RIGHT

    def save_repro(self, path: str | Path) -> None:
        """Write `repro`; the file appears complete or not at all. InvalidArgumentError when there is none."""
        if self.repro is None:
            raise InvalidArgumentError("there is no sub-model to save: nothing is wrong")
        save_model(self.repro, path)

    def __str__(self) -> str:
        lines = [f"gradients: {self.verdict} (compared with differences in {self.forward}; seed {self.seed})", ""]
        cells = [(r.variables, *_row(r)) for r in self.results]
        lines += table(("variable", *_NUMBERS), cells)
        if self.rounding:
            lines += ["", *table(_ROUNDING, _rounding_rows(self.rounding))]
        if self.verdict == RIGHT and verdict_of(self.results) != RIGHT:
            lines += ["", "Not all differences of the whole model settle, for kinks or rounding; each node is right."]
        if self.nodes:
            cells = [(n.op_type, n.node, n.worst.variables, *_row(n.worst)) for n in self.nodes]
            lines += ["", *table(("operator", "node", "worst input", *_NUMBERS), cells)]
        if self.nodes and self.rounding:
            alone = sorted(self.nodes, key=lambda node: -node.rounding)
            lines += ["", *table(_ALONE, [(n.op_type, n.node, f"{n.rounding:.1e}") for n in alone])]
        return wrapped("\n".join(lines))

    def __repr__(self) -> str:
        """The verdict, in one line."""
        right = sum(result.verdict == RIGHT for result in self.results)
        nodes = f", {len(self.nodes)} nodes checked" if self.nodes else ""
        return f"<GradientReport: {self.verdict}, {right} of {len(self.results)} variables right{nodes}>"

    def html(self) -> str:
        """The tables as a part of a page; bars: errors from 10⁻⁸ to 1, logarithmic."""
        facts = {"gradients": self.verdict, "compared with": f"differences in {self.forward}", "seed": str(self.seed)}
        parts = [pages.facts(facts), "<p>Bars are errors from 10⁻⁸ to 1, on a logarithmic scale.</p>"]
        parts.append(
            pages.table(("variable", *_NUMBERS), [(r.variables, *_cells(r)) for r in self.results], most=_ROWS)
        )
        if self.rounding:
            parts += ["<h2>Rounding</h2>", pages.table(_ROUNDING, _rounding_rows(self.rounding), most=_ROWS)]
        if self.nodes:
            rows = [(n.op_type, n.node, n.worst.variables, *_cells(n.worst)) for n in self.nodes]
            header = ("operator", "node", "worst input", *_NUMBERS)
            parts += ["<h2>Nodes, the worst first</h2>", pages.table(header, rows, most=_ROWS)]
        return "".join(parts)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return pages.fragment(self.html())


def verdict_of(results: Sequence[Result]) -> str:
    """`wrong` when any result is, `right` when all are, else `undecided`."""
    verdicts = {result.verdict for result in results}
    if WRONG in verdicts:
        return WRONG
    return RIGHT if verdicts <= {RIGHT} else UNDECIDED


_ALONE = ("operator", "node", "rounding of its gradient alone")
_ROUNDING = ("rounding beside float64", "largest error", "typical error", "largest entry")


def _rounding_rows(rounding: Sequence[Rounding]) -> list[tuple[str, ...]]:
    return [(r.variable, f"{r.largest:.1e}", f"{r.typical:.1e}", f"{r.size:.3g}") for r in rounding]


_NUMBERS = ("verdict", "error", "differences", "gradient", "directions", "")


def _cells(result: Result) -> tuple[pages.Cell, ...]:
    verdict, error, *others = _row(result)
    good = {RIGHT: True, WRONG: False}.get(verdict)
    size = result.answer.error
    share = 1 + math.log10(size) / 8 if 0 < size < math.inf else float(size > 0)
    return pages.Verdict(verdict, good), pages.Bar(error, share), *others


def _row(result: Result) -> tuple[str, ...]:
    answer = result.answer
    numbers = (f"{answer.error:.1e}", f"{answer.expected:.6g}", f"{answer.got:.6g}")
    right, tried = answer.directions
    texts = [text if text != "nan" else "-" for text in numbers]
    note = result.note or ("hardly any influence" if answer.faint and answer.verdict == RIGHT else "")
    return answer.verdict, *texts, f"{right} of {tried}" if tried else "-", note
