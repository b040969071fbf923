"""What stands before or behind a BatchNorm, done in its own passes: elementwise programs on a channel. Compiled.

    4 1; Sub t0 s0; Mul v0 s1; Add v1 s2; Add v2 t1; Relu v3 -> v4        y = Relu(γ·(x - μ)·r + β + residual)

Of such a program t0 is x, and the first three numbers are μ, γ·r and β of the channel; `planes` numbers follow, of
operands of shape (N, C, 1, …), and then those of the node. A forward program gives what the BatchNorm then puts out, a
backward one dy, for which t1 stands in the place of dy. Every step is rounded as if it were a node. Our own rewrites
alone make nodes that have one, of float32 and NCX, see `rewrites.fuse_batch_norms`.
"""

from collections.abc import Sequence
from dataclasses import replace

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, load_i64, stack, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import offset
from onnx_backprop.ort_ops.elementwise.program import Program
from onnx_backprop.ort_ops.runtime.bridge import Request
from onnx_backprop.ort_ops.runtime.call import MAX_INPUTS
from onnx_backprop.ort_ops.runtime.stages import Call

NORMALISED = ("Sub", ("t0", "s0")), ("Mul", ("v0", "s1")), ("Add", ("v1", "s2"))
CHANNEL_NUMBERS = 3  # that a program reads first
MOST_NUMBERS = 32

_INPUTS_AT = offset(Call, "inputs")
row, numbers = stack(MAX_INPUTS), stack(MOST_NUMBERS // 2)


@inner
def begin(numbers, mean, slope, beta):
    """The numbers of a channel."""
    store_f32(numbers, 0, mean)
    store_f32(numbers, 1, slope)
    store_f32(numbers, 2, beta)


@inner
def fill(call, row, numbers, own, tensors, at, planes, count):
    """The addresses of the tensors of a program, and its numbers behind those of the channel and of planes.

    `own` tensors are the first inputs, the others stand behind the numbers, which are the input `at`.
    """
    for n in range(CHANNEL_NUMBERS + planes, count):
        store_f32(numbers, n, load_f32(load_i64(call + _INPUTS_AT, at), n - CHANNEL_NUMBERS - planes))
    for n in range(tensors):
        store_i64(row, n, load_i64(call + _INPUTS_AT, n if n < own else at + 1 + n - own))


@inner
def fill_planes(call, numbers, at, planes, plane):
    """The numbers of a plane, of the inputs from `at` on."""
    for n in range(planes):
        store_f32(numbers, CHANNEL_NUMBERS + n, load_f32(load_i64(call + _INPUTS_AT, at + n), plane))


def program_of(request: Request) -> str:
    """The program of a node, "" where it has none; ShapeError for other types than float32."""
    program = request.attributes["program"]
    if program and request.element_type != F32:
        raise ShapeError(f"a program is of float32: {program}", op_type=request.attributes.op)
    return program


def accepting(op: Op, own: int, parameters: tuple[Input, ...] = (), outputs: tuple[Output, ...] = ()) -> Op:
    """An operator that takes a program, which reads its first `own` inputs, with what that reads beside them.

    outputs: more of them, of the shape of src. The shape function's errors: no program of this operator, or tensors
    and numbers that are not what it reads.
    """
    count = MAX_INPUTS - len(op.inputs) - len(parameters) - 1
    more = [Input(f"operand_{n}", "T1", "Of the shape of src, or of its planes.", optional=True) for n in range(count)]
    own_numbers = Input("numbers", "T5", "What the program reads, 1-D.", optional=True)

    def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
        result = op.shapes(attrs, args[: len(op.inputs)])
        if attrs["program"]:
            program, planes = Program.parse(attrs["program"]), attrs["planes"]
            dims = [arg and arg.dims for arg in args]
            behind, src = program.tensors - own, dims[0]
            wanted = [*[src] * behind, *[src and (*src[:2], *[1] * len(src[2:]))] * planes]
            wanted += [None] * (count - len(wanted))
            numbers = [*(dims[-count - 1] or ()), 0][0]
            fits = isinstance(numbers, int) and program.numbers <= min(MOST_NUMBERS, CHANNEL_NUMBERS + planes + numbers)
            fits = fits and len(dims[-count - 1] or ()) < 2 and behind >= 0 and len(program.results) == 1
            if not fits or dims[-count:] != wanted or attrs["data_format"] != "NCX":
                raise ShapeError(f"no program for operands of the shapes {dims}: {program}", op_type=attrs.op)
        return *result, *[result[0]] * len(outputs)

    attributes = (
        Attribute("program", "string", "A program, see `batch_norm_programs`.", default=""),
        Attribute("planes", "int", "How many operands have a number for each plane of src.", default=0),
    )
    return replace(
        op,
        attributes=(*op.attributes, *attributes),
        inputs=(*op.inputs, *parameters, own_numbers, *more),
        outputs=(*op.outputs, *outputs),
        shape=shape,
    )
