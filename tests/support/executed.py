"""What onnxruntime holds in memory during a run, by the order it has run the nodes of its optimised model in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto

import onnx_backprop as ob

VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_BYTES = {"float": 4, "double": 8, "float16": 2, "int64": 8, "int32": 4, "uint32": 4, "bool": 1}


class Executed:
    """One run of a model: its outputs, the optimised model, and the most bytes that nodes' results take at once."""

    def __init__(self, model: ModelProto, feeds: Mapping[str, np.ndarray], kernels: str, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(folder / "optimised.onnx")
        session = ob.session(model, kernels=kernels, session_options=options)
        names = [value.name for value in session.get_outputs()]
        self.outputs = dict(zip(names, map(np.asarray, session.run(names, dict(feeds))), strict=True))
        self.model = onnx.load(folder / "optimised.onnx")
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        ran = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
        by_name = {node.name: node for node in self.model.graph.node if node.name}
        self.nodes: list[NodeProto] = []
        self.sizes: dict[str, int] = {}
        for event in ran:
            node = by_name.get(event["name"].removesuffix("_kernel_time"))
            if node is None:  # of a function's body, without a name: small
                continue
            self.nodes.append(node)
            for name, shape in zip(filter(None, node.output), event["args"]["output_type_shape"], strict=False):
                ((element, lengths),) = shape.items()
                self.sizes[name] = _BYTES[element] * prod(lengths)

    def peak(self, without: set[str]) -> int:
        """The most bytes at once, but for some values."""
        base: dict[str, str] = {}
        born: dict[str, int] = {}
        last: dict[str, int] = {}
        for n, node in enumerate(self.nodes):
            for name in node.input:
                if base.get(name, name) in born:
                    last[base.get(name, name)] = n
            for name in filter(None, node.output):
                if node.op_type in VIEWS:
                    base[name] = base.get(node.input[0], node.input[0])
                elif name not in without:
                    born[name] = last[name] = n
        delta = np.zeros(len(self.nodes) + 1, np.int64)
        for name, n in born.items():
            delta[n] += self.sizes.get(name, 0)
            delta[last[name] + 1] -= self.sizes.get(name, 0)
        return int(np.cumsum(delta).max())
