"""Memory that stays behind per session: python -m tests.ort_ops.sessions_in_memory --sessions 10000

Each session has some kernels, of which each makes plans for three shapes, and is dropped. The first half does not
count: allocators and threads settle.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import sys
from pathlib import Path

import numpy as np

import onnx_backprop as ob
from tests.support import single_op
from tests.support.renamed import joined

CONV = {
    "strides": [1, 1],
    "dilations": [1, 1],
    "pads_begin": [1, 1],
    "pads_end": [1, 1],
    "data_format": "NCX",
    "weights_format": "OIX",
}


def resident() -> int:
    """Bytes of the resident set, after what is free went back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--kernels", type=int, default=1, help="of a session")
    parser.add_argument("--most", type=float, default=math.inf, help="KiB for a kernel; more ends with 1")
    arguments = parser.parse_args()
    w = np.ones((8, 4, 3, 3), np.float32)
    dy, shape = np.ones((1, 8, 5, 5), np.float32), np.zeros(4, np.int32)
    one = single_op.model("ConvolutionBackwardData", CONV, [dy, w, shape])
    model = ob.use_kernels(joined([one] * arguments.kernels), "native")
    before = 0
    for n in range(arguments.sessions):
        if n == arguments.sessions // 2:
            before = resident()
        session = ob.session(model, kernels=None, session_options=single_op.options(2))
        for length in (5, 6, 7):
            dy, shape = np.ones((1, 8, length, 5), np.float32), np.array([1, 4, length, 5], np.int32)
            feeds = {"diff_dst": dy, "weights": w, "dst_shape": shape}
            session.run(None, {f"{n}/{name}": v for n in range(arguments.kernels) for name, v in feeds.items()})
        del session
    grown = (resident() - before) / (arguments.sessions - arguments.sessions // 2) / arguments.kernels / 1024
    print(f"endurance: {arguments.sessions:,} sessions, memory grew by {grown:.3f} KiB/kernel")
    return int(grown > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
