"""LayerNormBackward of a tensor whose rank is not known refuses a scalar when it runs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnx_backprop as ob


@pytest.mark.parametrize("start", [0, 1, -1])
def test_a_scalar_is_refused(start: int) -> None:
    node = helper.make_node(
        "LayerNormBackward", ["x", "dy"], ["dx"], domain=ob.DOMAIN, begin_norm_axis=start, use_affine=0
    )
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "dy", *node.output)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)]
    graph = helper.make_graph([node], "g", ends[:2], ends[2:])
    session = ob.session(helper.make_model(graph, opset_imports=imports, ir_version=10), kernels="onnx")
    row = np.array([1, 2, 4], np.float32)
    if start < 1:
        (dx,) = session.run(None, {"x": row, "dy": row})
        assert np.asarray(dx).shape == (3,)
    with pytest.raises(Exception, match="LayerNormBackward" if start == 0 else "Flatten|rank"):
        session.run(None, {"x": np.array(2, np.float32), "dy": np.array(3, np.float32)})
