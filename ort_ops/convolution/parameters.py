"""Where the numbers of a convolution's plan lie: indices into blocks of int64.

Names ending in 3 are the first of three entries, one per spatial axis z, y, x; missing axes come first and have length
1. Strides of tensors are in elements. "in" is what a kernel reads, "out" what it writes; channels are those of a group.
"""

from __future__ import annotations

# ----- a sum over taps (conv_gather) ------

WORKER, PACKER, KIND, BATCH, GROUPS, OUTS, INS, LAST = range(8)  # LAST: channels are the last axis
DATA, WEIGHTS = 8, 9  # which inputs
IN_N, IN_C, IN_3 = 10, 11, 12
OUT_N, OUT_C, OUT_3 = 15, 16, 17
LENGTH_3 = 20  # of in
STEP_3 = 23  # in cells per out cell of a phase
OUT_STEP_3 = 26  # distance of the out cells of a phase
W_OUT, W_IN, W_GROUP = 29, 30, 31  # strides of the weights
ITEMS, SPLIT, UNITS, PACK_BYTES, LANE_BYTES, PHASES, PHASE_TABLE, ALL_TAPS = range(32, 40)  # ITEMS, UNITS: of a round
BAND_3, BANDS_3, LOW_3, HIGH_3 = 40, 43, 46, 49  # boxes of out cells of every phase; least and greatest shift
RESIDUES, RESIDUE_TABLE = 52, 53
CELLS, TURNED, PITCH = 54, 55, 56  # cells of a band, 0 if they are columns; NCX data turned; from cell to cell
ALL_CELLS_3 = 57
DEPTHWISE = 60  # channels of a depthwise convolution, 0 for any other; its groups are blocks of channels
BIAS = 61  # which input is added to the sums, 0: none
ROUND_GROUPS, ROUND_TILES = 62, 63  # what is packed at a time: whole groups, or some tiles of one
STENCIL = 64  # size of a square kernel that slides over planes read and written where they lie, else 0
FAR = 65  # whether the sums reach so far that nothing is held at once; PITCH is then how many channels are
PANELS = 66  # whether a band is copied tile by tile, since all taps read the cell itself; PITCH is then a tile's floats
BLOCK = 67  # channels of an item of a depthwise convolution of NXC data
STREAMED = 68  # whether its results are stored past the caches, which do not hold them together with what is read
GATHER_WORDS = 69

# one phase
START_3, COUNT_3 = 0, 3
FIRST_UNIT, TAPS, TAP_TABLE, PACK_AT = range(6, 10)
TAPS_3, PHASE_WORDS = 10, 13  # taps along each axis

# one tap: place in the weights, shift, and which of the residues it reads
TAP_WEIGHT, TAP_SHIFT_3, TAP_RESIDUE, TAP_WORDS = 0, 1, 4, 5
RESIDUE_WORDS = 3

# ----- a sum over cells (conv_weights) ---------------------------------------------------------

(
    C_WORKER, C_REDUCER, C_KIND, C_BATCH, C_GROUPS, C_S, C_D, C_TURNED, C_LAST, C_SOURCE, C_DEST,
    C_S_N, C_S_C, C_D_N, C_D_C, C_W_D, C_W_S, C_TAPS, C_TAP_TABLE, C_UNITS, C_PARTS, C_BLOCKS, C_COLUMNS,
    C_ROWS, C_PART_BYTES, C_LANE_BYTES, C_ITEMS, C_DENSE, C_ROUND_GROUPS, C_ROUND_BLOCKS, C_ROUND_CHANNELS,
) = range(31)  # fmt: skip
C_S_3, C_D_3, C_LENGTH_3, C_OUT_3, C_STEP_3, C_LOW_3, C_HIGH_3, C_BAND_3, C_BANDS_3, C_KERNEL_3 = range(31, 61, 3)
C_WORDS = 61

# one tap: place in the weights and shift
C_TAP_WEIGHT, C_TAP_SHIFT_3, C_TAP_WORDS = 0, 1, 4
