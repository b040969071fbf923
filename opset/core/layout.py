"""Axis orders of data and weights, as permutations.

Data: NCX = (N, C, spatial…), NXC = (N, spatial…, C).
Weights of a convolution: OIX = (O, I/g, k…), XIO = (k…, I/g, O).
Weights of a transposed convolution, by the meaning of the letters (O: channels of its output, stored divided
by the groups; I: channels of its input, stored whole): IOX = (I, O/g, k…), XOI = (k…, O/g, I), and in the
older spelling OIX = (O/g, I, k…), XIO = (k…, I, O/g).

The kernels know one order only: data NCX and weights (D, S/g, k…), D being the channels of the correlation's
destination and S of its source. A transposed convolution is the adjoint of a correlation from its output to
its input, so there D = I and S = O.
"""

Order = tuple[int, ...]


def data_to_ncx(data_format: str, rank: int) -> Order:
    """Permutation from `data_format` to NCX."""
    if data_format == "NCX":
        return tuple(range(rank))
    return (0, rank - 1, *range(1, rank - 1))


def conv_weights_to_canonical(weights_format: str, rank: int) -> Order:
    """Permutation from OIX or XIO to (D, S/g, k…)."""
    if weights_format == "OIX":
        return tuple(range(rank))
    return (rank - 1, rank - 2, *range(rank - 2))


def conv_transpose_weights_to_canonical(weights_format: str, rank: int) -> Order:
    """Permutation from IOX, XOI, OIX or XIO (transposed convolution) to (D, S/g, k…)."""
    spatial = range(2, rank) if weights_format in ("IOX", "OIX") else range(rank - 2)
    i, o = {"IOX": (0, 1), "OIX": (1, 0), "XOI": (rank - 1, rank - 2), "XIO": (rank - 2, rank - 1)}[weights_format]
    return (i, o, *spatial)


def inverse(order: Order) -> Order:
    """The permutation that undoes `order`."""
    result = [0] * len(order)
    for position, axis in enumerate(order):
        result[axis] = position
    return tuple(result)
