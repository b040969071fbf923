"""What a file declares of its inner tensors and outputs, corrupted: the same gradients as of the clean file, or a refusal.

Each model is a random chain of operators whose gradients need lengths and ranks; its value_info, the shapes of its
outputs and the shapes in its If branches are then changed, made symbols, given another rank or dropped, at random.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorShapeProto, ValueInfoProto, helper, numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.graphs.walk import reads

MODELS, CORRUPTIONS = 50, 40
SAMPLED = 8  # every so many corruptions are converted even where one like it has been
WEIGHTS = {"w": (4, 4, 3, 3), "gain": (4,), "bias": (4, 1, 1)}
QUIET = onnxruntime.SessionOptions()
QUIET.log_severity_level = 4
RUN_ERRORS = (InvalidArgument, Fail, RuntimeException)
BATCH, CHANNELS, LENGTH = 2, 4, 8

# {x} and {y} are a tensor of four axes and {s} free names; {n} numbers of their own
STEPS = (
    "{y} = Relu({x})",
    "{y} = Tanh({x})",
    "{y} = Add({x}, bias)",
    "{y} = Mul({x}, {x})",
    "{y} = Conv<pads=[1,1,1,1]>({x}, w)",
    "{y} = ConvTranspose<pads=[1,1,1,1]>({x}, w)",
    '{y} = ConvTranspose<auto_pad="SAME_UPPER", output_padding=[1,1], strides=[2,2]>({x}, w)',
    "{y} = MaxPool<kernel_shape=[2,2]>({x})",
    "{y} = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>({x})",
    "{s} = GlobalAveragePool({x}) {y} = Mul({x}, {s})",
    "{s} = GlobalMaxPool({x}) {y} = Sub({x}, {s})",
    '{y} = Resize<mode="linear">({x}, "", scales)',
    '{y} = Resize<mode="nearest">({x}, "", scales)',
    "{s} = ReduceMean<keepdims=0>({x}, spatial) {y}_4 = Unsqueeze({s}, spatial) {y} = Add({x}, {y}_4)",
    "{s} = ReduceMax<keepdims=1>({x}, spatial) {y} = Sub({x}, {s})",
    "{y} = InstanceNormalization({x}, gain, gain)",
    "{y} = Softmax<axis=1>({x})",
    "{y} = Transpose<perm=[0,1,3,2]>({x})",
    "{s} = Flatten({x}) {s}_shape = Shape({x}) {y} = Reshape({s}, {s}_shape)",
    "{y}, {s} = Split<axis=3, num_outputs=2>({x})",
    "{y} = Concat<axis=2>({x}, {x})",
    "{s}_shape = Shape({x}) {s} = Abs({s}_shape) {y} = Expand({x}, {s})",
    "{s}_shape = Shape({x}) {s} = Abs({s}_shape) {s}_2 = Cast<to=1>({s}) {s}_3 = Cast<to=7>({s}_2)"
    " {s}_4 = Compress(  {s}_3, all) {y} = Reshape({x}, {s}_4)",
    "{s}_if = Not(no) {y} = If ({s}_if) <then_branch = b () => (float[N,4,H,W] {s}_t) {{ {s}_i = Relu({x}) {s}_t = Add({s}_i, bias) }},"
    " else_branch = c () => (float[N,4,H,W] {s}_e) {{ {s}_e = Tanh({x}) }}>",
)
ENDS = (
    "z = Identity({x})",
    "{s} = GlobalAveragePool({x}) z = ReduceMean<keepdims=0>({s})",
    "{s} = Flatten({x}) z = ReduceSum<keepdims=0>({s}, first)",
    "{s} = Flatten({x}) z = LogSoftmax({s})",
    "z = ReduceMean<keepdims=0>({x}, spatial)",
)
HEADER = (
    '<ir_version: 9, opset_import: ["": 18]> g (float[N,4,H,W] x) => (float z)'
    " <float[4] scales={{1.0,1.0,2.0,0.5}}, int64[2] spatial={{2,3}}, int64[1] first={{0}}, bool no={{0}}, bool[4] all={{1,1,1,1}}> {{ {body} }}"
)


@pytest.mark.parametrize("seed", range(MODELS))
def test_gradients_stay_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clean = random_model(rng)
    x = rng.uniform(-1, 1, (BATCH, CHANNELS, LENGTH, LENGTH)).astype(np.float32)
    wrt = ["x", *(name for name in WEIGHTS if any(name in reads(node) for node in clean.graph.node))]
    z = np.asarray(onnxruntime.InferenceSession(clean.SerializeToString(), QUIET).run(None, {"x": x})[0])
    dz = rng.uniform(-1, 1, z.shape).astype(np.float32) if z.ndim else np.float32(1)
    want = run(ob.backward(clean, wrt=wrt), x, dz, wrt)
    assert all(np.isfinite(value).all() for value in want), "a model that shows nothing"
    answered: dict[bytes, bool] = {}  # converted models and whether they gave an answer
    became: dict[bytes, ModelProto | None] = {}  # of prepared models, see `outcome`
    for n in range(CORRUPTIONS):
        corrupted = corrupt(clean, rng)
        converted = outcome(corrupted, wrt, became, again=n % SAMPLED == 0)
        if converted is None:
            continue
        key = converted.SerializeToString(deterministic=True)
        if key in answered:
            continue
        try:
            got = run(converted, x, dz, wrt)
        except RUN_ERRORS:
            answered[key] = False
            continue
        answered[key] = True
        for name, ours, expected in zip(wrt, got, want, strict=True):
            message = f"seed {seed}, corruption {n}, d{name}\n{onnx.printer.to_text(corrupted)}"
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6, err_msg=message)
    assert any(answered.values()), "every corruption was refused"


def outcome(
    model: ModelProto, wrt: list[str], became: dict[bytes, ModelProto | None], *, again: bool
) -> ModelProto | None:
    """What `backward` makes of a model, None where it refuses it.

    A conversion reads nothing but what `prepare` makes of the file, mostly the same for what declares something else.
    So those that are alike are converted once, and some of them `again`, to see that this is so.
    """
    try:
        prepared = prepare(model).SerializeToString(deterministic=True)
    except ob.OnnxBackpropError:
        with pytest.raises(ob.OnnxBackpropError):
            ob.backward(model, wrt=wrt)
        return None
    if again or prepared not in became:
        try:
            converted = ob.backward(model, wrt=wrt)
        except ob.OnnxBackpropError:
            converted = None
        alike = became.setdefault(prepared, converted) == converted
        assert alike, "backward reads more than what is prepared"
    return became[prepared]


def random_model(rng: np.random.Generator) -> ModelProto:
    """A chain of three to six steps and an end, everything inside declared as it is."""
    body, x = [], "x"
    for n in range(int(rng.integers(3, 7))):
        body.append(STEPS[rng.integers(len(STEPS))].format(x=x, y=f"y{n}", s=f"s{n}"))
        x = f"y{n}"
    body.append(ENDS[rng.integers(len(ENDS))].format(x=x, s="s_end"))
    model = parser.parse_model(HEADER.format(body=" ".join(body)))
    for name, shape in WEIGHTS.items():
        tensor = numpy_helper.from_array(rng.uniform(0.1, 0.5, shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    return declared(model)


def declared(model: ModelProto) -> ModelProto:
    """The model with the types and ranks that its values have in a run; lengths are symbols of their own."""
    everything = ModelProto()
    everything.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output]
    everything.graph.output.extend(ValueInfoProto(name=name) for name in names if name != "z")
    session = onnxruntime.InferenceSession(everything.SerializeToString(), QUIET)
    x = np.zeros((BATCH, CHANNELS, LENGTH, LENGTH), np.float32)
    for name, value in zip(names, session.run(names, {"x": x}), strict=True):
        symbols = [f"{name}_{axis}" for axis in range(np.ndim(value))]
        type_ = helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
        info = helper.make_tensor_value_info(name, type_, symbols)
        (model.graph.output[0] if name == "z" else model.graph.value_info.add()).CopyFrom(info)
    return model


def corrupt(clean: ModelProto, rng: np.random.Generator) -> ModelProto:
    """A copy in which a third of what is declared inside, at the output and in branches says something else."""
    model = ModelProto()
    model.CopyFrom(clean)
    values = [*model.graph.value_info, *model.graph.output]
    for graph in [a.g for node in model.graph.node for a in node.attribute if a.HasField("g")]:
        values += graph.output
    for value in values:
        if rng.random() < 1 / 3:
            CHANGES[rng.integers(len(CHANGES))](value.type.tensor_type.shape, rng)
    if rng.random() < 1 / 4:
        model.graph.value_info.pop(rng.integers(len(model.graph.value_info)))
    return model


def _lengths(shape: TensorShapeProto, rng: np.random.Generator) -> None:
    for dim in shape.dim:
        if rng.random() < 2 / 3:
            dim.dim_value = int(rng.integers(1, 9))


def _symbols(shape: TensorShapeProto, rng: np.random.Generator) -> None:
    for dim in shape.dim:
        dim.dim_param = str(rng.choice(["N", "H", "W", "other"]))


def _more_axes(shape: TensorShapeProto, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(1, 3))):
        shape.dim.add().dim_value = int(rng.integers(1, 3))


def _fewer_axes(shape: TensorShapeProto, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(len(shape.dim) + 1))):
        shape.dim.pop()


CHANGES: tuple[Callable[[TensorShapeProto, np.random.Generator], None], ...] = (
    _lengths,
    _lengths,
    _symbols,
    _more_axes,
    _fewer_axes,
)


def run(converted: ModelProto, x: np.ndarray, dz: np.ndarray, wrt: list[str]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(converted.SerializeToString(), QUIET)
    feeds = {"x": x, "z_grad": dz}
    given = {
        value.name: feeds[value.name] for value in session.get_inputs()
    }  # no seed where z is known to be one number
    return [np.asarray(v) for v in session.run([f"{name}_grad" for name in wrt], given)]
