"""What is known of ONNX's operators beyond their schemas: one table, a column for each fact with what it means.

`node in VIEW` asks of a node, of ONNX's own domain alone; `"Reshape" in VIEW` of an operator. Columns that look alike
differ in what they promise; a test in onnxruntime, or in onnx's inference, shows it of each operator where it can.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS


class Fact(Collection[str]):
    """The operators that something holds of."""

    def __init__(self, operators: str | Iterable[str]) -> None:
        self.operators = frozenset(operators.split() if isinstance(operators, str) else operators)

    def __contains__(self, asked: object) -> bool:
        """Whether it holds of an operator, by name, or of a node of onnx or onnx_ir, which is of ONNX's own domain."""
        name: Any = getattr(asked, "op_type", asked)
        return name in self.operators and (name is asked or getattr(asked, "domain", "") in DEFAULT_DOMAINS)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.operators))

    def __len__(self) -> int:
        return len(self.operators)

    def __or__(self, other: "Fact") -> "Fact":
        return Fact(self.operators | other.operators)


# -- Where the numbers of a result come from.

# The result has the elements of the first input in their order; onnxruntime gives it the memory of that input.
VIEW = Fact("Flatten Identity Reshape Squeeze Unsqueeze")
# Every number of a result is one of the first input, at another place or several times.
MOVES = VIEW | Fact("DepthToSpace Expand Gather Slice SpaceToDepth Split Tile Transpose")
# The same of one of the inputs, or 0: where these are numbers of a half type, the result is exact in it.
KEEPS_ROUNDED = MOVES | Fact("Concat GlobalMaxPool Max MaxPool Min Relu")
# Of an integer that stands for a float, the result does in the same way, whatever scale and zero point.
MOVES_QUANTIZED = MOVES | Fact("GatherElements GatherND MaxPool Pad ReduceMax ReduceMin Resize")
# The result is not below 0: whatever is read, and where the numbers that are read are not.
NOT_NEGATIVE = Fact("Abs Exp HardSigmoid ReduceL1 ReduceL2 ReduceSumSquare Relu Sigmoid Softmax Softplus Sqrt")
KEEPS_SIGN = MOVES | Fact("Add AveragePool Clip Concat Div Dropout GlobalAveragePool GlobalMaxPool MaxPool Mul Pow")
KEEPS_SIGN |= Fact("ReduceMax ReduceMean ReduceSum")
# The result is a tensor as it was, but for its shape, its type, and elements that are left out or repeated.
HANDS_ON = VIEW | Fact("Cast CastLike Expand ScatterND Slice Tile Transpose Trilu")
# An element of the result depends on elements at the same place alone; of one input, of two, of several.
UNARY = Fact("Abs Acos Asin Atanh Cast Cos Exp Log Neg Reciprocal Sin Sqrt Tan Tanh")
ARITHMETIC = Fact("Add Div Mul Sub")
ELEMENTWISE = UNARY | ARITHMETIC | Fact("Max Mean Min Pow Sum Where")

# -- What a gradient has to know.

# Integers that were rounded from floats go through, and gradients with them: moved, rounded again, or multiplied.
CARRIES_ROUNDED = VIEW | Fact("Cast Concat ConvInteger DequantizeLinear MatMulInteger Transpose")
# Integers are made of floats.
ROUNDS = Fact("DynamicQuantizeLinear QuantizeLinear")
# The rule compares the result with the inputs bit by bit: what onnxruntime leaves unrounded must be computed again.
COMPARED = Fact("GlobalMaxPool Max Min ReduceMax ReduceMin")
# Two runs give different numbers.
DRAWS = Fact("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike")

# -- What shapes are computed by.

# The lengths of an input are read and none of its elements.
SHAPE = Fact("Shape Size")
# An input whose numbers reach a shape through it means that shape.
CARRIES_SHAPE = Fact("Cast Concat Gather Identity Reshape Slice Squeeze Unsqueeze")

# -- What onnxruntime does on the processor.

# No time: nothing is computed, or at most as many numbers as there are axes.
FREE = VIEW | SHAPE | Fact("Constant")
# The result may be written over an input of the same size that nobody reads afterwards.
IN_PLACE = Fact("Abs Add Clip Div Elu Exp LeakyRelu Mul Neg Relu Sigmoid Sqrt Sub Tanh")
# The result may lie in an operand's memory, or the node is taken away where it changes nothing.
MAY_SHARE = VIEW | Fact("Add Cast Concat Div Dropout Expand Max Mean Min Mul Pad Pow Slice Split Sub Sum Tile")
MAY_SHARE |= Fact("Transpose Where")
# It takes about as long as a copy of memory.
CHEAP = Fact("Add Clip Div HardSigmoid HardSwish LeakyRelu Mul Neg Relu Sub")
# It is fused with no neighbour: one more reader of what it reads changes no rounding.
UNFUSED = Fact("Concat ConvTranspose Expand Gather MaxPool Pad Resize Slice Split Tile")
# It is fused into a product behind it, whoever else reads its result; and the products.
FUSED_INTO_PRODUCTS = Fact("Cast Div Mul Transpose")
PRODUCTS = Fact("Gemm MatMul")
# Passes over memory that an operator takes, as several passes or as arithmetic that takes as long; 1 for any other.
PASSES = dict.fromkeys(("Erf", "Exp", "Gelu", "Log", "Pow", "Sigmoid", "Softplus", "Tanh"), 2) | {
    "BatchNormalization": 2,
    "GroupNormalization": 3,
    "InstanceNormalization": 3,
    "LayerNormalization": 2,
    "LogSoftmax": 3,
    "Resize": 2,
    "Softmax": 3,
}
