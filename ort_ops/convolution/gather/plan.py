"""Plans of sums over taps, for `gather.kernel`: a correlation, or the data gradient of one. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.machine import VECTOR, last_level_cache, processors
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import size
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather import bands, phases
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.phases import Sums
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, band_of, rounds, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS


def plan(c: problem.Correlation, kind: int, *, adjoint: bool = False, bias: int = 0) -> Plan:
    """The correlation, or the gradient with respect to its source; inputs 0 and 1 are data and weights.

    bias: the input that is added to it, 0: none.
    """
    c = problem.images_joined(c)
    step, out_step = (bands.DENSE, c.strides) if adjoint else (c.strides, bands.DENSE)
    head = par.Gather(kind=kind, c=c.adjoint if adjoint else c, step=step, out_step=out_step, bias=bias)
    sums = Sums(head, phases.data_phases(c) if adjoint else [phases.forward_phase(c)], as_cells=False)
    matrices = bands.in_matrices(sums)
    return (matrices and _gather(matrices)) or _gather(_fused(sums)) or _far(_fused(sums))


def _fused(sums: Sums) -> Sums:
    """The sums by fused multiply-adds."""
    pays = bands.lanes_pay if sums.c.depthwise else bands.turning_pays
    sums = replace(sums, as_cells=not sums.c.last and pays(sums))
    if sums.in_runs and not sums.cells:
        return replace(sums, phases=[phases.sorted_by_residue(phase, sums.head.step) for phase in sums.phases])
    return sums


def _gather(sums: Sums) -> Plan | None:
    """None where a band, or the weights of a tile, are too large."""
    c, copy = sums.c, bands.copy_of(sums)
    band = bands.cut(copy, processors())
    offsets, per_thread = bands.thread_scratch(copy, band)
    if sums.matrices:  # weights of a tile are packed before they are split
        taps = max(len(phase.taps) for phase in sums.phases)
        per_thread = max(per_thread, offsets.copy + FLOAT * taps * c.s * sums.tile)
    groups, tiles, limit = copy.groups, math.ceil(c.d / sums.tile), problem.shared_limit(c, sums.head.kind)
    packed = 0 if sums.depthwise else sums.panel_bytes  # for a tile
    if per_thread > POOL_BYTES or packed > limit:
        return None
    if packed:
        groups, tiles = rounds(groups, tiles, packed, limit)
    # threads take the bands of all images and, where these are few, parts of their tiles
    items = c.batch * groups * math.prod(problem.bands_of(sums.count, band))
    split = 1 if items >= 2 * processors() else min(tiles, math.ceil(processors() / max(items, 1)))
    elements = c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length))
    head = replace(
        sums.head, offsets=offsets, groups=copy.groups, split=split, round_groups=groups, round_tiles=tiles,
        low=sums.reach.low, high=sums.reach.high, tile=sums.tile, columns=(1 + sums.tall) * COLUMNS,
        as_cells=sums.as_cells, pitch=copy.pitch, line=bands.line_of(sums.reach.box(band, bands.DENSE)[2]),
        all_taps=sums.all_taps, at_once=bands.at_once(sums) if sums.columns else 0,
        together=bands.together(sums) if sums.columns else 0, block=copy.block, stencil=sums.stencil,
        exact=sums.exact, beside=sums.beside, streamed=sums.depthwise and 4 * elements > last_level_cache(),
    )  # fmt: skip
    packing = gather_kernel.PACK_PARTS if sums.matrices else gather_kernel.PACK
    pack = [(packing, groups * tiles * len(sums.phases))] if packed else []
    head, tables = _with_tables(sums, head, band, groups * tiles)
    return Plan(
        head, (*pack, (_strategy(sums), items * split)), groups * tiles * packed, per_thread, (copy.groups, groups),
        (math.ceil(c.d / sums.tile), tiles), tables,
    )  # fmt: skip


def _strategy(sums: Sums) -> Exported:
    """Whose loops compute a band."""
    if sums.depthwise and sums.cells:
        return gather_kernel.DEPTHWISE_CHANNELS if sums.c.last else gather_kernel.DEPTHWISE_TRANSPOSED
    if sums.depthwise:
        return gather_kernel.DEPTHWISE
    if sums.matrices:
        return gather_kernel.COLUMNS_IN_PLACE if sums.columns else gather_kernel.MATRICES
    return gather_kernel.PIXELS if sums.cells else gather_kernel.PLANES


def _far(sums: Sums) -> Plan:
    """Of sums that reach far: bands of a few cells, all by themselves."""
    band, cells = band_of(sums.count, math.prod, block_sizes.FAR_CELLS, bands.DENSE)
    groups, tiles = sums.c.groups, math.ceil(sums.c.d / COLUMNS)
    pitch = min(block_sizes.FAR_CHANNELS, math.ceil(sums.c.s / VECTOR) * VECTOR)
    items = sums.c.batch * groups * math.prod(problem.bands_of(sums.count, band)) * tiles
    offsets, per_thread = workspace(
        par.GatherOffsets, rows=WORD * (ROWS + 2), results=FLOAT * (cells + ROWS) * COLUMNS,
        copy=FLOAT * (cells + ROWS) * pitch, weights=FLOAT * pitch * COLUMNS, lines=FLOAT * VECTOR * (cells + VECTOR),
    )  # fmt: skip
    head = replace(
        sums.head, offsets=offsets, tile=COLUMNS, groups=groups, split=tiles, pitch=pitch, round_groups=groups,
        round_tiles=tiles,
    )  # fmt: skip
    head, tables = _with_tables(replace(sums, as_cells=True), head, band, 0)
    return Plan(head, ((gather_kernel.FALLBACK, items),), per_thread=per_thread, tables=tables)


def _with_tables(sums: Sums, head: par.Gather, band: problem.Triple, panels: int) -> tuple[par.Gather, list[int]]:
    """The parameters complete, and the tables of phases, taps and residues; `panels` are packed at a time."""
    phase_table = 8 * size(par.Gather)
    tap_table = phase_table + 8 * size(par.PhaseRecord) * len(sums.phases)
    records, taps, pack, residues = list[int](), list[int](), 0, sums.residues
    for n, (phase, of_taps) in enumerate(zip(sums.phases, sums.shifted, strict=True)):
        run, run_step = phases.run_of(of_taps) if sums.in_runs else (1, 0)
        records += par.PhaseRecord(
            start=phase.start, count=phase.count, first_unit=panels * n, taps=len(phase.taps),
            tap_table=tap_table + 8 * len(taps), pack_at=pack, run=run, run_step=run_step,
            taps_along=problem.three([len({tap.kernel[axis] for tap in phase.taps}) for axis in range(3)], 0),
        ).words()  # fmt: skip
        for tap, (shift, residue) in zip(phase.taps, of_taps, strict=True):
            place = sum(k * s for k, s in zip(tap.kernel, sums.c.w_kernel, strict=True))
            taps += par.TapRecord(weight=place, shift=shift, residue=residues.index(residue)).words()
        pack += panels * len(phase.taps) * sums.tap_floats
    head = replace(
        head, band=band, bands=problem.bands_of(sums.count, band), all_cells=sums.count, phases=len(sums.phases),
        phase_table=phase_table, residues=len(residues), residue_table=tap_table + 8 * len(taps),
    )  # fmt: skip
    return head, [*records, *taps, *(word for of in residues for word in par.Residue(of=of).words())]
