"""What in onnxruntime ends the process on models in float16, or spoils them, and the notes in a file that say so.

MatmulTransposeFusion (from 1.24 on): a product of an operand behind a Transpose, of another rank than the other one.
FuseFp16InitializerToFp32NodeTransformer (1.24 to 1.28): a float16 parameter that is an input with a default.
Memory patterns (1.18): values of float16 graphs with symbolic lengths overlap from the second run on: NaN, or lengths
of shapes that are none.
"""

from collections.abc import Collection

from onnx import ModelProto, TensorProto

OPTIMISERS = ("FuseFp16InitializerToFp32NodeTransformer", "MatmulTransposeFusion")
NOTE = "onnx_backprop.disabled_optimizers"  # key of a model's metadata: names for InferenceSession, with spaces between
PATTERNS = "onnx_backprop.session_options"  # key of a model's metadata: what SessionOptions are to say, and where
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def holds_half(model: ModelProto) -> bool:
    """Whether tensors of a model, or what a Cast makes, are float16 or bfloat16."""
    return holds(model, _HALF)


def holds(model: ModelProto, types: Collection[int]) -> bool:
    """Whether tensors of a model, or what a Cast makes, are of one of some types."""
    graph = model.graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    kinds |= {tensor.data_type for tensor in graph.initializer}
    casts = (node for one in (graph, *model.functions) for node in one.node if node.op_type == "Cast")
    kinds |= {attribute.i for node in casts for attribute in node.attribute if attribute.name == "to"}
    return not kinds.isdisjoint(types)


def without(version: str) -> tuple[str, ...]:
    """The optimisers that a session on a model in float16 goes without in a version of onnxruntime, as "1.32.0".

    Not the first one where it does no harm: a MatMulNBits of accuracy_level 4 and float16 scales is wrong without it.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return OPTIMISERS if (1, 24) <= (major, minor) <= (1, 28) else OPTIMISERS[1:]


def note_optimisers(model: ModelProto) -> None:
    """Write down, in place, what a session on a model in float16 is to go without."""
    if holds_half(model) and all(entry.key != NOTE for entry in model.metadata_props):
        model.metadata_props.add(key=NOTE, value=" ".join(OPTIMISERS))
        model.metadata_props.add(key=PATTERNS, value="enable_mem_pattern=False before onnxruntime 1.20")
