"""What `gather.kernel` sums: phases, the taps of each, and how far they reach. Plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, product

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.convolution.parameters import Gather
from onnx_backprop.ort_ops.convolution.problem import Correlation, Triple, three
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP, SIDE
from onnx_backprop.ort_ops.vector.stencil import FORMS

MOST_REACHED = 0.94  # of the taps of all cells of a row, where those that are not are left out


@dataclass(frozen=True)
class Tap:
    """A cell of the kernel, and how far from its own cell a result reads there."""

    kernel: Triple
    shift: Triple


@dataclass(frozen=True)
class Phase:
    """Out cells that the same taps reach: where they start, how many there are."""

    start: Triple
    count: Triple
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Reach:
    """What a band reads: least and greatest shift, residues of the cells modulo the step."""

    low: Triple
    high: Triple
    residues: int

    def box(self, band: Sequence[int], steps: Triple) -> list[int]:
        """Lengths of what a band of such lengths reads."""
        return [(b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, steps, self.low, self.high, strict=True)]


@dataclass(frozen=True)
class Sums:
    """The sums of one plan, and what decides how they are computed.

    as_cells: of NCX data, as of NXC. matrices: in registers of whole matrices. columns: cells are theirs, in place.
    """

    head: Gather
    phases: list[Phase]
    as_cells: bool
    matrices: bool = False
    columns: bool = False

    @property
    def c(self) -> Correlation:
        """What is read is the source, what is written the destination."""
        return self.head.c

    @property
    def depthwise(self) -> bool:
        """Whether channels are lanes, or a small kernel slides; others of one channel per group are products."""
        return self.c.depthwise and (self.cells or self.stencil > 0)

    @property
    def in_pairs(self) -> bool:
        """Whether `columns` may be: no tap shifts, and cells, or pairs with a stride of 2, follow one another."""
        c, steps = self.c, self.head.step
        if not self.matrices or self.head.kind != F32 or len(self.phases) > 1 or not self.all_taps:
            return False
        if c.source.cells[2] != 1 or c.destination.cells[2] != 1 or self.head.out_step[2] != 1 or steps[2] > 2:
            return False
        along = [residue[2] for (taps,) in [self.shifted] for _, residue in taps]
        if along != [0, 1][: steps[2]] * (len(along) // steps[2]):
            return False
        ends = zip(self.count, steps, per_axis(max, self.residues), c.source_length, strict=True)
        return self.reach.low == self.reach.high == (0, 0, 0) and all((n - 1) * s + r < end for n, s, r, end in ends)

    @property
    def beside(self) -> int:
        """Images whose cells alternate along x, so that a row of them fills a tile's; 1 where that saves no tiles."""
        c, steps, (images, rows, length) = self.c, {*self.head.step, *self.head.out_step}, self.count
        dense = self.head.kind == F32 and c.source.cells[2] == c.destination.cells[2] == 1 and steps == {1}
        spread = self.reach.high[2] - self.reach.low[2]  # up to 8, a plane's end has zeros enough
        if not self.matrices or self.columns or self.tall or c.source.n or not dense or rows < 2 or spread > 8:
            return 1
        beside = max((n for n in (2, 4) if n <= images and n * length <= SIDE // 2), default=1)
        return beside if rows < 2 * beside * math.ceil((rows * (length + spread - 1) + 1 - spread) / COLUMNS) - 1 else 1

    @property
    def in_runs(self) -> bool:
        """Whether taps that follow one another are summed as channels: of a single one, a tap would be a short sum."""
        return self.c.s == 1 and not self.depthwise and not self.matrices

    @property
    def cells(self) -> bool:
        """Whether output channels, not cells, are the columns of the product."""
        return self.c.last or self.as_cells

    @property
    def blocked(self) -> bool:
        """Whether blocks of channels take the place of groups: depthwise, with channels as lanes."""
        return self.c.depthwise and self.cells

    @property
    def in_place(self) -> bool:
        """Whether nothing is copied."""
        return self.c.depthwise and self.c.last and self.head.kind == F32

    @cached_property
    def count(self) -> Triple:
        """Cells of the longest phase along each axis."""
        return per_axis(max, [phase.count for phase in self.phases])

    @cached_property
    def all_taps(self) -> int:
        return sum(len(phase.taps) for phase in self.phases)

    @property
    def tile(self) -> int:
        """Output channels of a tile; of planes, no more than there are: the weights of all taps are packed together."""
        return SIDE if self.matrices else COLUMNS if self.cells else TILE_ROWS[min(self.c.d, ROWS)]

    @property
    def tall(self) -> bool:
        """Whether tiles in registers of matrices have twice the cells and half the output channels."""
        return self.matrices and self.c.d <= SIDE // 2

    @property
    def depth(self) -> int:
        """Channels that are summed for a tap: with zeros up to whole groups in registers of matrices."""
        depth = DEPTH // self.head.step[2] if self.columns else DEPTH
        return math.ceil(self.c.s / depth) * depth if self.matrices else self.c.s

    @property
    def tap_floats(self) -> int:
        """Of the packed weights of a tap, for a tile."""
        return self.depth * GROUP // (4 * DEPTH) if self.matrices else self.c.s * self.tile

    @property
    def panel_bytes(self) -> int:
        """Of the packed weights of a tile."""
        return 4 * self.all_taps * self.tap_floats

    @cached_property
    def shifted(self) -> list[list[tuple[Triple, Triple]]]:
        """(shift, residue) of the taps of every phase."""
        return [shifts(phase, self.head.step, quotients=self.matrices or not self.cells) for phase in self.phases]

    @cached_property
    def residues(self) -> list[Triple]:
        return sorted({residue for taps in self.shifted for _, residue in taps}) or [(0, 0, 0)]

    @cached_property
    def reach(self) -> Reach:
        every = [shift for taps in self.shifted for shift, _ in taps]
        return Reach(per_axis(min, every), per_axis(max, every), len(self.residues))

    @property
    def exact(self) -> bool:
        """Whether taps beyond the ends of rows are left out, where they are many: it takes tiles of their own.

        Not of long kernels, of which nearly every cell of a row reaches other taps: tiles of single cells wait.
        """
        if self.in_runs or not self.cells or len({tap.shift[2] for phase in self.phases for tap in phase.taps}) > 3:
            return False
        step, length = self.head.step[2], self.c.source_length[2]
        cells = [(phase.count[2], tap.shift[2]) for phase in self.phases for tap in phase.taps]
        reached = sum(max(0, min(n, (length - 1 - s) // step + 1) - max(0, -(s // step))) for n, s in cells)
        return reached < MOST_REACHED * sum(n for n, _ in cells)

    @cached_property
    def stencil(self) -> int:
        """Which form of `vector.stencil` slides the kernel over the planes as they lie in memory; 0 if none does."""
        c, outs, forms = self.c, self.head.out_step, [self._form(axis) for axis in (1, 2)]
        (low_z, low, _), (high_z, high, _) = self.reach.low, self.reach.high
        dense = self.head.kind == F32 and c.source.cells[2] == c.destination.cells[2] == 1
        if not c.depthwise or not dense or set(self.head.step) != {1} or low_z < high_z or c.source_length[2] >= 2**31:
            return 0
        fits = (n for n, f in FORMS.items() if forms == [f, f] and outs == (1, len(f), len(f)))
        return next((n for n in fits if high - low == max(map(max, FORMS[n]))), 0)

    def _form(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Of every residue along an axis which of all shifts, in their order, its taps have."""
        shifts = {phase.start[axis]: {tap.shift[axis] for tap in phase.taps} for phase in self.phases}
        every = sorted(set().union(*shifts.values()))
        return tuple(tuple(every.index(shift) for shift in sorted(some)) for some in shifts.values())


def forward_phase(c: Correlation) -> Phase:
    """The only one of a correlation."""
    axes = [[(k, k * d - p) for k in range(n)] for n, d, p in zip(c.kernel, c.dilations, c.pads, strict=True)]
    taps = tuple(Tap((kz, ky, kx), (oz, oy, ox)) for (kz, oz), (ky, oy), (kx, ox) in product(*axes))
    return Phase((0, 0, 0), c.out_length, taps)


def data_phases(c: Correlation) -> list[Phase]:
    """The source cells of equal residues, with the kernel cells that reach them."""
    phases = []
    for z, y, x in product(*(_axis_phases(c, axis) for axis in range(3))):
        taps = tuple(
            Tap((kz, ky, kx), (oz, oy, ox))
            for (kz, oz), (ky, oy), (kx, ox) in product(z[2][::-1], y[2][::-1], x[2][::-1])  # shifts ascend
        )
        phases.append(Phase((z[0], y[0], x[0]), (z[1], y[1], x[1]), taps))
    return phases


def _axis_phases(c: Correlation, axis: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(first source cell, number of cells, [(kernel cell, shift of the destination cell)]) per residue."""
    stride, dilation, pad = c.strides[axis], c.dilations[axis], c.pads[axis]
    length = c.source_length[axis]
    result = []
    for r in range(min(stride, length)):
        reach = [(k, r + pad - k * dilation) for k in range(c.kernel[axis])]
        taps = [(k, at // stride) for k, at in reach if at % stride == 0]
        result.append((r, (length - r + stride - 1) // stride, taps))
    return result


def shifts(phase: Phase, steps: Triple, *, quotients: bool) -> list[tuple[Triple, Triple]]:
    """(shift, residue) of every tap; as quotients the cells of a residue modulo the step lie in planes of their own."""
    if not quotients:
        return [(tap.shift, (0, 0, 0)) for tap in phase.taps]
    pairs = [[divmod(shift, step) for shift, step in zip(tap.shift, steps, strict=True)] for tap in phase.taps]
    return [(three([q for q, _ in tap], 0), three([r for _, r in tap], 0)) for tap in pairs]


def sorted_by_residue(phase: Phase, steps: Triple) -> Phase:
    """The taps that read the same plane of a copy one after the other."""

    def key(tap: Tap) -> tuple[int, int, int, int]:
        z, y, x = tap.shift
        return z, y, x % steps[2], x

    return replace(phase, taps=tuple(sorted(phase.taps, key=key)))


def run_of(shifted: Sequence[tuple[Triple, Triple]]) -> tuple[int, int]:
    """(taps of a run along x, cells from one to the next): runs of one length that have all taps; (1, 0) without."""
    runs = [list(taps) for _, taps in groupby(shifted, lambda tap: (*tap[0][:2], tap[1]))]
    steps = {b[0][2] - a[0][2] for run in runs for a, b in pairwise(run)}
    if len({len(run) for run in runs}) != 1 or len(steps) != 1:
        return 1, 0
    return len(runs[0]), steps.pop()


def per_axis(choose: Callable[..., int], triples: Sequence[Triple]) -> Triple:
    """Of each axis what is chosen of all."""
    return three([choose(column) for column in zip(*triples, strict=True)] if triples else [], 0)
