"""Type and shape inference in onnx: what is known survives, what is unknown stays open."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

import onnx_backprop as ob
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.registry import DECLARED
from tests.opset.core.inference_models import AVG_POOL, CONV, CONVT, DATA, INTERPOLATE, MAX_POOL, NCX, RESAMPLE, model
from tests.support.checks import dims_of, infer, inferred, one_node_model


@pytest.mark.parametrize("op", sorted(DECLARED))
@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_static_shapes_and_types(op: str, element: int) -> None:
    """Of every worked example."""
    for example in DECLARED[op].examples:
        arrays = zip(BY_NAME[op].inputs, example.arrays(), strict=False)
        given = [a if a is None or not spec.tensor else list(a.shape) for spec, a in arrays]
        m = one_node_model(op, example.attributes, given, element_type=element)
        answers = zip(infer(m).graph.output, BY_NAME[op].outputs, (example.expected, *example.more), strict=True)
        for value, spec, answer in answers:
            assert inferred(m, value.name) == list(np.shape(answer)), example.id
            assert value.type.tensor_type.elem_type == (element if spec.type_name == "T1" else TensorProto.FLOAT)


@pytest.mark.parametrize(
    ("op", "attributes", "inputs", "dims"),
    [(op, *rest) for op, declaration in DECLARED.items() for rest in declaration.inferred],
)
def test_declared_inference(op: str, attributes: dict[str, object], inputs: list, dims: list) -> None:
    """None is an unknown rank: onnx knows the type only."""
    m = one_node_model(op, attributes, [i or [] for i in inputs])
    for value, given in zip(m.graph.input, inputs, strict=True):
        if given is None:
            value.type.tensor_type.ClearField("shape")
    assert [dims_of(value) for value in infer(m).graph.output] == dims


@pytest.mark.parametrize(
    ("signature", "body", "dims"),
    [
        # names stay; a number known on either side replaces the name
        ("(float[N,C,H,W] src, float[N,C,P,Q] dy) => (dx)", f"{INTERPOLATE} (src, dy)", ["N", "C", "H", "W"]),
        ("(float[N,C,H,W] src, float[2,3,P,Q] dy) => (dx)", f"{INTERPOLATE} (src, dy)", [2, 3, "H", "W"]),
        ("(float[?,3,H,W] src, float[N,C,P,Q] dy) => (dx)", f"{INTERPOLATE} (src, dy)", ["N", 3, "H", "W"]),
        (
            "(float[N,H,W,C] src, float[2,P,Q,3] dy) => (dx)",
            'dx = $InterpolateBackward <mode = "linear"> (src, dy)',
            [2, "H", "W", 3],
        ),
        (
            "(float[N,C,L] x, float[C] m, float[D] v, float[3] gamma) => (y)",
            f"y = $BatchNormForwardTraining <epsilon = 0.1, momentum = 0.5, {NCX}> (x, m, v, gamma)",
            ["N", 3, "L"],
        ),
        (
            "(float[N,C,L] x, float[2,D,L] dy, float[3] gamma) => (dx)",
            f"dx = $BatchNormTrainingBackward <epsilon = 0.1, {NCX}> (x, dy, , , gamma)",
            [2, 3, "L"],
        ),
        (
            "(float[N,C,L] x, float[2,D,L] dy, float[M,3] mean, float[8] gamma) => (dx)",
            "dx = $LayerNormBackward (x, dy, mean, , gamma)",
            [2, 3, 8],
        ),
        ("(float[N,C,H,W] x, float[2,3,P,Q] dy) => (dx)", f"{MAX_POOL} (x, dy)", [2, 3, "H", "W"]),
        ("(float[N,C,9,W] x, float[M,3,5,Q] dy) => (dx)", f"{MAX_POOL} (x, dy)", ["N", 3, 9, "W"]),
        (
            "(float[N,4,H,W] x, float[2,C,P,Q] dy) => (dx)",
            f"s = Shape (x) {AVG_POOL} (dy, s)",
            [2, 4, "H", "W"],
        ),
        ("(float[2,C,P,Q] dy, int64[4] s) => (dx)", f"{AVG_POOL} (dy, s)", [2, "C", None, None]),
        ("(float[2,C,P,Q] dy, int64[K] s) => (dx)", f"{AVG_POOL} (dy, s)", [2, "C", None, None]),
        # channels follow from the weights, lengths of the input from those of the output where they are numbers
        (
            "(float[N,C,9,W] dy, float[6,2,3,2] w) => (dx)",
            f"dx = $ConvTransposeBackwardData <{CONVT}, groups = 2> (dy, w)",
            ["N", 6, 5, None],
        ),
        (
            "(float[N,C,9,9] dy, float[I,2,K,2] w) => (dx)",
            f"dx = $ConvTransposeBackwardData <{CONVT}> (dy, w)",
            ["N", "I", None, 8],
        ),
        ("(float[N,C,9,W] x, float[O,2,3,2] w, float[6] b) => (y)", f"y = $Convolution <{CONV}> (x, w, b)", ["N", 6, 5, None]),
        # a shape that is an attribute, an initializer, a constant, or comes from Shape
        (
            "(float[N,C,P,Q] dy, float[6,4,3,2] w) => (dx)",
            f"dx = $ConvolutionBackwardData <{CONV}, dst_shape = [2, 4, 9, 9]> (dy, w)",
            [2, 4, 9, 9],
        ),
        (
            "(float[N,C,P,Q] dy, float[6,4,3,2] w) => (dx) <int32[4] s = {2, 4, 9, 9}>",
            f"{DATA} (dy, w, s)",
            [2, 4, 9, 9],
        ),
        (
            "(float[N,C,P,Q] dy, float[6,4,3,2] w) => (dx)",
            f"s = Constant <value = int32[4] {{2, 4, 9, 9}}> () {DATA} (dy, w, s)",
            [2, 4, 9, 9],
        ),
        (
            "(float[M,4,H,W] x, float[N,C,P,Q] dy, float[6,I,3,2] w) => (dx)",
            f"s64 = Shape (x) s = Cast <to = 6> (s64) {DATA} (dy, w, s)",
            ["M", 4, "H", "W"],
        ),
        (
            "(float[M,I,3,2] w, float[N,4,H,W] x, float[N,6,P,Q] dy) => (dw)",
            f"s64 = Shape (w) s = Cast <to = 6> (s64) dw = $ConvolutionBackwardWeights <{CONV}> (x, dy, s)",
            [6, 4, 3, 2],
        ),
        (
            "(float[H,W] x, float[P,Q] dy) => (dx)",
            f"s64 = Shape (x) s = Cast <to = 6> (s64) dx = $ResampleGrad <{RESAMPLE}> (dy, s)",
            ["H", "W"],
        ),
        # a shape input of unknown value: the rank, and what the other tensors say
        ("(float[2,C,P,Q] dy, float[6,4,3,2] w, int32[4] s) => (dx)", f"{DATA} (dy, w, s)", [2, 4, None, None]),
        ("(float[2,C,P,Q] dy, float[6,4,3,2] w, int32[K] s) => (dx)", f"{DATA} (dy, w, s)", [2, 4, None, None]),
        (
            "(float[N,4,H,W] x, float[N,6,P,Q] dy, int32[4] s) => (dw)",
            f"dw = $ConvolutionBackwardWeights <{CONV}> (x, dy, s)",
            [6, 4, None, None],
        ),
        ("(float[P,Q] dy, int32[2] s) => (dx)", f"dx = $ResampleGrad <{RESAMPLE}> (dy, s)", [None, None]),
        ("(float[P,Q] dy, int32[K] s) => (dx)", f"dx = $ResampleGrad <{RESAMPLE}> (dy, s)", [None, None]),
    ],
)  # fmt: skip
def test_partly_known_shapes(signature: str, body: str, dims: list[int | str | None]) -> None:
    assert inferred(model(signature, body)) == dims


UNKNOWN = ', "other" : 1'


@pytest.mark.parametrize(
    ("signature", "body", "dims"),
    [
        # the type itself is unknown: nothing is claimed, nothing fails
        ("(float[N,3,H,W] x, float[N,3,P,Q] dy) => (dx)", f"src = other.Op (x) {INTERPOLATE} (src, dy)", None),
        (
            "(float[N,3,H,W] src, float[N,3,P,Q] x) => (dx)",
            f"dy = other.Op (x) {INTERPOLATE} (src, dy)",
            ["N", 3, "H", "W"],
        ),
        ("(float[2,C,P,Q] dy, float[6,4,3,2] w) => (dx)", f"s = other.Op (w) {DATA} (dy, w, s)", [2, 4, None, None]),
        ("(float[6,4,3,2] x) => (dx)", f"dy = other.Op (x) w = other.Op (x) s = other.Op (x) {DATA} (dy, w, s)", None),
        ("(float[6,4,3,2] x) => (db)", "dy = other.Op (x) db = $BiasAddBackward (dy)", None),
    ],
)
def test_unknown_types(signature: str, body: str, dims: list[int | str | None] | None) -> None:
    assert inferred(model(signature, body, imports=UNKNOWN)) == dims


def test_attributes_of_an_enclosing_function() -> None:
    m = model(
        "(float[N,3,4] src, float[N,3,7] dy) => (dx)",
        'dx = local.Up <how = "linear", to = [7]> (src, dy)',
        imports=', "local" : 1',
        functions="""<opset_import: ["onnx_backprop" : 1], domain: "local"> Up <how, to> (src, dy) => (dx) {
            dx = onnx_backprop.InterpolateBackward <mode: string = @how, sizes: ints = @to, data_format = "NCX"> (src, dy)
        }""",
    )
    assert inferred(m) == ["N", 3, 4]
    m.graph.node[0].attribute[1].ints[:] = [8]
    with pytest.raises(
        ob.ShapeError, match="the spatial shape of diff_dst and attribute sizes must agree, got 7 and 8"
    ):
        infer(m)


def test_nodes_in_a_subgraph() -> None:
    m = model(
        "(bool c, float[N,3,4] a, float[N,3,7] dy) => (dx)",
        """dx = If (c) <
            then_branch = t () => (one) { one = $InterpolateBackward <mode = "linear", data_format = "NCX"> (a, dy) },
            else_branch = e () => (two) { two = Identity (a) }>""",
    )
    assert inferred(m) == ["N", 3, 4]


def test_inference_leaves_the_model_alone() -> None:
    """Validation has no side effects on what it reads."""
    m = model("(float[N,3,4] src, float[N,3,7] dy) => (dx)", f"{INTERPOLATE} (src, dy)")
    before = m.SerializeToString(deterministic=True)
    infer(m)
    assert m.SerializeToString(deterministic=True) == before
