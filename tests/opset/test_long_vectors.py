"""Inference does not follow the numbers of long vectors, in whatever operator it would."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, defs, helper, shape_inference

from onnx_backprop.opset.functions.long_vectors import infer_shapes

LENGTH = 1 << 20
# Whose numbers inference follows, as ONNX says itself, in any version of the operator.
FOLLOWED = sorted(
    {s.name for s in defs.get_all_schemas_with_history() if s.domain == "" and s.has_data_propagation_function}
)


def inferred(monkeypatch: pytest.MonkeyPatch, node: str, length: int) -> list[str]:
    """The domains of a node that reads a vector, in each inference that follows numbers."""
    graph = helper.make_graph(
        [helper.make_node(node, ["v", "w"][: 1 if node in ("Cast", "Shape", "Size") else 2], ["y"], name="n")],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.INT64, [length]) for name in ("v", "w")],
        [helper.make_tensor_value_info("y", TensorProto.INT64, None)],
    )
    if node == "Cast":
        graph.node[0].attribute.append(helper.make_attribute("to", TensorProto.INT64))
    seen: list[str] = []
    real = shape_inference.infer_shapes

    def watched(model: ModelProto, *, data_prop: bool = False, **options: bool) -> ModelProto:
        if data_prop:
            seen.append(f"{model.graph.node[0].op_type} of {model.graph.node[0].domain!r}")
        return model if data_prop else real(model, **options)

    monkeypatch.setattr(shape_inference, "infer_shapes", watched)
    infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)]), check_type=False)
    return seen


def test_the_operators_are_known() -> None:
    assert {"Add", "Cast", "Gather", "Slice", "Squeeze"} <= set(FOLLOWED)


@pytest.mark.parametrize("op_type", FOLLOWED)
def test_long_vectors_are_not_followed(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (seen,) = inferred(monkeypatch, op_type, LENGTH)
    assert seen != f"{op_type} of ''"


@pytest.mark.parametrize("op_type", FOLLOWED)
def test_short_ones_are(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inferred(monkeypatch, op_type, 4) == [f"{op_type} of ''"]


@pytest.mark.parametrize("op_type", ["Abs", "Exp", "Relu", "Where"])
def test_others_keep_their_own_inference(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inferred(monkeypatch, op_type, LENGTH) == [f"{op_type} of ''"]
