"""Whether all ranks have the same, bit for bit."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from onnx_backprop.distributed.communicator import Communicator, gathered
from onnx_backprop.opset.core.errors import ReplicaError


def check_equal(communicator: Communicator, what: str, parts: Iterable[bytes | np.ndarray], advice: str) -> None:
    """ReplicaError, on all ranks, that names those whose parts have another hash than rank 0's.

    what: the parts, as in "another graph".
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    rows = gathered(communicator, np.frombuffer(digest.digest(), np.uint64))
    others = [str(rank) for rank, row in enumerate(rows) if (row != rows[0]).any()]
    if others:
        who = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(others)} have"
        raise ReplicaError(f"{who} {what} than rank 0. {advice}")


def named(arrays: Mapping[str, np.ndarray]) -> Iterable[bytes | np.ndarray]:
    """Names and arrays, in the order of the names."""
    for name in sorted(arrays):
        yield name.encode()
        yield arrays[name]
