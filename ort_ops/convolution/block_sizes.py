"""Sizes of what convolutions compute at a time, a table for each family of kernels, with the reason. Plain numbers.

Floats are of float32. A first-level cache holds 8 to 12 << 10 of them, a second-level cache 256 << 10 or more, and what
a thread acquires is a pooled block, which is no larger than `POOL_BYTES`.
"""

from onnx_backprop.ort_ops.compiler.machine import VECTOR
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS

# All families
BAND_FLOATS = 128 << 10  # of the copy of a band: half of a second-level cache
THREAD_FLOATS = (POOL_BYTES >> 2) - (64 << 10)  # of a copy at most: tables and tiles take the rest of a pooled block
PARTS_FLOATS = 352 << 10  # of a band's parts for registers of matrices: two thirds of their 2 MiB
WEIGHTS_BYTES = 1 << 20  # of weights that every tile of cells meets: half of such a cache
TOGETHER_BYTES = 192 << 10  # of such tiles, twice: with fewer, rows of results are written in short runs
# Of taps, of cells: that registers of matrices add up in one sum, six products each, which round more
MATRIX_STEPS, MATRIX_CELLS = 384, 512
LEAST_VECTORS, MOST_VECTORS = 4, 64  # of a block of channels: pieces of a cell that are read at once

# Sums over taps: `gather`
TURNED_CELLS = 192  # of 32 channels, that are split and turned together: a first-level cache holds those of one residue
FEW_CHANNELS = 64  # of a kernel of one cell, whose bands are shorter
LEAST_CELLS = 8 * COLUMNS  # of a band that is cut for the sake of more threads
FAR_CELLS, FAR_CHANNELS = 256, 15 * VECTOR  # of a band, and held at once, where sums reach too far for anything else

# Depthwise sums over taps
STENCIL_FLOATS = 48 << 10  # of rows that are read where they lie
STENCIL_CELLS = 1024  # of the planes of an item: what comes before them takes as long as some rows
LANES_FLOATS = 48 << 10  # of a vector of channels of NCX data and of its results
LANES_WEIGHTS_FLOATS = 32 << 10  # of a block of channels-last data

# Weight gradients: `weights`
MAX_PARTS = 16  # with sums of their own, which are added up
PART_CELLS = 1600  # of a part at least, in registers of matrices: of fewer, adding up the parts takes long
ITEMS_PER_PROCESSOR = 4  # so that threads end together
LEAST_CHUNK = 16  # cells whose sum is added to that of the others, where there are few: these round less
DIRECT_FLOATS = 128 << 10  # of the sums of an item that are not shared: half of a second-level cache
CELLS_FLOATS = 64 << 10  # of a depthwise band and what it reads: two of them stay in the second-level cache

# Winograd's tiles
TILES_FLOATS = 128 << 10  # of transformed tiles: half of a second-level cache
PRODUCT_FLOATS = 128 << 10  # of products that are kept: the other half
SLICES = 6  # of a strip's source, so that those which two bands transform are few
MAX_WINOGRAD_PARTS = 8  # of a weight gradient
PART_TILES = 48  # of a part at least
MIN_TILES = 64  # that a sum is fetched and stored for
TURNED_FLOATS = 64 << 10  # of the source's rows that are turned at a time
SUM_FLOATS = 2 << 20  # of the sums of all parts
MAX_SUM_FLOATS = 16 << 20  # of those of one part: they are transformed back too often beyond
