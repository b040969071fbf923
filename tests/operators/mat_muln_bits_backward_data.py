"""MatMulNBitsBackwardData."""

from __future__ import annotations

import numpy as np

from tests.declarations.calls import Call, Draws, values, without_end
from tests.declarations.declaration import INT, REQUIRED, Bad, Declaration, Example, Schema, invalid

OP = "MatMulNBitsBackwardData"


def stored(*shape: int) -> np.ndarray:
    return np.full(shape, 0x97, np.uint8)


def calls(draws: Draws) -> Call:
    """Any bits, blocks and zero points; lengths that fill no block, no byte and no tile."""
    bits, size = draws.pick(2, 4, 8), draws.pick(16, 32, 64, 128, 256)
    while True:
        n, k, rows = draws.length(400), draws.length(300, small=40), draws.shape(0, 3, high=30, low=0)
        if draws.fits([*rows, n], [*rows, k], [n, k]):
            break
    blocks, seed = -(-k // size), draws.seed()
    rng = np.random.default_rng(seed)
    scales = rng.integers(-8, 9, (n, blocks)).astype(np.float32) / 8
    inputs: list[np.ndarray | None] = [values((*rows, n), seed), None, scales, None, None]
    inputs[1] = rng.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8)
    points = draws.pick("", "packed", "floats")
    if points == "packed":
        inputs[3] = rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif points == "floats":
        inputs[4] = rng.integers(0, 16, (n, blocks)).astype(np.float32) / 2
    return Call(OP, {"K": k, "N": n, "block_size": size, "bits": bits}, without_end(inputs), seed)


REFUSED = [
    Bad(OP, "attribute N: expected a number >= 1, got 0", {"N": 0}),
    Bad(OP, "attribute K: expected a number >= 1, got -1", {"K": -1}),
    Bad(OP, "attribute bits: expected 2, 4 or 8, got 3", {"bits": 3}),
    Bad(OP, "attribute block_size: expected a power of two >= 16, got 8", {"block_size": 8}),
    Bad(OP, "attribute block_size: expected a power of two >= 16, got 48", {"block_size": 48}),
    Bad(OP, "expected zero_points or float_zero_points, got both", inputs={4: (3, 2)}),
    Bad(OP, "diff_dst: expected rank 1 to 64, got 0 with shape ()", inputs={0: ()}),
    Bad(OP, "length of the last axis of diff_dst and the attribute N must agree, got 4 and 3", inputs={0: (5, 4)}),
    Bad(OP, "weight: expected rank 3, got 2 with shape (3, 16)", inputs={1: stored(3, 16)}),
    Bad(OP, "length of axis 2 of weight and the attributes must agree, got 4 and 8", inputs={1: stored(3, 2, 4)}),
    Bad(OP, "length of axis 1 of weight and the attributes must agree, got 2 and 3", {"K": 40}),
    Bad(OP, "length of axis 0 of scales and the attributes must agree, got 2 and 3", inputs={2: (2, 3)}),
    Bad(OP, "scales: expected rank 2, got 1 with shape (6)", inputs={2: (6,)}),
    Bad(OP, "length of axis 1 of zero_points and the attributes must agree, got 2 and 1", inputs={3: stored(3, 2)}),
    Bad(
        OP,
        "length of axis 1 of float_zero_points and the attributes must agree, got 1 and 2",
        inputs={3: None, 4: (3, 1)},
    ),
    invalid(OP, "required attribute block_size is missing", {"block_size": None}),
]


def row(*first: int, length: int = 8) -> tuple[int, ...]:
    """The bytes of a block, zeros behind the first ones."""
    return (*first, *[0] * (length - len(first)))


# 0xA9 holds the numbers 9 and 10, the first one in the lower half; the middle of 4 bits is 8
FOUR = {"K": 3, "N": 2, "block_size": 16}
TWO_ROWS = ((row(0xA9, 0x07),), (row(0x08, 0x0F),))  # W without scales: 1, 2, -1 and 0, -8, 7
EXAMPLES = [
    Example(
        OP, OP, FOUR, ([[2, 0], [0, 1], [4, 2]], TWO_ROWS, [[0.5], [2]]),
        [[1, 2, -1], [0, -16, 14], [2, 4 - 32, -2 + 28]],
    ),
    Example(f"{OP}-row", OP, FOUR, ([2, 1], TWO_ROWS, [[0.5], [2]]), [1, 2 - 16, -1 + 14]),
    # the zero points 10 and 7, in the lower halves; the rest of their bytes is not read
    Example(f"{OP}-zero", OP, FOUR, ([[1, 0], [0, 1]], TWO_ROWS, [[1], [1]], ((0xFA,), (0xF7,))),
            [[-1, 0, -3], [1, -7, 8]]),
    Example(f"{OP}-floats", OP, FOUR, ([[1, 1]], TWO_ROWS, [[2], [1]], None, [[8.5], [7]]), [[1 + 1, 3 - 7, -3 + 8]]),
    # two blocks, whose zero points, 1 and 2, share a byte
    Example(
        f"{OP}-blocks", OP, {"K": 17, "N": 1, "block_size": 16}, ([[1]], ((row(), row(0xF4)),), [[1, 10]], ((0x21,),)),
        [[*[-1] * 16, 20]],
    ),
    # 0b11100100 holds 0, 1, 2 and 3; the middle is 2
    Example(
        f"{OP}-two", OP, {"K": 4, "N": 1, "block_size": 16, "bits": 2}, ([[3]], ((row(0b11100100, length=4),),), [[1]]),
        [[-6, -3, 0, 3]],
    ),
    Example(
        f"{OP}-eight", OP, {"K": 2, "N": 1, "block_size": 16, "bits": 8}, ([[1]], ((row(255, 127, length=16),),), [[1]]),
        [[127, -1]],
    ),
]  # fmt: skip

OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {"K": (INT, REQUIRED), "N": (INT, REQUIRED), "block_size": (INT, REQUIRED), "bits": (INT, 4)},
            {"diff_dst": "T1", "weight": "T6", "scales": "T1", "zero_points": "T6?", "float_zero_points": "T1?"},
            {"diff_src": "T1"},
        ),
        calls=calls,
        valid=({"K": 20, "N": 3, "block_size": 16, "bits": 4}, [(5, 3), stored(3, 2, 8), (3, 2), stored(3, 1)]),
        refused=REFUSED,
        examples=EXAMPLES,
        inferred=[(FOUR, [None, None, None], [None]), (FOUR, [["B", "T", None], ["N", 1, 8], None], [["B", "T", 3]])],
    )
]
