"""Plans of sums over taps, for `gather.kernel`: a correlation, or the data gradient of one. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.machine import VECTOR, last_level_cache, processors
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import size
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather import bands
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.phases import (
    Phase,
    Sums,
    data_phases,
    forward_phase,
    run_of,
    shifts,
    sorted_by_residue,
)
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS


def data_gradient(c: problem.Correlation, kind: int) -> Plan:
    """The gradient with respect to the source; inputs 0 and 1 are data and weights."""
    c = problem.images_joined(c)
    head = par.Gather(kind=kind, c=c.adjoint, step=bands.DENSE, out_step=c.strides)
    return _plan(head, data_phases(c))


def forward(c: problem.Correlation, kind: int, *, bias: int = 0) -> Plan:
    """The correlation itself; `bias` is the input that is added to it, 0: none."""
    c = problem.images_joined(c)
    head = par.Gather(kind=kind, c=c, step=c.strides, out_step=bands.DENSE, bias=bias)
    return _plan(head, [forward_phase(c)])


def _plan(head: par.Gather, phases: list[Phase]) -> Plan:
    sums = Sums(head, phases, as_cells=False)
    matrices = bands.in_matrices(sums)
    plan = _gather(matrices) if matrices else None
    return plan or _gather(_sums(sums, phases)) or _far(_sums(sums, phases))


def _sums(sums: Sums, phases: list[Phase]) -> Sums:
    pays = bands.lanes_pay if sums.depthwise else bands.turning_pays
    sums = replace(sums, as_cells=not sums.c.last and pays(sums))
    if sums.in_runs and not sums.cells:
        return replace(sums, phases=[sorted_by_residue(phase, sums.steps) for phase in phases])
    return sums


def _gather(sums: Sums) -> Plan | None:
    """None where a band, or the weights of a tile, are too large."""
    copy = bands.copy_of(sums)
    band = bands.cut(sums, copy)
    offsets, per_thread = bands.thread_scratch(sums, copy, band)
    c = sums.c
    if sums.matrices:  # weights of a tile are packed before they are split
        taps = max(len(phase.taps) for phase in sums.phases)
        per_thread = max(per_thread, offsets.copy + FLOAT * taps * c.s * sums.tile)
    if per_thread > POOL_BYTES or not _panel_fits(sums):
        return None
    groups, tiles = _at_once(sums, copy.groups(sums))
    # threads take the bands of all images and, where these are few, parts of their tiles
    items = c.batch * groups * math.prod(bands.bands_of(sums.count, band))
    split = 1 if items >= 2 * processors() else min(tiles, math.ceil(processors() / max(items, 1)))
    head = replace(
        sums.head,
        offsets=offsets,
        groups=copy.groups(sums),
        split=split,
        round_groups=groups,
        round_tiles=tiles,
        low=sums.reach.low,
        high=sums.reach.high,
        tile=sums.tile,
        columns=(1 + sums.tall) * COLUMNS,
        as_cells=sums.as_cells,
        pitch=copy.pitch,
        line=bands.line_of(sums.reach.box(band, bands.DENSE)[2]),
        all_taps=sums.all_taps,
        at_once=bands.at_once(sums) if sums.columns else 0,
        together=bands.together(sums) if sums.columns else 0,
    )
    if sums.depthwise:
        streamed = 4 * c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length)) > last_level_cache()
        head = replace(head, block=copy.block, stencil=sums.stencil, streamed=streamed)
    strategy = _strategy(sums, panels=copy.panels)
    shared = 0 if sums.depthwise else groups * tiles * sums.panel_bytes
    packing = gather_kernel.PACK_PARTS if sums.matrices else gather_kernel.PACK
    pack = [(packing, groups * tiles * len(sums.phases))] if shared else []
    head, tables = _with_tables(sums, head, band, sums.shifted, sums.residues, groups * tiles)
    return Plan(
        head,
        (*pack, (strategy, items * split)),
        tables=tables,
        shared=shared,
        per_thread=per_thread,
        groups=(head.groups, groups),
        parts=(math.ceil(c.d / sums.tile), tiles),
    )


def _panel_fits(sums: Sums) -> bool:
    """Whether threads may share the packed weights of a tile; those of a depthwise convolution are not packed."""
    return sums.depthwise or sums.panel_bytes <= problem.shared_limit(sums.c, sums.head.kind)


def _at_once(sums: Sums, groups: int) -> tuple[int, int]:
    """(groups, tiles of output channels of a group) whose weights are packed at a time."""
    tiles = math.ceil(sums.c.d / sums.tile)
    if sums.depthwise:
        return groups, tiles
    return problem.rounds(groups, tiles, sums.panel_bytes, problem.shared_limit(sums.c, sums.head.kind))


def _strategy(sums: Sums, *, panels: bool) -> Exported:
    """Whose loops compute a band."""
    if sums.depthwise:
        if sums.c.last:
            return gather_kernel.DEPTHWISE_CHANNELS
        return gather_kernel.DEPTHWISE_TRANSPOSED if sums.as_cells else gather_kernel.DEPTHWISE
    if sums.matrices:
        return gather_kernel.COLUMNS_IN_PLACE if sums.columns else gather_kernel.MATRICES
    return gather_kernel.PIXELS if sums.cells else gather_kernel.PANELS if panels else gather_kernel.PLANES


def _far(sums: Sums) -> Plan:
    """For `gather.fallback`: bands of a few cells, all by themselves."""
    band, cells = problem.band_of(sums.count, math.prod, block_sizes.FAR_CELLS, bands.DENSE)
    groups, tiles = sums.c.groups, math.ceil(sums.c.d / COLUMNS)
    pitch = min(block_sizes.FAR_CHANNELS, math.ceil(sums.c.s / VECTOR) * VECTOR)
    shifted = [shifts(phase, sums.steps, quotients=False) for phase in sums.phases]
    items = sums.c.batch * groups * math.prod(bands.bands_of(sums.count, band)) * tiles
    offsets, per_thread = workspace(
        par.GatherOffsets,
        rows=WORD * (ROWS + 2),
        results=FLOAT * (cells + ROWS) * COLUMNS,
        copy=FLOAT * (cells + ROWS) * pitch,
        weights=FLOAT * pitch * COLUMNS,
        lines=FLOAT * VECTOR * (cells + VECTOR),
    )
    head = replace(
        sums.head,
        offsets=offsets,
        tile=COLUMNS,
        groups=groups,
        split=tiles,
        pitch=pitch,
        round_groups=groups,
        round_tiles=tiles,
    )
    head, tables = _with_tables(sums, head, band, shifted, [(0, 0, 0)], 0)
    return Plan(head, ((gather_kernel.FALLBACK, items),), per_thread=per_thread, tables=tables)


def _with_tables(
    sums: Sums,
    head: par.Gather,
    band: problem.Triple,
    shifted: list[list[tuple[problem.Triple, problem.Triple]]],
    residues: list[problem.Triple],
    panels: int,
) -> tuple[par.Gather, list[int]]:
    """The parameters complete, and the tables of phases, taps and residues; `panels` are packed at a time."""
    phase_table = 8 * size(par.Gather)
    tap_table = phase_table + 8 * size(par.PhaseRecord) * len(sums.phases)
    phases: list[int] = []
    taps: list[int] = []
    pack = 0
    for n, (phase, of_taps) in enumerate(zip(sums.phases, shifted, strict=True)):
        run, run_step = run_of(of_taps) if sums.in_runs else (1, 0)
        phases += par.PhaseRecord(
            start=phase.start,
            count=phase.count,
            first_unit=panels * n,
            taps=len(phase.taps),
            tap_table=tap_table + 8 * len(taps),
            pack_at=pack,
            run=run,
            run_step=run_step,
            taps_along=problem.three([len({tap.kernel[axis] for tap in phase.taps}) for axis in range(3)], 0),
        ).words()
        for tap, (shift, residue) in zip(phase.taps, of_taps, strict=True):
            place = sum(k * s for k, s in zip(tap.kernel, sums.c.w_kernel, strict=True))
            taps += par.TapRecord(weight=place, shift=shift, residue=residues.index(residue)).words()
        pack += panels * len(phase.taps) * sums.tap_floats
    head = replace(
        head,
        band=band,
        bands=bands.bands_of(sums.count, band),
        all_cells=sums.count,
        phases=len(sums.phases),
        phase_table=phase_table,
        residues=len(residues),
        residue_table=tap_table + 8 * len(taps),
    )
    return head, [*phases, *taps, *(n for residue in residues for n in residue)]
