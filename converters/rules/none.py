"""Operators through which no gradient flows, each with the reason. Absent and zero are different answers.

Only operators whose derivative is zero almost everywhere, or which have none, belong here. An operator that merely
has no rule yet does not: it must be refused, not passed over.
"""

from onnx_backprop.converters.reverse.registry import no_gradient

no_gradient("its output depends on the shape of its input only, not on the values", "Shape", "Size", "EyeLike")
no_gradient("its output depends on a shape only", "ConstantOfShape")
no_gradient(
    "its output is random and does not depend on the values of its input", "RandomNormalLike", "RandomUniformLike"
)
no_gradient("its output is drawn at random, which has no derivative", "Bernoulli", "Multinomial", zero=False)
no_gradient("it has no inputs", "Constant", "RandomNormal", "RandomUniform")

no_gradient(
    "it is piecewise constant: its derivative is zero almost everywhere", "Ceil", "Floor", "Round", "Sign", "Hardmax"
)
no_gradient(
    "it rounds, so that the gradient would leave out what passes through it. ob.dequantize(model) makes the float "
    "model that it stands for",
    "QLinearConv",
    "QLinearMatMul",
    zero=False,
    refused=True,
)

no_gradient("it reads the bits of a number as another type, which is nowhere smooth", "BitCast", zero=False)
no_gradient("its output depends on the frequencies through rounded bins only", "MelWeightMatrix")

no_gradient("its output is boolean", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
no_gradient("its output is boolean", "IsInf", "IsNaN", "OptionalHasElement")
no_gradient("its inputs and output are boolean", "And", "Not", "Or", "Xor")
no_gradient("its output is integer indices", "ArgMax", "ArgMin", "NonMaxSuppression", "NonZero")
no_gradient("its output is an integer", "SequenceLength")
no_gradient("its inputs and output are integers", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")
no_gradient("its input is an integer length", "BlackmanWindow", "HammingWindow", "HannWindow")
no_gradient("its input is text", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit")
no_gradient("its input is bytes", "ImageDecoder")
no_gradient("its input is integers or text", "TfIdfVectorizer")

_CLASSIC = "ai.onnx.ml"
_TREES = "a tree's output is piecewise constant in its inputs: its derivative is zero almost everywhere"
no_gradient(_TREES, "TreeEnsemble", "TreeEnsembleRegressor", "TreeEnsembleClassifier", domain=_CLASSIC)
no_gradient(
    "it is piecewise constant: its derivative is zero almost everywhere",
    "Binarizer",
    "OneHotEncoder",
    "LabelEncoder",
    "CategoryMapper",
    domain=_CLASSIC,
)
