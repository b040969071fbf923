"""Who is timed: each contender makes of a case a function that computes one gradient once.

Every one runs in a process of its own (`worker.py`) and imports its library there. None stands for a case that it
cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from benchmarks.cases import Case, Convolution, Interpolation, Layer

Run = Callable[[], object]
_LINE = 64  # bytes of a cache line


def ours(kernels: str) -> Callable[[Case, str, int], Run | None]:
    """A session on one node of our domain."""

    def prepare(case: Case, gradient: str, threads: int) -> Run | None:
        if isinstance(case, Layer):
            return None if kernels == "numpy" else _layer(case, gradient, kernels, threads)
        node, feeds = _convolution_node(case, gradient) if isinstance(case, Convolution) else _interpolation_node(case)
        return one_node(node, feeds, kernels, threads)

    return prepare


def one_node(node: NodeProto, feeds: dict[str, np.ndarray], kernels: str, threads: int) -> Run:
    """A session on a node whose output is called "result", inputs and output bound."""
    import onnx_backprop as ob

    return _bound(ob.session(_model([node], feeds), kernels=kernels, session_options=_options(threads)), feeds)


def _convolution_node(case: Convolution, gradient: str) -> tuple[NodeProto, dict[str, np.ndarray]]:
    arrays, axes = case.arrays(), len(case.lengths)
    dst_shape = case.x_shape
    if case.channels_last:
        arrays |= {name: _to_last(arrays[name]) for name in ("x", "dy")}
        dst_shape = arrays["x"].shape
    attributes: dict[str, object] = {
        "strides": [case.stride] * axes,
        "dilations": [case.dilation] * axes,
        "pads_begin": [case.pad] * axes,
        "pads_end": [case.pad] * axes,
        "groups": case.groups,
        "data_format": "NXC" if case.channels_last else "NCX",
        "weights_format": "IOX" if case.transposed else "OIX",
    }
    family = "ConvTranspose" if case.transposed else "Convolution"
    if gradient == "weights":
        attributes["weights_shape"] = case.w_shape
        return _node(f"{family}BackwardWeights", ["x", "dy"], attributes), {"x": arrays["x"], "dy": arrays["dy"]}
    if not case.transposed:
        attributes["dst_shape"] = dst_shape
    return _node(f"{family}BackwardData", ["dy", "w"], attributes), {"dy": arrays["dy"], "w": arrays["w"]}


def _interpolation_node(case: Interpolation) -> tuple[NodeProto, dict[str, np.ndarray]]:
    arrays = {name: _to_last(a) if case.channels_last else a for name, a in case.arrays().items()}
    if case.mode == "cubic":
        axes = [1, 2] if case.channels_last else [2, 3]
        arrays["sizes"] = np.array(case.outs, np.int64)
        attributes: dict[str, object] = {"mode": "cubic", "axes": axes}
        return _node("ResizeGrad", ["dy", "x", "", "", "sizes"], attributes), arrays
    attributes = {"mode": case.mode, "sizes": case.outs, "data_format": "NXC" if case.channels_last else "NCX"}
    return _node("InterpolateBackward", ["x", "dy"], attributes), arrays


def _layer(case: Layer, gradient: str, kernels: str, threads: int) -> Run:
    """The forward operator as a model, alone or with what the converter adds to it."""
    import onnx_backprop as ob

    arrays = case.arrays()
    feeds = {name: array for name, array in arrays.items() if name != "dy"}
    outputs = ["y", "mean", "variance"] if case.op_type == "BatchNormalization" else ["y"]
    node = helper.make_node(case.op_type, list(feeds), outputs, **dict(case.attributes))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in feeds.items()]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, case.y_shape)]
    graph = helper.make_graph([node], "layer", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if gradient == "both":
        learnt = ["x", *[f"p{n}" for n in range(min(case.parameters, 2))]]
        model = ob.backward(model, wrt=learnt, of=["y"])
        feeds["y_grad"] = arrays["dy"]
    return _bound(ob.session(model, kernels=kernels, session_options=_options(threads)), feeds)


def _to_last(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(a, 1, -1))


def _node(op_type: str, inputs: Sequence[str], attributes: dict[str, Any]) -> NodeProto:
    import onnx_backprop as ob

    return helper.make_node(op_type, inputs, ["result"], domain=ob.DOMAIN, **attributes)


def _model(nodes: Sequence[NodeProto], feeds: dict[str, np.ndarray], output: str = "result") -> ModelProto:
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "benchmark", infos, [result])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("onnx_backprop", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def _bound(session: Any, feeds: dict[str, np.ndarray]) -> Run:
    """A run with everything bound, so that neither feeding nor fetching is timed."""
    import onnxruntime

    accepted = {i.name for i in session.get_inputs()}
    arrays = {name: _aligned(a) for name, a in feeds.items() if name in accepted}
    outputs = [o.name for o in session.get_outputs()]
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    for output, first in zip(outputs, session.run(outputs, arrays), strict=True):
        binding.bind_ortvalue_output(output, onnxruntime.OrtValue.ortvalue_from_numpy(_aligned(first)))
    return lambda: session.run_with_iobinding(binding)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins with a cache line, as what onnxruntime and PyTorch allocate; NumPy's large arrays do not.

    All contenders read such memory, and all of NumPy's, which asks the system for large pages.
    """
    memory = np.empty(array.nbytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def onnxsim(case: Case, gradient: str, threads: int) -> Run | None:
    """onnxsim's graph_grad in a stock session; it knows no Resize and no ConvTranspose."""
    if not isinstance(case, Convolution) or case.transposed:
        return None
    import onnxruntime

    graph_grad, qat_graph = import_module("onnxsim.graph_grad"), import_module("onnxsim.qat_graph")

    axes, arrays = len(case.lengths), case.arrays()
    forward = helper.make_node(
        "Conv",
        ["x", "w"],
        ["y"],
        strides=[case.stride] * axes,
        dilations=[case.dilation] * axes,
        pads=[case.pad] * 2 * axes,
        group=case.groups,
        kernel_shape=[case.kernel] * axes,
    )
    target = "x" if gradient == "data" else "w"
    builder = qat_graph.GraphBuilder()
    shapes = {"x": case.x_shape, "w": case.w_shape, "y": case.y_shape, "dy": case.y_shape}
    try:
        gradients = graph_grad.build_backward(builder, [forward], shapes, {"y": "dy"}, [target])
    except graph_grad.UnsupportedOpError:
        return None
    model = _model(builder.nodes, arrays, gradients[target])
    model.graph.initializer.extend(builder.initializer)
    model.opset_import[0].version = 17
    used = {name for node in model.graph.node for name in node.input}
    kept = [i for i in model.graph.input if i.name in used]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), _options(threads), providers=["CPUExecutionProvider"]
    )
    return _bound(session, arrays)


def torch(*, channels_last: bool) -> Callable[[Case, str, int], Run | None]:
    """PyTorch's own backward operators on the CPU."""

    def prepare(case: Case, gradient: str, threads: int) -> Run | None:
        library = import_module("torch")
        library.set_num_threads(threads)
        rank = len(case.x_shape)
        if channels_last and rank == 3:
            return None
        tensors = {
            name: _in_layout(library, array, channels_last=channels_last and array.ndim == rank)
            for name, array in case.arrays().items()
        }
        if isinstance(case, Layer):
            return _torch_layer(library, case, gradient, tensors)
        if isinstance(case, Convolution):
            return _torch_convolution(library, case, gradient, tensors)
        return _torch_interpolation(library, case, tensors)

    return prepare


def _in_layout(library: Any, array: np.ndarray, *, channels_last: bool) -> Any:
    """A tensor of the array's shape; channels_last: with the strides of that layout."""
    if not channels_last:
        return library.from_numpy(_aligned(array))
    return library.from_numpy(_aligned(_to_last(array))).movedim(-1, 1)


def _torch_convolution(library: Any, case: Convolution, gradient: str, tensors: dict[str, Any]) -> Run:
    axes = len(case.lengths)
    mask = [gradient == "data", gradient == "weights", False]
    backward = library.ops.aten.convolution_backward
    rest = ([case.stride] * axes, [case.pad] * axes, [case.dilation] * axes, case.transposed, [0] * axes, case.groups)
    return lambda: backward(tensors["dy"], tensors["x"], tensors["w"], None, *rest, mask)


def _torch_interpolation(library: Any, case: Interpolation, tensors: dict[str, Any]) -> Run:
    sizes = (list(case.outs), list(case.x_shape))
    if case.mode == "nearest":
        nearest = library.ops.aten._upsample_nearest_exact2d_backward
        return lambda: nearest(tensors["dy"], *sizes, None, None)
    smooth = {
        "linear": library.ops.aten.upsample_bilinear2d_backward,
        "cubic": library.ops.aten.upsample_bicubic2d_backward,
    }[case.mode]
    return lambda: smooth(tensors["dy"], *sizes, False, None, None)


def _torch_layer(library: Any, case: Layer, gradient: str, tensors: dict[str, Any]) -> Run:
    """The layer in eager mode, through autograd."""
    functional, given = library.nn.functional, dict(case.attributes)
    x, dy = tensors["x"], tensors["dy"]
    parameters = [tensors[f"p{n}"] for n in range(case.parameters)]
    window = [given.get(name, ()) for name in ("kernel_shape", "strides")]
    pad = given["pads"][:2] if "pads" in given else 0
    forward: Callable[[], Any] = {
        "MaxPool": lambda: functional.max_pool2d(x, *window, pad),
        "AveragePool": lambda: functional.avg_pool2d(x, *window, pad, count_include_pad=False),
        "Relu": lambda: functional.relu(x),
        "BatchNormalization": lambda: functional.batch_norm(
            x, parameters[2], parameters[3], parameters[0], parameters[1], training=True
        ),
        "Softmax": lambda: functional.softmax(x, -1),
        "LayerNormalization": lambda: functional.layer_norm(x, x.shape[-1:], *parameters),
    }[case.op_type]
    if gradient == "forward":

        def alone() -> object:
            with library.no_grad():
                return forward()

        return alone
    learnt = [x, *parameters[:2]]
    for tensor in learnt:
        tensor.requires_grad_()
    return lambda: library.autograd.grad(forward(), learnt, dy)


CONTENDERS: dict[str, Callable[[Case, str, int], Run | None]] = {
    "native": ours("native"),
    "onnx": ours("onnx"),
    "numpy": ours("numpy"),
    "PyTorch": torch(channels_last=False),
    "PyTorch channels_last": torch(channels_last=True),
    "onnxsim": onnxsim,
}
