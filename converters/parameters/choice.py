"""The choice of parameters: for each float tensor of a graph whether it is trained, why not, and whether that is sure.

What the file says decides. Where it says nothing, the node that reads a tensor does, then the numbers in it; names
decide only between a tensor of zeros or ones that stands for nothing and a parameter that has not been trained yet.
An exponent that is trained makes NaN of the first negative number, the step of a Range another length, a limit of
-3.4e38 an overflow. A caller who names such a tensor trains it all the same.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.parameters import structure, values
from onnx_backprop.converters.parameters.structure import CLASSES, NEVER_TRAINED, SINGLE, STATISTIC, Use
from onnx_backprop.converters.prepare.exporters.origins import (
    FOLDED,
    FROZEN,
    NAMED,
    Origin,
    is_operation,
    normed_by,
    origin_of,
)
from onnx_backprop.converters.prepare.exporters.torch_metadata import BUFFER, CONSTANT, PARAMETER, TIES
from onnx_backprop.opset.graphs.walk import is_standard

BUFFERS = ("buffer of the module", "buffer, by its name")  # as what a tensor is left out
_KINDS = {BUFFER: BUFFERS[0], CONSTANT: "constant of the module", FROZEN: "requires no gradient"}
_CODEBOOK = "it is read as a codebook, which the module may renew without a gradient"
_LEARNED = ("Clip", "Max", "Min", "Pow")  # whose limits and exponents modules train
# whose scales a quantiser has added to what was exported
_IN_BLOCKS = ("MatMulNBits", "GatherBlockQuantized", "MatMulBnb4", "QMoE")
_COMPUTED = "the exporter has computed it"
_MASKED = (
    "it has exact zeros, as a weight that the exporter has multiplied by a mask, which ob.torch.export keeps apart"
)
_UNSAID = "the file calls it neither parameter nor buffer"
_MERGED = "the exporter has merged a convolution with what follows it, as BatchNormalization"
_MERGED_BY_TOOL = "by its name, a product has been merged with what follows it, as BatchNormalization"
# names of onnxruntime, onnxslim and TensorFlow
_FUSED = re.compile(r"(Conv(Bn|Mul|Add)|MatMulBn)Fusion_|.*_(weight|bias)_fused$|.*/merged_input:0$")
# of TensorFlow, which names each value layer/operation:0, what reads or only moves a variable
_TENSORFLOW = re.compile(r".+/(\w+?)(_\d+)?:\d+")
_VARIABLE = {"ReadVariableOp", "Reshape", "Transpose", "ExpandDims", "Squeeze", "Cast", "Const", "resource"}
# outputs of torch's rewriter, behind onnxruntime's, which joins the activation
_REWRITER = re.compile(r"node_Conv(Transpose)?_\d+")
_REWRITTEN = re.compile(r"(fused )?node_(Conv|ConvTranspose|Gemm)_\d+/\w+|getitem(_\d+)?")
_OUTPUT_OF = re.compile(r"/(?:.*/)?([A-Za-z]+)(?:_\d+)?_output_\d+")  # TorchScript's, of what a node makes
_WRITTEN = re.compile(r"val_\d+|/(.*/)?(Cast|Sqrt)(_\d+)?_output_\d+")  # single numbers that the code has, or lengths
_PADDLE = re.compile(r".+_\d+\.[wb]_\d+")  # Paddle's parameters, and its buffers
_PADDLE_BUFFER = re.compile(r"generated_tensor_\d+")
_GENERATED = re.compile(
    r"^\W*\d*$|(^|[/_.:])constants?[/_.:\d]|(^|[/_.:])(\w|c(on)?st\w*|val_\d+)(:\d+)?$|::|_(out(put)?|expr)_\d+|^_",
    re.IGNORECASE,
)
_OF_PARAMETERS = (SINGLE, values.SYMMETRIC, values.AVERAGES)  # what an exporter may have computed from a parameter
_MOVING = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_PERHAPS = frozenset({SINGLE, values.POSITIONS, values.SLOPES, STATISTIC})  # a parameter where nothing else is one
_WORDS = re.compile(r"[A-Za-z][a-z]*")
# words in the last part of a name that only parameters have, or only buffers and constants
_PARAMETER_WORDS = {"weight", "weights", "bias", "kernel", "gamma", "beta", "embed", "embedding", "embeddings", "token"}
_PARAMETER_WORDS |= {"tokens", "scale", "shift", "gain", "alpha", "w", "b"}
_SURE_WORDS = {"weight", "bias", "embed", "embedding", "embeddings", "token", "tokens", "gamma", "table"}
_WEIGHT_WORDS = {"weight", "weights", "bias", "kernel", "gamma", "beta", "coef"}  # that numbers do not overrule
_GATE_WORDS = {"alpha", "gain", "gate", "logit", "rezero", "shift", "temperature"}  # of single numbers
_BUFFER_WORDS = {"adj", "adjacency", "alibi", "anchor", "anchors", "basis", "blur", "buffer", "codebook", "cumprod"}
_BUFFER_WORDS |= {"dct", "dft", "ema", "eps", "filter", "filters", "freq", "freqs", "frequencies", "grid", "index"}
_BUFFER_WORDS |= {"laplacian", "mask", "masks", "mean", "mel", "offsets", "pe", "positions", "queue", "slopes"}
_BUFFER_WORDS |= {"sobel", "std", "stride", "strides", "var", "window"}
_NO_BUFFER = re.compile(r".*(token|log_std)s?")  # whatever words it has, as mask_token, and log_std of a policy
_CONSTANT_WORDS = {"const", "constant", "fill", "mask", "one", "ones", "zero", "zeros"}

_EPS = 1e-4  # what a denominator is kept from 0 by is less
_ANYTHING = re.compile(r"(jax_)?const_?\d+")  # what jax2onnx calls parameters and constants
_NUMBER_WORDS = {
    "cap",
    "e",
    "epsilon",
    "half",
    "inf",
    "inv",
    "log",
    "number",
    "pi",
    "quarter",
    "root",
    "six",
    "sqrt",
    "two",
}


@dataclass(frozen=True)
class Choice:
    """What is trained of some float tensors.

    left_out: the others, and what each is. doubtful: tensors of either kind of which the file does not say enough, and
    what speaks for a doubt.
    """

    left_out: dict[ir.Value, str]
    doubtful: dict[ir.Value, str]


def choose(graph: ir.Graph, floats: Collection[ir.Value], loss: ir.Value | None = None) -> Choice:
    """The choice among some initializers. loss: what is minimised, if that is known.

    What merely looks like a constant, as a single number does that plain arithmetic reads, is a parameter where
    `floats` has no other and the file says nothing of them; not where the weights are stored as integers.
    """
    factors = set[ir.Value]()
    stated = TIES in graph.metadata_props  # or torch calls parameters what needs no gradient too
    if loss is not None and not stated:
        factors.update(value for value in floats if structure.is_factor(value, loss, floats))
    context = _Context(
        set(structure.normalising(graph)),
        structure.angle_tables(floats),
        _frozen_norms(floats),
        _iterated(floats),
        factors,
        stated,
    )
    verdicts = {value: _judged(value, origin_of(value), context) for value in floats}
    left_out = {value: verdict.left_out for value, verdict in verdicts.items() if verdict.left_out}
    if len(left_out) == len(verdicts) and not structure.has_integer_weights(graph):
        unsaid = [v for v, role in left_out.items() if role in _PERHAPS and origin_of(v).kind in ("", FOLDED)]
        unsaid = [v for v in unsaid if not _named_as_constant(v)]  # as `one` behind trees
        left_out = {value: role for value, role in left_out.items() if value not in unsaid}
        verdicts |= dict.fromkeys(unsaid, _Verdict())
    return Choice(left_out, {value: verdict.doubt for value, verdict in verdicts.items() if verdict.doubt})


@dataclass(frozen=True)
class _Context:
    """What an input is normalised by, sines and cosines, the modules of `_frozen_norms`, what `_iterated` says,
    factors of the loss.

    stated: whether the file says which parameters require a gradient.
    """

    normalising: set[ir.Value]
    angles: set[ir.Value]
    frozen_norms: set[str]
    iterated: set[ir.Value]
    factors: set[ir.Value]
    stated: bool


@dataclass(frozen=True)
class _Verdict:
    left_out: str = ""  # what a tensor is that is no parameter
    doubt: str = ""


def _frozen_norms(floats: Collection[ir.Value]) -> set[str]:
    """The modules whose running statistics plain arithmetic reads: what they scale by are buffers too."""
    return {
        name.removesuffix(".running_var")
        for value in floats
        if (name := origin_of(value).name).endswith(".running_var")
        and all(node.op_type != "BatchNormalization" for node, _ in structure.uses_of(value))
    }


def _iterated(floats: Collection[ir.Value]) -> set[ir.Value]:
    """The vectors of spectral_norm. Parameters may have such names too, as factors of low rank, or weight_norm's."""
    values_by_name = {name: value for value in floats if (name := origin_of(value).name)}
    pairs = ((value, values_by_name.get(normed_by(name))) for name, value in values_by_name.items())
    return {value for value, weight in pairs if weight is not None and structure.is_iterated(value, weight)}


def _judged(value: ir.Value, origin: Origin, context: _Context) -> _Verdict:
    uses = list(structure.uses_of(value))
    defined = next((role for use in uses if (role := structure.defines(value, *use)) is not None), None)
    array = None if value.const_value is None else value.const_value.numpy()
    if defined in NEVER_TRAINED:
        return _Verdict(defined)
    weighs = value in context.factors and (origin.kind in (NAMED, PARAMETER) or not structure.is_single(value))
    if weighs and origin.kind not in _KINDS and not origin.parts:  # of parts, as exp(-s), which has a term of its own
        if array is not None and (array < 0).any():  # as in the last layer of a critic, written as a product and a sum
            return _Verdict(doubt="the loss is linear in it, but weights of classes are not below 0")
        return _Verdict(structure.FACTOR, "nothing bounds it, as with weights of classes")
    if origin.kind == PARAMETER:
        if origin.parts and _is_merged(uses, lambda other: bool(other.parts)):
            return _Verdict(doubt=_MERGED)
        parts = ", ".join(map(repr, origin.parts))
        table = (
            values.ANGLES if value in context.angles else structure.FREQUENCY if structure.makes_angles(value) else ""
        )
        if table and not context.stated and len(origin.parts) < 2:
            return _Verdict(doubt=f"its numbers are those of a {table}, which the module may not train")
        return _Verdict(doubt=f"the exporter has computed it from {parts}" if parts else "")
    if origin.kind in _KINDS:
        return _Verdict(defined or _KINDS[origin.kind])
    if defined is None and _is_merged_by_name(uses):
        return _Verdict(doubt=_MERGED_BY_TOOL)
    if origin.kind == NAMED:
        return _judged_by_name(value, origin.name, array, uses, defined, context)
    if defined is not None:
        limits = origin.kind == FOLDED and structure.reader_of(defined) in _LEARNED  # plain ones are Constant nodes
        return _Verdict(defined, _COMPUTED if limits else "")
    if _PADDLE_BUFFER.fullmatch(str(value.name)):
        return _Verdict(BUFFERS[1], "Paddle gives such names to tensors that are no parameters")
    absent = None if array is None else _absent(value, array, uses)
    if absent is not None and not _named_as_parameter(value, origin):
        doubt = "" if _named_as_constant(value) else "its numbers are all equal, and its name says nothing"
        trained = _ANYTHING.fullmatch(str(value.name)) and absent.startswith(("equal", "ones", "zeros"))
        return _Verdict("" if trained else absent, doubt)
    role = _by_numbers(value, array, uses, context)
    if role is not None:
        if origin.kind == FOLDED and role in _OF_PARAMETERS:
            return _of_exporter(value, array, uses)
        return _against_name(value, role, array)
    if origin.kind == FOLDED:
        return _of_exporter(value, array, uses)
    named = _TENSORFLOW.fullmatch(str(value.name))
    if named is None:
        return _Verdict()
    if named[1] not in _VARIABLE:
        return _Verdict(doubt=_COMPUTED)
    return _Verdict(doubt="" if any(structure.is_weight(value, *use) for use in uses) else _UNSAID)


def _against_name(value: ir.Value, role: str, array: np.ndarray | None) -> _Verdict:
    """Of a tensor whose numbers are those of no parameter, where the file has its name alone."""
    words, leaf = _words(str(value.name)), _words(re.split(r"[./]", str(value.name))[-1])
    constant = _BUFFER_WORDS | _CONSTANT_WORDS
    if role == SINGLE:  # as most constants are, whatever module they are in
        eps = array is not None and 0 < float(array.flat[0]) < _EPS
        open_ = _ANYTHING.fullmatch(str(value.name)) and not eps
        if _PADDLE.fullmatch(str(value.name)):
            return _Verdict(doubt="it is a single number with the name of a parameter")
        if not open_ and (leaf & (constant | _NUMBER_WORDS) or _GENERATED.search(str(value.name))):
            return _Verdict(role)
        named = leaf & (_WEIGHT_WORDS | _GATE_WORDS)
        doubt = "it is a single number with the name of a parameter" if named else "it is a single number"
        return _Verdict("" if leaf & _WEIGHT_WORDS else role, doubt)
    if words & _WEIGHT_WORDS:
        return _Verdict(doubt=f"its numbers are those of a {role}")
    return _Verdict(role, "" if words & constant else f"it looks like a {role}")


def _judged_by_name(
    value: ir.Value, name: str, array: np.ndarray | None, uses: list[Use], defined: str | None, context: _Context
) -> _Verdict:
    """A parameter or a buffer under its name in the module."""
    role = _by_numbers(value, array, uses, context)
    leaf = _words(name.rpartition(".")[2])
    if role == SINGLE and array is not None and structure.is_root_of_width(value, array):
        return _Verdict(role, "it scales an embedding by the root of its width")
    role = None if role == SINGLE else role
    if defined is not None and defined.startswith(CLASSES):
        return _Verdict(defined)
    if value in context.iterated:
        return _Verdict(BUFFERS[1])
    if leaf in ({"weight"}, {"bias"}) and name.rpartition(".")[0] in context.frozen_norms:
        return _Verdict(BUFFERS[1], "its module has running statistics for itself, as FrozenBatchNorm2d")
    buffer = not leaf.isdisjoint(_BUFFER_WORDS) and not _NO_BUFFER.fullmatch(name)
    if not leaf.isdisjoint(_SURE_WORDS) and not buffer and defined is None:
        if role is None and leaf & _SURE_WORDS == {"bias"} and value.shape is not None and len(value.shape) > 1:
            return _Verdict(doubt="a bias has one axis; the file calls it neither parameter nor buffer")
        scales = bool(uses) and all(is_standard(node, "Mul") for node, _ in uses)
        if role is None and leaf & _SURE_WORDS == {"weight"} and scales and not structure.is_vector(value):
            return _Verdict(doubt="it is multiplied element by element; the file calls it neither parameter nor buffer")
        doubt = "" if role is None else f"its numbers are those of a {role}"
        if role is None and "bias" in leaf and any(structure.is_second_bias(*use) for use in uses):
            doubt = f"it is added to a product that has a bias; {_UNSAID}"
        return _Verdict(doubt=doubt or _CODEBOOK if structure.is_codebook(value) else doubt)
    if defined is not None and (structure.reader_of(defined) in _IN_BLOCKS or not leaf.isdisjoint(_CONSTANT_WORDS)):
        return _Verdict(defined)
    if role is not None:
        return _Verdict(role, "" if buffer else "by its numbers; the file calls it neither parameter nor buffer")
    if buffer:
        return _Verdict(BUFFERS[1], _UNSAID)
    reader = f"it is the {defined}" if defined else _UNSAID
    return _Verdict(doubt=reader)


def _is_merged(uses: Sequence[Use], is_computed: Callable[[Origin], bool]) -> bool:
    """Whether the exporter has computed both the weight and the bias of the convolution that reads a tensor first."""
    node, index = uses[0] if uses else (None, 0)
    if node is None or node.op_type != "Conv" or index not in (1, 2):
        return False
    both = [value for value in node.inputs[1:3] if value is not None]
    return len(both) == 2 and all(is_computed(origin_of(value)) for value in both)


def _is_merged_by_name(uses: Sequence[Use]) -> bool:
    """Whether the convolution that reads a tensor first has a weight or a bias with a name that tools which merge give.

    torch's rewriter calls the bias of X.weight X.weight_bias, onnxslim both tensors after the node's output y, y_weight
    and y_bias, and those of a Gemm after that of what it took away, z_weight_fused and z_bias_fused. A bias of zeros is
    dropped: then the output's name is that of BatchNormalization's, or what was joined has the rewriter's. With its own
    bias a convolution has the name of torch's operation.
    """
    node, index = uses[0] if uses else (None, 0)
    if node is None or node.op_type not in ("Conv", "ConvTranspose", "FusedConv", "Gemm") or index not in (1, 2):
        return False
    weight, bias = (str(value.name) if value is not None else "" for value in (*node.inputs, None, None)[1:3])
    fused = weight == f"{node.outputs[0].name}_weight" or any(map(_FUSED.match, (weight, bias)))
    y = str(node.outputs[0].name)
    rewritten = _REWRITTEN.fullmatch(y) or (bias and _REWRITER.fullmatch(node.name or ""))
    return bias in (f"{weight}_bias", f"{y}_bias") or fused or bool(rewritten)


def _of_exporter(value: ir.Value, array: np.ndarray | None, uses: list[Use]) -> _Verdict:
    """What the exporter has computed and is nothing else."""
    if _is_merged(uses, lambda other: other.kind == FOLDED):
        return _Verdict(doubt=_MERGED)
    node = uses[0][0] if uses else None
    if structure.is_single(value):
        return _Verdict(SINGLE, "" if _WRITTEN.fullmatch(str(value.name)) else _COMPUTED)
    if node is None or array is None:
        return _Verdict(doubt=_COMPUTED)
    # a parameter that is read as it stands keeps its name; what a tool has computed has the name of a node's output
    named = _OUTPUT_OF.fullmatch(str(value.name))
    whole = array.ndim > 1 if named is None else array.ndim == 2
    linear = node.op_type == "MatMul" and whole and origin_of(value).name != ""  # of a module inside
    transposed = linear or node.op_type in ("GRU", "LSTM", "RNN")
    column = structure.is_vector(value) and array.ndim > 1 and array.shape[-1] == 1
    reshaped = column and structure.is_affine(node)
    moved = (transposed or reshaped) and (named is None or named[1] in _MOVING) and not is_operation(str(value.name))
    if linear and moved and values.is_masked(array):
        return _Verdict(doubt=_MASKED)
    return _Verdict(doubt="" if moved else _COMPUTED)


def _by_numbers(value: ir.Value, array: np.ndarray | None, uses: list[Use], context: _Context) -> str | None:
    """What the numbers of a tensor say that it is, and the nodes that read it; None for a parameter."""
    if value in context.angles:
        return values.ANGLES
    if structure.makes_angles(value):
        return structure.FREQUENCY
    if any(structure.is_weight(value, *use) for use in uses):
        if array is None:
            return None
        added = any(node.op_type == "Add" for node, _ in uses)
        if added and values.in_arithmetic(array) == values.MASK:
            return values.MASK
        if values.is_ramp(array):
            return values.POSITIONS
        return values.in_product(array) if any(node.op_type in ("Conv", "Gemm", "MatMul") for node, _ in uses) else None
    if value in context.normalising and structure.is_vector(value):
        return STATISTIC
    if array is not None and (role := values.in_arithmetic(array)) is not None:
        return role
    return SINGLE if structure.is_single(value) else None


def _absent(value: ir.Value, array: np.ndarray, uses: list[Use]) -> str | None:
    """What a tensor stands for that the module may not have, or that every run writes into."""
    every = [structure.stands_for_nothing(value, array, *use) for use in (*value.uses(), *uses)]
    roles = [role for role in every if role is not None]
    if roles:
        return roles[0]
    if _named_as_constant(value) and values.is_uniform(array) and not structure.is_single(value):
        weighs = any(structure.is_weight(value, *use) for use in uses)
        return None if weighs else "equal numbers"
    return None


def _named_as_parameter(value: ir.Value, origin: Origin) -> bool:
    """Whether a name speaks for a parameter: by a word, or as a person names one, as b1."""
    name = origin.name or str(value.name)
    leaf = re.split(r"[./]", name)[-1]
    if not _words(name).isdisjoint(_PARAMETER_WORDS):  # the whole name: TensorFlow writes conv/BiasAdd/ReadVariableOp
        return True
    return (
        not _named_as_constant(value)
        and re.fullmatch(r"[A-Za-z]{1,2}_?\d?", leaf) is not None
        and leaf not in ("h0", "c0")
    )


def _named_as_constant(value: ir.Value) -> bool:
    """Whether a name is that of a constant, as `zeros` or `/gn/Constant_1_output_0`."""
    leaf = re.split(r"[./]", str(value.name))[-1]
    if leaf.startswith("const_fold") or _ANYTHING.fullmatch(leaf):  # tf2onnx: any weight
        return False
    return not _words(leaf).isdisjoint(_CONSTANT_WORDS)


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}
