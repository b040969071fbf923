"""Products of tensors between unreadable pages: python -m tests.ort_ops.products.beside_pages

A read or write beyond a tensor, or beyond the scratch that a plan asks for, ends the process.
"""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import onnxruntime

from tests.ort_ops.guarded import Guarded, guard_scratch
from tests.ort_ops.products.test_matrix_product import SHAPES, model, operands, options


def main() -> None:
    guard_scratch()
    for shape, turned, at_end in product(SHAPES, ((0, 0), (0, 1), (1, 0), (1, 1)), (False, True)):
        session = onnxruntime.InferenceSession(model(*turned).SerializeToString(), options())
        a, b = operands(np.random.default_rng(0), shape, *turned)
        rows, _, columns = shape
        binding, memory = session.io_binding(), [Guarded(4 * x.size) for x in (a, b)] + [Guarded(4 * rows * columns)]
        places = [one.address(at_end=at_end) for one in memory]
        for name, x, place in zip("ab", (a, b), places, strict=False):
            ctypes.memmove(place, x.ctypes.data, x.nbytes)
            binding.bind_input(name, "cpu", 0, np.float32, x.shape, place)
        binding.bind_output("y", "cpu", 0, np.float32, (rows, columns), places[2])
        print(shape, turned, at_end, flush=True)
        session.run_with_iobinding(binding)
        y = np.frombuffer(ctypes.string_at(places[2], 4 * rows * columns), np.float32)
        expected = (a.T if turned[0] else a).astype(float) @ (b.T if turned[1] else b)
        np.testing.assert_allclose(y.reshape(rows, columns), expected, rtol=0, atol=3e-5)


if __name__ == "__main__":
    main()
