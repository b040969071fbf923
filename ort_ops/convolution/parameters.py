"""The numbers of a convolution's plan, as records for compiled loops.

Triples are one number per spatial axis z, y, x; missing axes come first and have length 1. Strides of tensors are in
elements, tables lie so many bytes behind the record. "in" is what a kernel reads, "out" what it writes; channels are
those of a group.
"""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.records import Record, Triple, size
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS

NONE: Triple = (0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class GatherOffsets(Record):
    """Of a thread's scratch; 0 for what the loops of a plan have no use for."""

    tile: int = 0  # of a product
    rows: int = 0  # where the rows of its left operand start
    segments: int = 0  # of every tap, where its weights and what it reads start
    reaching: int = 0  # those of them that reach the image
    weights: int = 0  # of all taps
    shifts: int = 0  # of every tap, where what it reads starts
    start: int = 0  # bias
    results: int = 0
    lines: int = 0  # results as rows of a channel
    copy: int = 0  # of what a band reads
    zeros: int = 0  # a row beyond the image
    configuration: int = 0  # of registers of matrices


@dataclass(frozen=True, kw_only=True)
class Gather(Record):
    """A sum over the taps of a kernel: what is read is the source, what is written the destination of `c`.

    Data and weights are inputs 0 and 1.
    """

    kind: int
    c: Correlation  # of a data gradient the adjoint
    step: Triple  # in cells per out cell of a phase
    out_step: Triple  # distance of the out cells of a phase
    offsets: GatherOffsets = GatherOffsets()
    groups: int = 0  # of a depthwise convolution with channels as lanes: blocks of channels
    bias: int = 0  # which input is added to the sums, 0: none
    split: int = 1  # items that a band's tiles of output channels are shared by
    phases: int = 0
    phase_table: int = 0
    all_taps: int = 0
    residues: int = 0
    residue_table: int = 0
    band: Triple = NONE  # boxes of out cells of every phase
    bands: Triple = NONE
    all_cells: Triple = NONE
    low: Triple = NONE  # least and greatest shift
    high: Triple = NONE
    tile: int = 0  # output channels of a tile
    columns: int = COLUMNS  # cells of a tile, where these are its columns
    as_cells: bool = False  # NCX data as cells
    exact: bool = False  # whether cells at the ends of rows sum the taps alone that reach the image
    pitch: int = 0  # floats from cell to cell
    line: int = 0  # cells of rows that are turned together
    at_once: int = 0  # tiles of output channels for which cells are split, where these are columns in place
    together: int = 0  # tiles of cells that are split while as many are multiplied
    beside: int = 1  # images whose cells alternate along x
    round_groups: int = 0  # what is packed at a time: whole groups, or some tiles of one
    round_tiles: int = 0
    block: int = 0  # channels of one, of a depthwise convolution
    stencil: int = 0  # form of a kernel that slides over planes read and written where they lie, else 0
    streamed: bool = False  # whether results are stored past the caches, which do not hold them with what is read


@dataclass(frozen=True, kw_only=True)
class PhaseRecord(Record):
    """Out cells that the same taps reach."""

    start: Triple
    count: Triple
    first_unit: int
    taps: int
    tap_table: int  # bytes behind the `Gather`
    pack_at: int
    taps_along: Triple
    run: int = 1  # taps that follow one another along x in steps of `run_step` and are summed as channels are
    run_step: int = 0


@dataclass(frozen=True, kw_only=True)
class TapRecord(Record):
    """Place in the weights, shift, and which of the residues it reads."""

    weight: int
    shift: Triple
    residue: int = 0


@dataclass(frozen=True, kw_only=True)
class Residue(Record):
    """Of the cells modulo the step; in a weight gradient also where its pairs begin."""

    of: Triple
    odd: int = 0  # 1: odd ones; 2: also, made of those in the plane before; NEXT or LAST, made of the first plane's


@dataclass(frozen=True, kw_only=True)
class CellsOffsets(Record):
    """Of a thread's scratch; 0 for what the loops of a plan have no use for."""

    sums: int = 0
    rows: int = 0  # where the rows of the product's left operand start
    table: int = 0  # runs of cells
    shifts: int = 0  # where what a tap reads starts
    columns: int = 0  # the copy of what is the product's right operand
    scalars: int = 0  # that of the left one
    gradient: int = 0  # the copy of a band of the destination
    source: int = 0  # that of what it reads
    tile: int = 0  # of a product in registers of matrices
    configuration: int = 0  # of these registers


@dataclass(frozen=True, kw_only=True)
class Cells(Record):
    """A sum over the cells of an image: the gradient with respect to weights (d, s, taps)."""

    kind: int
    c: Correlation
    source: int  # which inputs
    dest: int
    taps: int
    low: Triple  # least and greatest shift
    high: Triple
    offsets: CellsOffsets = CellsOffsets()
    band: Triple = NONE
    bands: Triple = NONE
    swapped: bool = False  # the source's channels are the columns of the product
    direct: bool = False  # sums lie in an item's scratch, not in shared memory
    units: int = 0  # bands of all images
    parts: int = 0  # of the units, with sums of their own
    blocks: int = 0  # of the product's rows, or of channels
    columns: int = 0
    rows: int = 0
    dense: bool = False  # the taps of a weight lie together in their order
    turned: int = 0  # floats of a band's columns that all items share
    chunk: int = 0  # cells whose sum is added to that of those before
    round_groups: int = 0
    round_blocks: int = 0
    round_channels: int = 0
    # in registers of matrices, whose shifts and bands are in steps
    pitch: int = 0  # cells from row to row of a copy
    room: int = 0  # of cells of a row that is copied
    pairs: int = 0  # twice as many: cells that the pairs of a plane have room for
    planes: int = 0
    plane_table: int = 0


NEXT, LAST = 3, 4  # planes of the cells behind and before those of each row, zeros at its end
TAPS_AT = 8 * size(Cells)  # where the table of taps lies
