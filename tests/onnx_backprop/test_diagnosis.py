"""Asking for help: models without their weights, the smallest part that fails, and the report."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.command.main import main
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.support.numeric import outputs

RNG = np.random.default_rng(3)
TEXT = """<ir_version: 10, opset_import: ["": 21, "secret.lab": 1]> plan (float[rows, 6] x, bool c) => (float[rows, 4] y) {
  a = MatMul(x, w)  b = Mul(a, gate)  s = secret.lab.squash(b)
  o = If (c) <then_branch = t () => (float[rows, 4] p) { p = MatMul(s, v) },
              else_branch = e () => (float[rows, 4] q) { q = Identity(s) }>
  g = Gather <axis = 1> (o, order)  z = Reshape(g, shape)  m = Add(z, mask)  n = Reshape(m, shape)  y = Where(n_ok, n, m)
}
<domain: "secret.lab", opset_import: ["": 21]> squash (u) => (r) { r = Tanh(u) }
"""


def model() -> ModelProto:
    rng = np.random.default_rng(3)
    result = parser.parse_model(TEXT)
    weight = rng.standard_normal((6, 4)).astype(np.float32)
    square = np.abs(rng.standard_normal((4, 4))).astype(np.float32)
    arrays = {
        "w": weight, "tied": weight.copy(), "turned": weight.T.copy(), "gate": np.float32([0.25, 0.5, 0.25, 0.25]), "v": square,
        "order": np.array([0, 1, 2, 3]), "shape": np.array([-1, 4]), "mask": np.float32([0, 0, -np.inf, 0]),
        "table": np.arange(40).reshape(20, 2), "bytes": rng.integers(-90, 90, 300).astype(np.int8), "n_ok": np.array([True]),
        "texts": np.array(["ann", "bob", "ann"], object),
    }  # fmt: skip
    result.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    result.graph.node[0].doc_string, result.graph.doc_string = "of the lab", "secret"
    result.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File secret.py, line 3")
    result.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'fc']")
    result.producer_name = "lab"
    return result


def tensors(proto: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def test_other_numbers_of_the_same_kind() -> None:
    before, came = model(), model().SerializeToString()
    after = ob.anonymize(before)
    onnx.checker.check_model(after)
    old, new = tensors(before), tensors(after)
    for name in ("gate", "order", "shape", "mask", "n_ok"):
        np.testing.assert_array_equal(old[name], new[name], err_msg=name)
    for name in ("w", "v"):
        assert (old[name] != new[name]).all()
        assert old[name].min() <= new[name].min() < new[name].max() <= old[name].max()
    np.testing.assert_array_equal(new["w"], new["tied"])
    np.testing.assert_array_equal(new["w"], new["turned"].T)
    assert (new["v"] >= 0).all()
    assert new["texts"].tolist() == [b"text0", b"text1", b"text0"] or new["texts"].tolist() == [
        "text0",
        "text1",
        "text0",
    ]
    np.testing.assert_array_equal(np.sort(new["bytes"]), np.sort(old["bytes"]))
    assert (new["bytes"] != old["bytes"]).mean() > 0.8
    np.testing.assert_array_equal(new["table"] // 2 * 2 + [0, 1], new["table"])  # rows stay whole
    assert (new["table"] != old["table"]).any()
    assert b"secret.py" not in after.SerializeToString()
    assert b"of the lab" not in after.SerializeToString()
    assert [p.key for p in after.graph.node[0].metadata_props] == ["pkg.torch.onnx.name_scopes"]
    assert ob.anonymize(model()).SerializeToString() == ob.anonymize(model()).SerializeToString()
    assert ob.anonymize(before, seed=1) != after
    assert before.SerializeToString() != after.SerializeToString()
    assert came != after.SerializeToString()
    assert set(ob.training_graph(after, loss="mse").parameters) == set(ob.training_graph(before, loss="mse").parameters)


def test_hidden_names_leave_the_graph_as_it_is() -> None:
    before = ob.anonymize(model())
    after = ob.anonymize(model(), hide_names=True)
    onnx.checker.check_model(after)
    text = str(after)
    assert not [
        word for word in ("secret", "lab", "squash", "gate", "tied", "rows", "fc", "plan") if f'"{word}' in text
    ]
    assert [n.op_type for n in after.graph.node if n.op_type != "Function0"] == [
        n.op_type for n in before.graph.node if n.op_type != "squash"
    ]
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    for chosen in (True, False):
        feeds = [
            dict(zip((v.name for v in m.graph.input), (x, np.array(chosen)), strict=True)) for m in (before, after)
        ]
        one, two = (next(iter(outputs(m, f).values())) for m, f in zip((before, after), feeds, strict=True))
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int4", "uint4", "float8_e4m3fn", "complex64"])
def test_every_type(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = RNG.integers(1, 7, (40,)).astype(np.float64).astype(kind)
    proto = helper.make_model(
        helper.make_graph([helper.make_node("Identity", ["t"], ["y"])], "g", [], [helper.make_tensor_value_info("y", 1, None)],
                          [onnx.numpy_helper.from_array(array, "t")])
    )  # fmt: skip
    new = tensors(ob.anonymize(proto))["t"]
    assert (new.dtype, new.shape) == (kind, (40,))
    assert (new != array).any()


@pytest.mark.parametrize("constant", [False, True])
def test_what_resizes_stays(constant: bool) -> None:
    """Three different numbers: with others the output would have another shape. A Constant's tensor has no name."""
    scales, bias = np.float32([1, 1, 2, 3]), RNG.standard_normal((1, 2, 8, 12)).astype(np.float32)
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 12] y)
        { z = Resize<mode = "linear">(x, , scales)  y = Add(z, bias) }"""
    )
    for name, array in (("scales", scales), ("bias", bias)):
        tensor = numpy_helper.from_array(array, "" if constant else name)
        if constant:
            proto.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        else:
            proto.graph.initializer.append(tensor)
    after = ob.anonymize(proto)
    x = {"x": RNG.standard_normal((1, 2, 4, 4)).astype(np.float32)}
    (old,), (new,) = (outputs(one, x).values() for one in (proto, after))
    assert old.shape == new.shape
    assert ((old - new) != 0).mean() > 0.9, "the bias is another"


def chain(names: bool) -> ModelProto:
    """Forty nodes; a Tanh that reads a Round, far apart, and an If."""
    lines = ["v0 = Add(x, w)"]
    for n in range(1, 36):
        op = {9: "Round", 17: "Tanh"}.get(n, "Neg")
        lines.append(f"v{n} = {op}(v{n - 1})")
    lines.append("c = Less(x, w) k = ReduceMin <keepdims = 0> (i) f = Cast <to = 9> (k)")
    lines.append(
        "o = If (f) <then_branch = t () => (float[2, 3] p) { p = Neg(v35) }, else_branch = e () => (float[2, 3] q) { q = Abs(v2) }>"
    )
    lines.append("y = Sub(o, v4)")
    result = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x, int64[2] i) => (float[2, 3] y, bool[2, 3] c) '
        "{" + "\n".join(lines) + "}"
    )
    result.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    for n, node in enumerate(result.graph.node):
        node.name = f"node/{n} of it" if names else ""
    return result


@pytest.mark.parametrize("names", [True, False])
def test_the_smallest_part_that_fails(names: bool) -> None:
    tried = []

    def fails(proto: ModelProto) -> bool:
        onnx.checker.check_model(proto, full_check=True)
        tried.append(proto)
        kinds = [node.op_type for node in all_nodes(proto)]
        return "Round" in kinds and "Tanh" in kinds and "Abs" in kinds

    left: list[int] = []
    small = ob.reduce(chain(names), fails, progress=left.append)
    assert sorted(node.op_type for node in small.graph.node) == ["If", "Round", "Tanh"]
    assert len(small.graph.output) == 1
    assert left == sorted(left, reverse=True)
    assert len(tried) < 120
    with pytest.raises(ob.InvalidArgumentError, match="the whole model does not fail"):
        ob.reduce(chain(names), lambda _: False)


def test_functions_and_fed_parameters_stay_where_the_failure_needs_them() -> None:
    proto = model()
    proto.graph.input.append(helper.make_tensor_value_info("w", 1, [6, 4]))
    small = ob.reduce(proto, lambda m: any(n.op_type == "squash" for n in m.graph.node))
    assert [n.op_type for n in small.graph.node] == ["squash"]
    assert [f.name for f in small.functions] == ["squash"]
    small = ob.reduce(proto, lambda m: "w" in tensors(m))
    assert (small.functions, len(small.graph.node)) == ([], 1)
    np.testing.assert_array_equal(tensors(small)["w"], tensors(proto)["w"])


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, small, shown = (str(tmp_path / f"{name}.onnx") for name in ("model", "small", "shown"))
    proto = chain(names=True)
    proto.graph.node[20].op_type, proto.graph.node[20].domain = "Wobble", "lab"
    proto.opset_import.add(domain="lab", version=1)
    onnx.save(proto, path)
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, onnx\n"
        "kinds = [n.op_type for n in onnx.load(sys.argv[1]).graph.node]\n"
        "if 'Wobble' in kinds: sys.exit(f'no rule of Wobble, at node {kinds.index(\"Wobble\")}')\n"
        "sys.exit('too few nodes')\n"
    )
    failing = f"{sys.executable} {script} {{}}"
    assert main(["reduce", path, "-o", small, "--failing", failing]) == 0
    assert [n.op_type for n in onnx.load(small).graph.node] == ["Wobble"]
    out = capsys.readouterr().out
    assert "1 nodes with which" in out
    assert re.search(r"\d+ parts failed otherwise and were not kept, \d+ of them: too few nodes", out)
    assert main(["reduce", path, "-o", small, "--failing", failing, "--words", "too few", "--force"]) == 2
    assert "does not fail" in capsys.readouterr().err
    assert main(["reduce", path, "-o", small, "--failing", "no-such-command", "--force"]) == 2
    assert "expected {} where" in capsys.readouterr().err
    assert main(["reduce", path, "-o", small, "--failing", "no-such-command {}", "--force"]) == 2
    assert "no-such-command does not run" in capsys.readouterr().err

    assert main(["anonymize", path, "-o", shown, "--hide-names"]) == 0
    assert "node/" not in str(onnx.load(shown))
    capsys.readouterr()
    assert main(["report", path]) == 0
    text = capsys.readouterr().out
    for words in ("## Versions", "onnxruntime 1", "## Machine", "1 lab::Wobble", "2 inner graphs", "input x: FLOAT, 2x3",
                  "12 bytes of FLOAT", "reshape"):  # fmt: skip
        assert words in text, words
    assert main(["report"]) == 0
    assert "## Model" not in capsys.readouterr().out


def test_types_behind_an_unknown_operator_are_assumed() -> None:
    """Or nothing behind it could be left out: its own output, and all that follow, would have no type."""
    lines = ["v0 = Neg(x)"]
    lines += [f"v{n} = {'lab.Wobble' if n in (7, 12) else 'Neg'}(v{n - 1})" for n in range(1, 20)]
    text = f'<ir_version: 10, opset_import: ["": 18, "lab": 1]> g (float[N, 3] x) => (float[N, 3] v19) {{ {" ".join(lines)} }}'
    small = ob.reduce(parser.parse_model(text), wobbles)
    assert [(node.op_type, node.name) for node in small.graph.node] == [("Wobble", "")]
    (value,) = small.graph.output
    assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] == ["N", 3]


def wobbles(part: ModelProto) -> bool:
    """What fails with a typed output alone."""
    typed = all(value.type.tensor_type.elem_type for value in part.graph.output)
    return typed and any(node.op_type == "Wobble" for node in part.graph.node)
