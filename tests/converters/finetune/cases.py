"""Models with one kind of linear layer each, and what W + ΔW is, written out for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, helper, numpy_helper, parser

Array = np.ndarray
RANK, ALPHA = 2, 3.0
SCALE = ALPHA / RANK


@dataclass(frozen=True)
class Case:
    """A model of `nodes`, the tensors w (and others), x; delta: of A and B, with the axes of w."""

    name: str
    nodes: str
    x: tuple[int, ...]
    tensors: dict[str, Array]
    delta: Callable[[Array, Array], Array] | None
    functions: str = ""

    def model(self) -> ModelProto:
        dims = ", ".join(map(str, self.x))
        model = parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "own": 1]> m (float[{dims}] x) => (float y) '
            f"{{ {self.nodes} }} {self.functions}"
        )
        tensors = [numpy_helper.from_array(array, name) for name, array in self.tensors.items()]
        model.graph.initializer.extend(tensors)
        return model


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def f32(*shape: int) -> Array:
    return rng().standard_normal(shape).astype(np.float32)


def grouped(groups: int, w: tuple[int, ...]) -> Callable[[Array, Array], Array]:
    """Every number of ΔW by itself."""

    def delta(a: Array, b: Array) -> Array:
        result, per_group = np.zeros(w), w[0] // groups
        for place in np.ndindex(*w):
            o, *rest = place
            for r in range(RANK):
                result[place] += b[o, r].item() * a[(o // per_group * RANK + r, *rest)]
        return result

    return delta


def transposed_kernel(groups: int, w: tuple[int, ...]) -> Callable[[Array, Array], Array]:
    """Every number of ΔW by itself."""

    def delta(a: Array, b: Array) -> Array:
        result, per_group = np.zeros(w), w[0] // groups
        for place in np.ndindex(*w):
            i, o, *rest = place
            for r in range(RANK):
                result[place] += a[(i, r, *rest)] * b[i // per_group * w[1] + o, r].item()
        return result

    return delta


def matrix(a: Array, b: Array) -> Array:
    return a @ b


def transposed(a: Array, b: Array) -> Array:
    return (a @ b).T


def left(a: Array, b: Array) -> Array:
    return b @ a


CASES = [
    Case("matmul", "y = MatMul(x, w)", (3, 5), {"w": f32(5, 4)}, matrix),
    Case("matmul of three axes", "y = MatMul(x, w)", (2, 3, 5), {"w": f32(5, 4)}, matrix),
    Case("matmul of a vector", "y = MatMul(x, w)", (5,), {"w": f32(5, 4)}, matrix),
    Case("matmul from the left", "y = MatMul(w, x)", (2, 5, 3), {"w": f32(4, 5)}, left),
    Case("matmul from the left of a vector", "y = MatMul(w, x)", (5,), {"w": f32(4, 5)}, left),
    Case("gemm", "y = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)", (3, 5), {"w": f32(5, 4), "c": f32(4)}, matrix),
    Case("gemm, transposed", "y = Gemm <transA = 1, transB = 1> (x, w)", (5, 3), {"w": f32(4, 5)}, transposed),
    Case(
        "linear of PyTorch",
        "t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)",
        (2, 3, 5),
        {"w": f32(4, 5)},
        transposed,
    ),
    Case("read in two ways", "t = Transpose(w) p = MatMul(x, t) y = MatMul(p, w)", (3, 5), {"w": f32(4, 5)}, None),
    Case(
        "conv",
        "y = Conv <strides = [2, 1], pads = [1, 0, 2, 1], dilations = [1, 2]> (x, w, c)",
        (2, 3, 9, 8),
        {"w": f32(4, 3, 3, 2), "c": f32(4)},
        grouped(1, (4, 3, 3, 2)),
    ),
    Case(
        "conv of two groups, one axis",
        'y = Conv <group = 2, auto_pad = "SAME_UPPER", strides = [2]> (x, w)',
        (2, 6, 9),
        {"w": f32(4, 3, 3)},
        grouped(2, (4, 3, 3)),
    ),
    Case(
        "depthwise conv", "y = Conv <group = 3> (x, w)", (1, 3, 6, 6), {"w": f32(6, 1, 3, 3)}, grouped(3, (6, 1, 3, 3))
    ),
    Case(
        "transposed conv",
        "y = ConvTranspose <strides = [3, 1], pads = [1, 0, 2, 1], dilations = [1, 2], output_padding = [2, 0]> (x, w, c)",
        (2, 3, 4, 5),
        {"w": f32(3, 4, 3, 2), "c": f32(4)},
        transposed_kernel(1, (3, 4, 3, 2)),
    ),
    Case(
        "transposed conv of two groups, one axis",
        'y = ConvTranspose <group = 2, auto_pad = "SAME_UPPER", strides = [2]> (x, w)',
        (2, 6, 5),
        {"w": f32(6, 2, 3)},
        transposed_kernel(2, (6, 2, 3)),
    ),
    Case(
        "depthwise transposed conv to a shape, three axes",
        "y = ConvTranspose <group = 3, strides = [2, 2, 1], output_shape = [5, 6, 4]> (x, w)",
        (1, 3, 2, 3, 4),
        {"w": f32(3, 1, 3, 2, 1)},
        transposed_kernel(3, (3, 1, 3, 2, 1)),
    ),
    Case("table", "i = Cast <to = 7> (x) y = Gather(w, i)", (3, 4), {"w": f32(5, 4)}, matrix),
    Case(
        "transposed table and one index",
        "s = Squeeze(x) i = Cast <to = 6> (s) t = Transpose(w) y = Gather <axis = -2> (t, i)",
        (1,),
        {"w": f32(4, 5)},
        transposed,
    ),
    Case(
        "weights of a lstm",
        "y, h, s = LSTM <hidden_size = 3> (x, w, v)",
        (4, 2, 5),
        {"w": f32(1, 12, 5), "v": f32(1, 12, 3)},
        left,
    ),
    Case(
        "recurrent weights of a gru, both directions",
        'y, h = GRU <hidden_size = 3, direction = "bidirectional"> (x, v, w)',
        (4, 2, 5),
        {"v": f32(2, 9, 5), "w": f32(2, 9, 3)},
        left,
    ),
    Case("matrices of experts", "y = MatMul(x, w)", (2, 3, 5), {"w": f32(2, 5, 4)}, matrix),
    Case("matrices of experts and a vector", "y = MatMul(x, w)", (5,), {"w": f32(2, 5, 4)}, matrix),
    Case("matrices of experts from the left", "y = MatMul(w, x)", (2, 5, 3), {"w": f32(2, 4, 5)}, left),
    Case(
        "attention of onnxruntime",
        "y = com.microsoft.Attention <num_heads = 2> (x, w, c)",
        (2, 3, 4),
        {"w": f32(4, 12), "c": f32(12)},
        matrix,
    ),
    Case(
        "in a function",
        "y = own.linear(x, w)",
        (3, 5),
        {"w": f32(5, 4)},
        matrix,
        functions='<opset_import: ["": 21], domain: "own"> linear (a, b) => (c) { d = Relu(a) c = MatMul(d, b) }',
    ),
]


def quantized() -> dict[str, tuple[ModelProto, ModelProto, Callable[[Array, Array], Array]]]:
    """Models with quantized weights, each with its twin in floats and ΔW there, of the tensor w."""
    steps, zeros = np.array([0.1, 0.05, 0.2, 0.07], np.float32), np.array([1, -2, 0, 3], np.int8)
    numbers = rng().integers(-100, 100, (5, 4)).astype(np.int8)
    dq = Case(
        "",
        "d = DequantizeLinear <axis = 1> (q, s, z) y = MatMul(x, d)",
        (3, 5),
        {"q": numbers, "s": steps, "z": zeros},
        None,
    )
    kernel = rng().integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)
    conv = Case(
        "", "d = DequantizeLinear <axis = 0> (q, s, z) y = Conv(x, d)", (1, 3, 6, 6), {**dq.tensors, "q": kernel}, None
    )
    packed = {
        "q": rng().integers(0, 256, (4, 2, 8)).astype(np.uint8),
        "s": rng().uniform(0.05, 0.2, (4, 2)).astype(np.float32).reshape(-1),
    }
    bits = Case(
        "", "y = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 16> (x, q, s)", (2, 32), packed, None
    )
    four = Case(
        "",
        "y = com.microsoft.MatMulBnb4 <K = 32, N = 4, block_size = 16, quant_type = 0> (x, q, s)",
        (2, 32),
        {"q": packed["q"].reshape(-1), "s": packed["s"]},
        None,
    )
    fp4 = np.float32([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
    named = np.concatenate([fp4, -fp4])[np.stack([packed["q"] >> 4, packed["q"] & 15], -1).reshape(8, 16)]
    nibbles = np.stack([packed["q"] & 15, packed["q"] >> 4], -1).reshape(4, 2, 16).astype(np.float32)
    unpacked = ((nibbles - 8) * packed["s"].reshape(4, 2, 1)).reshape(4, 32).T.copy()
    rows = Case(
        "",
        "i = Cast <to = 7> (x) y = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16> (q, i, s)",
        (3, 4),
        {"q": packed["q"].reshape(4, 16), "s": packed["s"].reshape(4, 2)},
        None,
    )
    half = rng().standard_normal((5, 4)).astype(np.float16)
    cast = Case("", "f = Cast <to = 1> (q) y = MatMul(x, f)", (3, 5), {"q": half}, None)

    experts = Case(
        "",
        "d = DequantizeLinear <axis = 2> (q, s, z) y = MatMul(x, d)",
        (2, 3, 5),
        {**dq.tensors, "q": np.stack([numbers] * 2)},
        None,
    )
    per_row = {**dq.tensors, "q": numbers.T.copy()}
    table = Case(
        "", "i = Cast <to = 7> (x) d = DequantizeLinear <axis = 0> (q, s, z) y = Gather(d, i)", (3, 4), per_row, None
    )
    kernels = rng().integers(-100, 100, (3, 4, 3)).astype(np.int8)
    transposed_conv = Case(
        "",
        "d = DequantizeLinear <axis = 1> (q, s, z) y = ConvTranspose <strides = [2]> (x, d)",
        (1, 3, 6),
        {**dq.tensors, "q": kernels},
        None,
    )

    def twin(nodes: str, x: tuple[int, ...], w: Array) -> ModelProto:
        return Case("", nodes, x, {"w": np.ascontiguousarray(w, np.float32)}, None).model()

    linear = "y = MatMul(x, w)"
    per_channel = kernel - zeros.astype(np.float32)[:, None, None, None]
    return {
        "QDQ matmul": (dq.model(), twin(linear, (3, 5), (numbers - zeros.astype(np.float32)) * steps), matrix),
        "QDQ conv": (
            conv.model(),
            twin("y = Conv(x, w)", (1, 3, 6, 6), per_channel * steps[:, None, None, None]),
            grouped(1, (4, 3, 3, 3)),
        ),
        "QDQ table": (
            table.model(),
            twin("i = Cast <to = 7> (x) y = Gather(w, i)", (3, 4), ((numbers - zeros.astype(np.float32)) * steps).T),
            matrix,
        ),
        "QDQ transposed conv": (
            transposed_conv.model(),
            twin(
                "y = ConvTranspose <strides = [2]> (x, w)",
                (1, 3, 6),
                (kernels - zeros.astype(np.float32)[:, None]) * steps[:, None],
            ),
            transposed_kernel(1, (3, 4, 3)),
        ),
        "QDQ experts": (
            experts.model(),
            twin(linear, (2, 3, 5), np.stack([(numbers - zeros.astype(np.float32)) * steps] * 2)),
            matrix,
        ),
        "MatMulNBits": (bits.model(), twin(linear, (2, 32), unpacked), matrix),
        "MatMulBnb4": (
            four.model(),
            twin(linear, (2, 32), (named * packed["s"][:, None]).reshape(4, 32).T.copy()),
            matrix,
        ),
        "packed table": (rows.model(), twin("i = Cast <to = 7> (x) y = Gather(w, i)", (3, 4), unpacked.T), matrix),
        "stored in float16": (cast.model(), twin(linear, (3, 5), half.astype(np.float32)), matrix),
    }


def with_tensor(model: ModelProto, name: str, array: Array) -> ModelProto:
    result = ModelProto.FromString(model.SerializeToString())
    for tensor in result.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    return result


def feeds_of(model: ModelProto) -> dict[str, Array]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: rng()
        .standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
        .astype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in model.graph.input
        if value.name not in stored
    }
