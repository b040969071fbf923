"""Batches of arrays that lie in memory or in files, in an order that is a function of a seed and the epoch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from onnx_backprop.converters.pages import fragment, table
from onnx_backprop.converters.tables import format_bytes
from onnx_backprop.distributed import Communicator
from onnx_backprop.distributed.shards import Shard, bounds
from onnx_backprop.opset.core.errors import InvalidArgumentError, require_numbers, warn
from onnx_backprop.opset.core.hints import explaining
from onnx_backprop.training.data.augmentation import Transform
from onnx_backprop.training.data.datasets import columns_of
from onnx_backprop.training.data.images import Scale, check_scale, scaled
from onnx_backprop.training.data.order import BlockOrder, row_order, streams
from onnx_backprop.training.data.rows import StoredRows
from onnx_backprop.training.divergence import BadBatchError


class Batches:
    """Batches of rows: `for feeds in Batches({"x": x, "target": t}, size=32)`.

    Every epoch is a permutation of all rows drawn from (seed, epoch), so a training that is resumed within an epoch
    sees the remaining batches. The last batch of an epoch may be smaller; `drop_last` leaves it out. Rows of Parquet
    and Arrow files come in the order of `BlockOrder`, whose batches mix rows of up to 64 blocks. A `datasets.Dataset`
    or the result of `image_folder` may replace the arrays.
    """

    @explaining("As Batches({'x': x, 'target': y}, size=32)")
    def __init__(
        self,
        arrays: Mapping[str, np.ndarray | StoredRows],
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        scale: Scale | Mapping[str, Scale] | None = None,
        transform: Transform | None = None,
        whole: bool | None = None,
    ) -> None:
        """Errors: InvalidArgumentError for no arrays or rows, arrays of different lengths, a size or seed out of range.

        Args:
            scale: a factor for images of bytes, as 1/255, or "imagenet", see `images.scaled`; for several arrays, by
                name.
            transform: called with each row, a dict of arrays, and a random generator that depends only on the seed, the
                epoch and the row; it returns the row to feed, before scaling. `augment` makes such functions.
            whole: the former name of `drop_last`, which 1.2 no longer knows.
        """
        if whole is not None:
            warn("it is called drop_last, and 1.2 no longer knows this name. Write drop_last", argument="whole")
            drop_last = whole
        arrays = columns_of(arrays)
        if not isinstance(arrays, Mapping):
            raise InvalidArgumentError(
                f"arrays: expected arrays by the names of the inputs, as {{'x': x, 'target': target}}, "
                f"got {type(arrays).__name__}"
            )
        self.arrays = {
            name: array if isinstance(array, StoredRows) else np.asarray(array) for name, array in arrays.items()
        }
        lengths = {name: len(array) if array.ndim else 0 for name, array in self.arrays.items()}
        if lengths and not any(lengths.values()) and all(array.ndim for array in self.arrays.values()):
            raise InvalidArgumentError(f"expected at least one row, got none in {', '.join(lengths)}", "arrays")
        if not lengths or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
            listed = ", ".join(f"{name!r}: {length}" for name, length in lengths.items()) or "none"
            raise InvalidArgumentError(f"arrays: expected arrays with one number of rows, got {listed}")
        self.rows = next(iter(lengths.values()))
        if not isinstance(size, Integral) or size < 1 or (drop_last and size > self.rows):
            raise InvalidArgumentError(f"size: expected a whole number of 1 … {self.rows}, got {size!r}")
        require_numbers(0, whole=True, seed=seed)
        self.size, self.seed, self.shuffle, self.drop_last = size, seed, shuffle, drop_last
        if transform is not None and not callable(transform):
            raise InvalidArgumentError(f"transform: expected a function of a row and a generator, got {transform!r}")
        self.scales, self._transform = check_scale(scale, self.arrays), transform
        self._epoch = 0
        self._blocks = [a for a in self.arrays.values() if isinstance(a, StoredRows) and a.starts is not None]

    def __repr__(self) -> str:
        """Arrays and batches, in one line."""
        arrays = ", ".join(f"{name} {kind} {shape}" for name, kind, shape, _ in self._described())
        return f"<Batches of {arrays}: {self._summary()}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [(name, kind, shape, format_bytes(size)) for name, kind, shape, size in self._described()]
        summary = f"<p>{self._summary()}</p>"
        return fragment(table(("array", "type", "shape", ""), rows, numbers=(2, 3)), summary)

    def _described(self) -> list[tuple[str, str, str, int]]:
        return [
            (name, str(a.dtype), "×".join(map(str, a.shape)), math.prod(a.shape) * a.dtype.itemsize)
            for name, a in self.arrays.items()
        ]

    def _summary(self) -> str:
        order = f"shuffled, seed {self.seed}" if self.shuffle else "in order"
        return f"{self.rows:,} rows, {len(self):,} batches of {self.size:,}, {order}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation that the next iteration goes through."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches of one epoch."""
        return self.since(0)

    def since(self, batch: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of one epoch from one on; those before are not read."""
        return map(self._take, self._chosen(batch))

    def shards(self, rank: int, size: int) -> "Shards":
        """The same batches, of which this rank's rows alone are read."""
        return Shards(self, rank, size)

    def every(self, rank: int, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches rank, rank + size, … of an epoch; the others are not read."""
        return map(self._take, self._chosen(rank, size))

    def _chosen(self, first: int = 0, step: int = 1) -> Iterator[np.ndarray]:
        """The numbers of the rows of batches first, first + step, …"""
        numbers = range(first, len(self), step)
        if self.shuffle and self._blocks:
            starts, mixed = self._blocks[0].starts, streams(self._blocks, self.size)
            assert starts is not None
            return map(BlockOrder(starts, self.size, mixed, self.seed, self._epoch).batch, numbers)
        parts = (slice(n * self.size, (n + 1) * self.size) for n in numbers)
        if not self.shuffle:
            return (np.arange(*part.indices(self.rows)) for part in parts)
        order = row_order(self.rows, self.seed, self._epoch)
        return (order[part] for part in parts)

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._fed({name: array[rows] for name, array in self.arrays.items()}, rows)

    def _fed(self, batch: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        """A batch as it is fed: its rows transformed and scaled."""
        if self._transform is not None and len(rows):
            batch = self._transformed(batch, rows, self._transform)
        return batch | {name: scaled(batch[name], scale) for name, scale in self.scales.items()}

    def _transformed(
        self, batch: dict[str, np.ndarray], rows: np.ndarray, transform: Transform
    ) -> dict[str, np.ndarray]:
        changed = []
        for n, row in enumerate(rows):
            rng = np.random.default_rng((self.seed & (2**64 - 1), self._epoch, int(row)))
            changed.append(transform({name: array[n] for name, array in batch.items()}, rng))
        try:
            return {name: np.stack([np.asarray(row[name]) for row in changed]) for name in batch}
        except (KeyError, TypeError, ValueError) as e:
            raise InvalidArgumentError(
                f"transform: expected rows with {', '.join(map(repr, batch))}, each of one shape: {e}"
            ) from e

    def numbers(self, batch: int) -> np.ndarray:
        """The numbers of the rows of a batch of this epoch."""
        return next(self._chosen(batch))

    def samples(self) -> Iterator[dict[str, np.ndarray]]:
        """A batch of every size that there is, of the first rows."""
        rest = 0 if self.drop_last else self.rows % self.size
        for size in dict.fromkeys((self.size, rest or self.size)):
            yield self._fed({name: array[:size] for name, array in self.arrays.items()}, np.arange(size))


def of_data(error: BadBatchError, loader: Iterable[Any], batch: int, where: str) -> BadBatchError:
    """The error about a batch, with the number of its row among all rows where the loader knows it."""
    if error.row is None or not isinstance(loader, Batches):
        return error
    return error.of_row(int(loader.numbers(batch)[error.row]), where)


class Shards:
    """One rank's rows of each of some `Batches`."""

    def __init__(self, batches: Batches, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size

    def set_epoch(self, epoch: int) -> None:
        """See `Batches.set_epoch`."""
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Shard]:
        return self.since(0)

    def since(self, batch: int) -> Iterator[Shard]:
        """See `Batches.since`."""
        for rows in self._batches._chosen(batch):
            start, end = bounds(len(rows), self._rank, self._size)
            yield Shard(self._batches._take(rows[start:end]))


def shard_of_rank(loader: Iterable[Any], communicator: Communicator) -> Iterable[Any]:
    """A loader of which this rank's rows alone are read, where that can be."""
    if communicator.size == 1 or not isinstance(loader, Batches):
        return loader
    return loader.shards(communicator.rank, communicator.size)
