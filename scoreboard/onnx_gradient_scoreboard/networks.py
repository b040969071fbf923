"""Small whole models: several layers, values read twice, control flow. `networks.txt` has the texts."""

from __future__ import annotations

import re
import zlib
from functools import cache
from importlib.resources import files

import numpy as np
import onnx
from onnx import TensorProto, helper, parser

from onnx_gradient_scoreboard.cases import OPSETS, Arrays, Case, at, session

TOLERANCE = 1e-3
SOURCE = "1e-3 of the largest entry, as ONNX's node tests"


def _texts() -> dict[str, str]:
    text = (files(__package__ or "") / "networks.txt").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    matches = re.findall(r"^(\w+):\n((?:    .*\n?)+)", lines, re.MULTILINE)
    return {name: " ".join(body.split()) for name, body in matches}


TEXTS = _texts()
FIXED: Arrays = {
    "lo": np.float32(0), "hi": np.float32(6), "third": np.float32(1 / 3), "two": np.float32(2), "yes": np.array(True),
    "one2": np.ones(2, np.float32), "zero2": np.zeros(2, np.float32), "scales": np.float32([1, 1, 2, 2]),
    "mask": np.array([[True, False, True], [False, False, True]]), "iheads": np.array([0, 0, 2, 4]),
    "iback": np.array([0, 0, 8]), "igroups": np.array([0, 2, -1]), "izero": np.array([0]),
    "imerge": np.array([0, 0, 6]),
    "itokens": np.array([[0, 3, 3], [6, 1, 0]]), "ilabels": np.array([0, 4, 2, 2]), "ithirds": np.array([3, 3, 3]),
    "ilast": np.array([2]), "itrips": np.array(3),
}  # fmt: skip


@cache
def networks() -> dict[str, Case]:
    """By name; each at the opsets at which onnxruntime computes the same."""
    return {f"network_{name}": _network(f"network_{name}", text) for name, text in TEXTS.items()}


def _network(name: str, text: str) -> Case:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    feeds: Arrays = {}
    for tensor, shape in re.findall(r"\b([ws]\d):([\dx]+)", text):
        shape = tuple(map(int, shape.split("x")))
        fan = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        drawn = rng.uniform(0.5, 1.5, shape) if tensor[0] == "s" else rng.normal(0, 1 / np.sqrt(fan), shape)
        feeds[tensor] = drawn.astype(np.float32)
    feeds |= {n: np.asarray(a) for n, a in FIXED.items() if re.search(rf"\b{n}\b", text)}
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> {name} ' + re.sub(r":[\dx]+(?=[,)])", "", text)
    )
    x = model.graph.input[0]
    lengths = [d.dim_value for d in x.type.tensor_type.shape.dim]
    data = {x.name: rng.normal(0, 1, lengths).astype(np.float32)}
    for n, a in feeds.items():
        model.graph.input.append(helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape))
    outputs = tuple(o.name for o in model.graph.output if o.type.tensor_type.elem_type == TensorProto.FLOAT)
    opsets, expected = [], None
    for opset in OPSETS:
        try:
            onnx.checker.check_model(at(model, opset), full_check=True)
            values = session(at(model, opset)).run(list(outputs), data | feeds)
        except Exception:  # noqa: BLE001 - an operator has another form at this opset
            continue
        expected = expected or values
        if all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(values, expected, strict=True)):
            opsets.append(opset)
    weights = tuple(n for n in feeds if n.startswith("w"))
    return Case(
        name,
        "whole models",
        at(model, opsets[-1]),
        data | feeds,
        (x.name,),
        weights,
        outputs,
        tuple(opsets),
        TOLERANCE,
        SOURCE,
    )
