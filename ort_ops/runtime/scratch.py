"""Scratch memory of calls, counted; blocks of the usual size wait for their next use. Compiled, but for the sizes."""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import call, exchange, fetch_add, fetch_max, load_i64, store_i64
from onnx_backprop.ort_ops.compiler.records import Record, offset, size

HEAD = 128  # bytes before a block, which is aligned
POOL_SLOTS = 16
POOL_BYTES = (4 << 20) - HEAD  # of a pooled block; what is larger is allocated for the call


@dataclass(kw_only=True)
class Runtime(Record):
    """What is the same in the whole process; the pool's slots lie behind it."""

    malloc: int
    free: int
    no_memory: int  # a text
    python: int  # an `Interpreter`
    prepare: int  # the function of Python that plans
    threads: int  # threads at most that work on a call
    live: int = 0  # bytes in use, and the most there were
    peak: int = 0


RUNTIME_WORDS = size(Runtime) + POOL_SLOTS
_LIVE, _PEAK = offset(Runtime, "live"), offset(Runtime, "peak")
_POOL = 8 * size(Runtime)


def block_bytes(wanted: int) -> int:
    """How much memory `acquire` takes for so many bytes; none is taken for none."""
    return max(wanted, POOL_BYTES) + HEAD if wanted else 0


@inner
def acquire(runtime, wanted):
    """Memory for one call, aligned to 64 bytes: a pooled block if so many bytes fit one. 0 when there is none."""
    if wanted <= POOL_BYTES:
        for slot in range(POOL_SLOTS):
            place = runtime + _POOL + 8 * slot
            if load_i64(place, 0):
                block = exchange(place, 0)
                if block:
                    _use(runtime, POOL_BYTES)
                    return block
        wanted = POOL_BYTES
    raw = call(runtime.malloc, (wanted + HEAD,))
    if raw == 0:
        return 0
    block = (raw + HEAD - 1) & -64  # at least one word before it
    store_i64(block, -1, raw)
    _use(runtime, wanted)
    return block


@inner
def _use(runtime, taken):
    """Count a block that a call begins to use."""
    live = fetch_add(runtime + _LIVE, taken + HEAD) + taken + HEAD
    fetch_max(runtime + _PEAK, live)


@inner
def release(runtime, block, wanted):
    """Give back what `acquire(runtime, wanted)` answered."""
    if block == 0:
        return
    fetch_add(runtime + _LIVE, -(max(wanted, POOL_BYTES) + HEAD))
    if wanted <= POOL_BYTES:
        for slot in range(POOL_SLOTS):
            place = runtime + _POOL + 8 * slot
            if load_i64(place, 0) == 0:
                block = exchange(place, block)
                if block == 0:
                    return
    call(runtime.free, (load_i64(block, -1),))
