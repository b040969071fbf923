"""Every operator of our own domain, differentiated twice, against differences of its float64 reference, on every route.

L(x) = <u, f(x)> for random u; the model is the operator, then `backward` of it, then `backward` of that:
<gradient, v> = dL(x + s·v)/ds, and <gradient of <gradient, w>, v> = d²L(x + s·v + t·w)/dsdt.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from onnx import ModelProto, helper

import onnx_backprop as ob
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.calls import Call
from tests.declarations.registry import DECLARED, random_call
from tests.support.adjoint import run
from tests.support.checks import one_node_model

EACH, MOST = 3, 4000  # calls of an operator, elements of one
STEP = 1e-3


def calls(op: str) -> list[Call]:
    collected: list[Call] = []
    rng = np.random.default_rng(zlib.crc32(op.encode()))
    while len(collected) < EACH:
        call = random_call(rng, op)
        if sum(array.size for array in call.inputs if array is not None) <= MOST and suits(call):
            collected.append(call)
    return collected


def suits(call: Call) -> bool:
    """Whether it has numbers, and differences tell its derivatives."""
    return DECLARED[call.op].smooth(call) and all(a is None or a.size for a in call.inputs) and bool(variables(call))


def variables(call: Call) -> list[str]:
    """The names of the inputs that are differentiated by."""
    given = zip(BY_NAME[call.op].inputs, call.inputs, strict=False)
    return [i.name for i, array in given if array is not None and i.floats and not i.shape_only and array.size]


def reference(call: Call, moved: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The operator in float64, unrounded."""
    op = BY_NAME[call.op]
    args = [*call.inputs, *[None] * (len(op.inputs) - len(call.inputs))]
    read = [op._read(spec, given) for spec, given in zip(op.inputs, args, strict=True)]
    values = [moved.get(spec.name, value) for spec, (value, _) in zip(op.inputs, read, strict=True)]
    return list(op._compute(Attributes(op, call.attributes), [arg for _, arg in read], values))


def model_of(call: Call, *, known: bool) -> ModelProto:
    shapes = []
    for spec, array in zip(BY_NAME[call.op].inputs, call.inputs, strict=False):
        lengths = None if array is None else [f"{spec.name}{n}" for n in range(array.ndim)]
        whole = array is not None and not spec.tensor
        shapes.append(array if whole else array.shape if known and array is not None else lengths)
    ranks = [result.ndim for result in reference(call, {})]
    return one_node_model(call.op, call.attributes, shapes, output_ranks=ranks)


@pytest.mark.filterwarnings("ignore:.*the derivative (by|of) .* is zero:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("op", sorted(BY_NAME))
def test_twice_on_every_route(op: str) -> None:
    for number, call in enumerate(calls(op)):
        check(call, known=number % 2 == 0)


def check(call: Call, *, known: bool) -> None:
    wrt = variables(call)
    model = model_of(call, known=known)
    y = [value.name for value in model.graph.output]
    first = ob.backward(model, wrt=wrt, of=y)
    derivative = ob.derivatives(first)[-1]
    gradients = list(derivative.results.values())
    if not all(name in derivative.seeds for name in y):
        return  # a single number is seeded with 1
    curved = [name for name in wrt if name not in DECLARED[call.op].linear]
    by = [*curved, *derivative.seeds.values()]
    second = ob.backward(first, wrt=by, of=gradients)
    again = ob.derivatives(second)[-1]
    rng = np.random.default_rng(call.seed)
    names = [spec.name for spec in BY_NAME[call.op].inputs]
    at = {n: np.asarray(call.inputs[names.index(n)], np.float64) for n in wrt}
    u = {derivative.seeds[n]: rng.standard_normal(r.shape) for n, r in zip(y, reference(call, at), strict=True)}
    jumps = DECLARED[call.op].jumps
    v, w = ({n: np.zeros(x.shape) if n in jumps else rng.standard_normal(x.shape) for n, x in at.items()} for _ in "vw")
    w |= {n: np.ones(at[n].shape) for n, g in derivative.results.items() if g not in again.seeds}  # of one element
    feeds = {n: a for n, a in zip(names, call.inputs, strict=False) if a is not None and n not in wrt}
    feeds |= {n: a.astype(np.float32) for n, a in (at | u).items()}
    feeds |= {again.seeds[g]: w[n].astype(np.float32) for n, g in derivative.results.items() if g in again.seeds}

    def value(s: float, t: float) -> float:
        results = reference(call, {n: at[n] + s * v[n] + t * w[n] for n in wrt})
        return float(sum((seed * r).sum() for seed, r in zip(u.values(), results, strict=True)))

    h = STEP
    want = (value(h, 0) - value(-h, 0)) / (2 * h)
    mixed = (value(h, h) - value(h, -h) - value(-h, h) + value(-h, -h)) / (4 * h * h)
    for kernels in ("onnx", "numpy", "native"):
        session = ob.session(second, kernels=kernels)
        accepted = {i.name for i in session.get_inputs()}
        answers = run(session, {n: a for n, a in feeds.items() if n in accepted})
        got = dict(zip([o.name for o in session.get_outputs()], answers, strict=True))
        pairs = [(want, derivative.results, v), (mixed, {n: again.results[n] for n in curved}, v)]
        # by the seed, the gradient of <w, gradient> is the derivative of the outputs along w
        for expected, outputs, along in pairs:
            terms = [got[g].astype(np.float64) * along[n] for n, g in outputs.items()]
            have, size = sum(float(t.sum()) for t in terms), sum(float(np.abs(t).sum()) for t in terms)
            assert abs(have - expected) <= 1e-5 + 2e-5 * max(size, abs(expected)), (call, kernels, have, expected)
        moved = [reference(call, {n: at[n] + s * h * w[n] for n in wrt}) for s in (1, -1)]
        for n, above, below in zip(y, *moved, strict=True):
            tangent = got[again.results[derivative.seeds[n]]]
            np.testing.assert_allclose(
                tangent,
                (above - below) / (2 * h),
                rtol=0,
                atol=2e-5 * max(1, np.abs(tangent).max(initial=0)),
                err_msg=str(call),
            )


def test_native_operators_stay_native() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["r"])]
    nodes.append(helper.make_node("Softmax", ["r"], ["y"], axis=1))
    values = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, 3, 7, 7]), ("w", [4, 3, 3, 3]))]
    output = helper.make_tensor_value_info("y", 1, [2, 4, 5, 5])
    model = helper.make_model(
        helper.make_graph(nodes, "g", values, [output]), opset_imports=[helper.make_opsetid("", 21)]
    )
    model.ir_version = 10
    twice = ob.backward(ob.backward(model, wrt=["x", "w"]), wrt=["x", "w"], of=["x_grad", "w_grad"])
    ours = {node.op_type for node in twice.graph.node if node.domain == ob.DOMAIN}
    convolutions = {"Convolution", "ConvolutionBackwardData", "ConvolutionBackwardWeights"}
    assert ours == convolutions | {"ReLUBackward", "SoftMaxBackward"}
    assert not {"Conv", "ConvTranspose"} & {node.op_type for node in twice.graph.node[3:]}
