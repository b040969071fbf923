"""Products in registers of whole matrices, where the processor has them, against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.functions.onnx import standard_body
from onnx_backprop.ort_ops import native_kernels_work
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.products import matrix_product

SHAPES = [
    (1, 1, 1),
    (7, 40, 17),
    (33, 70, 65),
    (32, 32, 32),
    (64, 577, 48),
    (129, 600, 401),
    (401, 96, 160),
    (400, 70, 128),
    (520, 33, 31),
]
needed = pytest.mark.skipif(
    not (native_kernels_work() and matrix_tiles()), reason="this processor has no registers of matrices"
)
each_way = pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])


def model(left: int = 0, right: int = 0) -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "ai.onnx.contrib": 1]>
        g (float[] a, float[] b) => (float[] y)
        {{ y = ai.onnx.contrib.OnnxBackprop_MatrixProduct<transA = {left}, transB = {right}>(a, b) }}""")


def options(threads: int = 1) -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level, settings.intra_op_num_threads = 4, threads
    return ob.register_ops(settings)


def operands(rng: np.random.Generator, shape: tuple[int, int, int], left: int, right: int) -> list[np.ndarray]:
    """Numbers of any size and sign, which have digits in every part."""
    rows, k, columns = shape
    sides = (k, rows) if left else (rows, k), (columns, k) if right else (k, columns)
    return [rng.standard_normal(side, np.float32) for side in sides]


ELSEWHERE = """
import numpy as np
from tests.ort_ops.products.test_matrix_product import run
try:
    run(*np.ones((2, 40, 40), np.float32))
except Exception as e:
    print(e)
"""


@pytest.mark.skipif(not native_kernels_work(), reason="no native kernels")
def test_a_graph_of_another_processor_is_refused() -> None:
    """LLVM would end the process."""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-c", ELSEWHERE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "MatrixProduct: expected a processor with registers of matrices (AMX), got 'generic'" in ended.stdout


def run(a: np.ndarray, b: np.ndarray, left: int = 0, right: int = 0, threads: int = 1) -> np.ndarray:
    session = onnxruntime.InferenceSession(model(left, right).SerializeToString(), options(threads))
    return np.asarray(session.run(None, {"a": a, "b": b})[0])


@needed
@each_way
def test_a_sum_of_nothing_is_zero(rng, turned: tuple[int, int]) -> None:
    """The gradient of an expert's weights where no token came to it."""
    for shape in ((40, 0, 70), (0, 40, 70), (40, 70, 0)):
        a, b = operands(rng, shape, *turned)
        y = run(a, b, *turned)
        assert y.shape == (shape[0], shape[2])
        assert not y.any()


@needed
@each_way
def test_a_sum_rounds_as_one_of_float32_does(rng, turned: tuple[int, int]) -> None:
    for shape in SHAPES:
        a, b = operands(rng, shape, *turned)
        left, right = (x.T if turn else x for x, turn in zip((a, b), turned, strict=True))
        size = np.abs(left).astype(float) @ np.abs(right)  # of which a part in bfloat16 alone would lose 2^-9
        np.testing.assert_array_less(
            np.abs(run(a, b, *turned) - left.astype(float) @ right), 2**-22 * size + 1e-30, err_msg=str(shape)
        )


@needed
def test_many_steps_round_no_more_than_onnxruntime(rng) -> None:
    a, b = rng.random((40, 20_000), np.float32), rng.random((20_000, 64), np.float32)
    exact = a.astype(float) @ b
    assert np.abs(run(a, b) - exact).max() < np.abs(a @ b - exact).max() + 2e-7 * exact.max()


@needed
def test_rows_of_any_rank(rng) -> None:
    a, b = rng.standard_normal((2, 3, 9, 40), np.float32), rng.standard_normal((40, 33), np.float32)
    np.testing.assert_array_equal(run(a, b), run(a.reshape(54, 40), b).reshape(2, 3, 9, 33))
    assert run(a[:0], b).shape == (0, 3, 9, 33)


@needed
@each_way
def test_the_same_bits_on_any_number_of_threads(rng, turned: tuple[int, int]) -> None:
    a, b = operands(rng, (700, 650, 450), *turned)
    np.testing.assert_array_equal(run(a, b, *turned), run(a, b, *turned, threads=2))


@needed
@each_way
def test_the_same_bits_whatever_is_kept(rng, turned: tuple[int, int]) -> None:
    """Few rows are kept while columns pass, many pass; with the operands exchanged where that saves turning."""
    a, b = operands(rng, (640, 640, 320), *turned)
    few = a[:, :130] if turned[0] else a[:130]
    np.testing.assert_array_equal(run(np.ascontiguousarray(few), b, *turned), run(a, b, *turned)[:130])


@needed
def test_small_and_large_numbers_and_those_that_are_none(rng) -> None:
    a, b = rng.standard_normal((33, 64), np.float32), rng.standard_normal((64, 40), np.float32)
    for factor in (2.0**-60, 2.0**60):
        np.testing.assert_array_equal(run(a * np.float32(factor), b), run(a, b) * np.float32(factor))
    for bits in (0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000):
        spoilt = a.copy()
        spoilt.view(np.uint32)[5, 7] = bits
        got = run(spoilt, b)
        assert not np.isfinite(got[5]).any(), hex(bits)
        np.testing.assert_array_equal(np.delete(got, 5, 0), np.delete(run(a, b), 5, 0))


@needed
@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 4), (5, 6), "one length to sum over, got 4 and 5"),
        ((4,), (4, 6), "a of rank 2 or more"),
        ((3, 4), (2, 4, 6), "b of rank 2"),
    ],
)
def test_operators_other_than_products_are_refused(a: tuple[int, ...], b: tuple[int, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(np.zeros(a, np.float32), np.zeros(b, np.float32))


@needed
def test_nothing_beyond_tensors_or_scratch_is_touched() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.ort_ops.products.beside_pages"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-300:] + result.stderr[-2000:]


@each_way
def test_reference_and_body_agree(rng, turned: tuple[int, int]) -> None:
    op, (a, b) = matrix_product.OP, operands(rng, (3, 4, 5), *turned)
    given = {"transA": turned[0], "transB": turned[1]}
    body = standard_body(op, Attributes(op, given), [Arg(a.shape), Arg(b.shape)], 18, single=True)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in (("a", a), ("b", b))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    imports = [helper.make_opsetid("", 18)]
    written = helper.make_model(
        helper.make_graph(body.node, "g", inputs, outputs), opset_imports=imports, ir_version=10
    )
    session = onnxruntime.InferenceSession(written.SerializeToString())
    np.testing.assert_allclose(
        np.asarray(session.run(None, {"a": a, "b": b})[0]), op.evaluate([a, b], given), rtol=1e-6
    )
