"""Bring a model to the opset that gradients are written in, once and without changing what it computes.

onnx's own version converter does the work, except for Upsample and Resize before opset 11. Those define no
coordinate rule; what runtimes do is x = o / scale, nearest taking floor(x) when scale >= 1 and ceil(x) below.
onnx's adapter turns them into a Resize with the newer defaults, which is another function, so they are set aside
under a name of ours and written back as a Resize that says what they do.
"""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper, version_converter

from ..opset.errors import InvalidModelError, UnsupportedError
from ..opset.functions import MIN_BODY_OPSET

MIN_OPSET = MIN_BODY_OPSET
_ASIDE = "onnx_backprop.aside"


def default_opset(proto: ModelProto) -> int:
    """The version of the default domain that a model imports."""
    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
    if version is None:
        raise InvalidModelError("the model imports no opset of the default domain")
    return version


def upgrade(proto: ModelProto) -> ModelProto:
    """The model at opset 18 or later; a model already there is returned as it is.

    Errors: UnsupportedError when onnx has no converter for an operator, or for a legacy Upsample or Resize whose
    scales are not constant or mix lengths >= 1 and < 1 under nearest.
    """
    version = default_opset(proto)
    if version >= MIN_OPSET:
        return proto
    for domain in [o for o in proto.opset_import if o.domain == "ai.onnx"]:
        domain.domain = ""
    legacy = _set_aside(proto) if version < 11 else []
    try:
        result = version_converter.convert_version(proto, MIN_OPSET)
    except Exception as e:
        raise UnsupportedError(
            f"converting the model from opset {version} to {MIN_OPSET} failed: {e}. Convert it another way first"
        ) from e
    if legacy:
        _write_back(result)
    return result


def _set_aside(proto: ModelProto) -> list[NodeProto]:
    nodes = [n for n in proto.graph.node if n.domain in ("", "ai.onnx") and n.op_type in ("Upsample", "Resize")]
    for node in nodes:
        node.domain = _ASIDE
    if nodes:
        proto.opset_import.append(helper.make_opsetid(_ASIDE, 1))
    return nodes


def _write_back(proto: ModelProto) -> None:
    constants = {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    nodes: list[NodeProto] = []
    for node in proto.graph.node:
        nodes.extend(_resize(node, constants) if node.domain == _ASIDE else [node])
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    imports = [o for o in proto.opset_import if o.domain != _ASIDE]
    del proto.opset_import[:]
    proto.opset_import.extend(imports)


def _resize(node: NodeProto, constants: dict[str, np.ndarray]) -> list[NodeProto]:
    """A legacy Upsample or Resize as Resize-18."""
    attributes: dict[str, AttributeProto] = {a.name: a for a in node.attribute}
    mode = attributes["mode"].s.decode() if "mode" in attributes else "nearest"
    before: list[NodeProto] = []
    if "scales" in attributes:  # Upsample-7
        scales_name = f"{node.output[0]}_scales"
        scales = np.array(attributes["scales"].floats, np.float32)
        before.append(helper.make_node("Constant", [], [scales_name], value=numpy_helper.from_array(scales)))
    else:
        scales_name = node.input[1]
        if mode == "nearest" and scales_name not in constants:
            raise UnsupportedError(
                "nearest needs constant scales before opset 11: below 1 it rounds the other way",
                op_type=node.op_type,
                node=node.name,
            )
        scales = constants.get(scales_name, np.ones(0, np.float32))
    nearest = "floor"
    if mode == "nearest" and (scales < 1).any():
        if (scales > 1).any():
            raise UnsupportedError(
                f"nearest with scales above and below 1 rounds in two ways, got {scales.tolist()}. Use two nodes",
                op_type=node.op_type,
                node=node.name,
            )
        nearest = "ceil"
    resize = helper.make_node(
        "Resize",
        [node.input[0], "", scales_name],
        list(node.output),
        name=node.name,
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        **({"nearest_mode": nearest} if mode == "nearest" else {}),
    )
    return [*before, resize]
