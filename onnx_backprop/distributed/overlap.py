"""Sums beside the backward pass: a thread sends gradients, bucket by bucket, as soon as a session has written them.

A bucket is gradients that follow each other in the graph, of BUCKET_BYTES or more together. The native operator `Ready`
behind them tells the thread, which starts the sums in the order of the buckets, whatever the order in which a rank's
session comes to them, so that no two ranks wait for each other. It also drives the engine: MPI moves bytes only while
somebody calls it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from onnx_backprop.distributed.communicator import Start
from onnx_backprop.opset.core.errors import ReplicaError
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.graphs.edit import add_import
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import positions
from onnx_backprop.ort_ops.layers.ready import NAME as READY

OrtValue = onnxruntime.OrtValue
BUCKET_BYTES = 4 * 2**20
_PAUSE = 0.0002  # seconds between two looks, as long as nobody waits for the sums
_abandoned: "list[Overlap]" = []  # MPI may write to their buckets until the process ends


def in_order(model: ModelProto, gradients: Collection[str]) -> list[str]:
    """Gradients, outputs of a model, in the order in which its nodes come to them, the same on every rank."""
    order = positions(model.graph.node)
    return sorted(gradients, key=lambda name: (order.get(name, -1), name))


def filled(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """[start, end) of consecutive entries that together have `least` or more; of the last ones maybe less."""
    result: list[tuple[int, int]] = []
    start, total = 0, 0
    for n, size in enumerate(sizes):
        total += size
        if total >= least or n == len(sizes) - 1:
            result.append((start, n + 1))
            start, total = n + 1, 0
    return result


def announce(model: ModelProto, buckets: Sequence[Sequence[str]]) -> list[str]:
    """Let a model say when all gradients of a bucket are there, in place; the names of the outputs that do."""
    graph, reserved = model.graph, used_names(model.graph)
    order = positions(graph.node)
    outputs = [unique("bucket_ready", reserved) for _ in buckets]
    places = [max(order.get(name, -1) for name in bucket) + 1 for bucket in buckets]
    for place, bucket, output in sorted(zip(places, buckets, outputs, strict=True), reverse=True):
        graph.node.insert(place, helper.make_node(READY, bucket, [output], name=output, domain=NATIVE_DOMAIN))
        graph.output.append(helper.make_tensor_value_info(output, TensorProto.INT64, [1]))
    add_import(model, NATIVE_DOMAIN)
    return outputs


class Overlap:
    """The sums of one step after the other.

    waited: seconds that the steps so far have waited for sums when all else was done.
    """

    def __init__(self, start: Start, names: Sequence[str], buckets: Sequence[np.ndarray], last: Sequence[np.ndarray]):
        """names: the outputs that say when a bucket is there. last: what is summed behind all buckets."""
        self._start, self._buckets, self._last = start, buckets, last
        self._ready = np.zeros(len(buckets) + 1, np.int64)
        self._values = {name: OrtValue.ortvalue_from_numpy(self._ready[n : n + 1]) for n, name in enumerate(names)}
        self._thread: threading.Thread | None = None
        self._waiting = self._given_up = False
        self._error: BaseException | None = None
        self.waited = 0.0

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Bind what a run tells; it starts with nothing told."""
        self._ready[...] = 0
        for name, value in self._values.items():
            binding.bind_ortvalue_output(name, value)

    def begin(self, weigh: Callable[[int], None], *, ready: bool = False) -> None:
        """Sum buckets from now on, each after weigh(its number). ready: they are there already, whatever was told.

        Errors: ReplicaError where a step has failed in the middle of its sums.
        """
        if self._given_up:
            raise ReplicaError(
                "a step has failed on this rank while gradients were being summed. Go on with a new Trainer, from a "
                "checkpoint"
            )
        if ready:
            self._ready[:-1] = 1
        self._ready[-1], self._waiting, self._error = 0, False, None
        self._thread = threading.Thread(target=self._work, args=(weigh,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Sum what comes last, and wait for everything."""
        assert self._thread is not None
        start = time.perf_counter()
        self._waiting, self._ready[-1] = True, 1
        self._thread.join()
        self.waited += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        self._thread = None

    def give_up(self) -> None:
        """Start no more sums of a step that has failed. The other ranks wait, until this one ends them."""
        if self._thread is not None:
            self._given_up = True
            _abandoned.append(self)

    def _work(self, weigh: Callable[[int], None]) -> None:
        try:
            running = deque[Callable[[], bool]]()
            for n in range(len(self._ready)):
                while not (self._ready[n] or self._given_up):
                    self._drive(running)
                if self._given_up:
                    return
                if n < len(self._buckets):
                    weigh(n)
                    running.append(self._start(self._buckets[n]))
                else:
                    running.extend(self._start(array) for array in self._last)
            while running and not self._given_up:
                self._drive(running)
        except BaseException as e:  # noqa: BLE001 - for the thread that waits
            self._error = e

    def _drive(self, running: deque[Callable[[], bool]]) -> None:
        if running and running[0]():
            running.popleft()
        else:
            time.sleep(0 if self._waiting else _PAUSE)
