"""A training that needs no Python: the graph of a step with native kernels, and the library that has these."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, load_from_string

from onnx_backprop.converters.prepare.writing.inline import inlined
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.slots import MEAN
from onnx_backprop.converters.training.split import step_alone
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.opset.graphs.edit import assign, without_tensors
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.order import for_default_sessions
from onnx_backprop.ort_ops import default_options, kernels_on, lower, session
from onnx_backprop.web.bundle import bundle, light, raw_data

Lengths = Mapping[str, int]
# of the metadata of training.onnx
IN_PLACE, GUARD, LENGTHS, RATE, FEEDS = "in_place", "guard", "lengths", "learning_rate", "feeds"


def compile_plugin(
    graph: TrainingGraph | ModelProto | ir.Model | str | Path,
    folder: str | Path,
    *,
    lengths: Lengths | Sequence[Lengths] = (),
    target: str | Sequence[str] | None = None,
) -> list[Path]:
    """Write a training that onnxruntime from 1.18 on runs at the speed of `Trainer`, in any language; its libraries.

    Into the folder go TARGET/onnx_backprop.so (.dll, .dylib), a library of custom operators; training.onnx, whose nodes
    it runs; standard.onnx, the same step in standard operators, for any lengths; initial.onnx, a graph without inputs
    whose outputs are the state to start with, its weights being those in forward.onnx, the model in inference mode;
    evaluation.onnx, loss and outputs for a state; and training.json, which describes them (docs/plugin.md).

    graph: a training graph with an optimizer, or what `TrainingGraph.save` has written. lengths: of all symbols in the
    shapes of its inputs, {"batch": 8}; several such for a library that serves each of them. A run on others fails with
    a status that names these; what outputs, and targets with them, come to need not be named.
    target: "linux-x86_64-v3" or another of `ort_ops.plugin.targets`, one or several; default: this one.

    Errors: InvalidArgumentError for a graph without an optimizer, lengths that are missing, or unknown names;
    KernelError where the native kernels do not work here, or nothing links for a target.
    """
    from onnx_backprop.ort_ops.plugin import targets  # llvmlite
    from onnx_backprop.ort_ops.plugin.requests import requests

    graph = graph if isinstance(graph, TrainingGraph) else TrainingGraph.load(graph)
    if not graph.updates:
        raise InvalidArgumentError("the graph has no optimizer. Make it with training_graph(…, optimizer=…)")
    names = [target] if isinstance(target, str) else list(target or [targets.here()])
    suffixes = {name: targets.checked(name).suffix for name in names}
    all_lengths = [lengths] if isinstance(lengths, Mapping) else list(lengths or [{}])
    feeds = [_feeds(graph, one) for one in all_lengths]
    options = default_options(python_operators=False, lean=True)
    if kernels_on(options, "native") != "native":
        raise KernelError("the native kernels do not work here, and no library is made without them")
    model = without_tensors(graph.model, graph.updates)
    model = step_alone(graph, model) if graph.options.blocks else model
    native = lower(model, "native", [graph.loss], graph.updates, matrices=set(names) == {targets.AMX})
    step = inlined(native.model)

    def run() -> None:
        trial = session(step, kernels=None, session_options=options)
        for one in feeds:
            guard = {native.guard: np.ones((), np.float32)} if native.guard else {}
            trial.run([graph.loss], {**one, **graph.initial_state(), **guard})

    domain, specs = requests(step, run)
    served = (
        "; ".join(",".join(f"{name}={length}" for name, length in one.items()) for one in all_lengths) or "of the graph"
    )
    about = {IN_PLACE: "\n".join(sorted(native.in_place)), GUARD: native.guard, LENGTHS: served}
    fed = [
        f"{name}\t{helper.np_dtype_to_tensor_dtype(feeds[0][name].dtype)}\t{','.join(map(str, feeds[0][name].shape))}"
        for name in graph.inputs
    ]
    about |= {RATE: str(graph.learning_rate), FEEDS: "\n".join(fed)}
    files = bundle(graph, step=step)
    plain = about | {IN_PLACE: "", GUARD: "", LENGTHS: "any"}
    files["training.onnx"] = _step(graph, step, about)
    files["standard.onnx"] = _step(graph, graph.model, plain)
    described = json.loads(files["training.json"]) | {GUARD: native.guard, IN_PLACE: sorted(native.in_place)}
    described[FEEDS] = {name: list(feeds[0][name].shape) for name in graph.inputs}
    files["training.json"] = json.dumps(described, ensure_ascii=False).encode()
    files["evaluation.onnx"] = inlined(load_from_string(files["evaluation.onnx"])).SerializeToString()
    files["initial.onnx"] = _initial(graph, dict(raw_data(files["forward.onnx"]))).SerializeToString()
    asked = {"domain": domain, "specs": specs, "lengths": served}
    libraries = {f"{name}/onnx_backprop.{suffixes[name]}": targets.make(asked, name) for name in names}
    for name in names:
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
    paths = {Path(folder) / name: content for name, content in (files | libraries).items()}
    with replacing(*paths) as opened:
        for file, content in zip(opened, paths.values(), strict=True):
            file.write(content)
    return [Path(folder) / name for name in libraries]


def _feeds(graph: TrainingGraph, given: Lengths) -> dict[str, np.ndarray]:
    """Zeros for all that a step is fed but its state."""
    declared = {value.name: value for value in graph.model.graph.input}
    wanted = [declared[name] for name in (*graph.inputs, graph.learning_rate) if name is not None]
    symbols = {symbol: value.name for value in wanted for symbol in _dims(value) if isinstance(symbol, str)}
    if unknown := [name for name in given if name not in symbols]:
        listed = ", ".join(symbols) or "all are stated"
        raise InvalidArgumentError(f"no input has a length {unknown[0]!r}. There are: {listed}", "lengths")
    for name, length in given.items():
        if not isinstance(length, int) or length < 1:
            raise InvalidArgumentError(f"{name!r}: expected a whole number of 1 or more, got {length!r}", "lengths")
    lengths = {**given, **(_of_outputs(graph, given) if symbols.keys() - given.keys() else {})}
    if missing := {name: value for name, value in symbols.items() if name not in lengths}:
        listed = ", ".join(f"{name!r} (of {value!r})" for name, value in missing.items())
        raise InvalidArgumentError(f"expected the length of {listed} too. Add it", "lengths")
    return {value.name: _zeros(value, lengths) for value in wanted}


def _of_outputs(graph: TrainingGraph, lengths: Lengths) -> Lengths:
    """What the lengths that the model's outputs have, and targets with them, come to; none where inputs lack some."""
    model = graph.inference_model()
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if any(isinstance(d, str) and d not in lengths for value in inputs for d in _dims(value)):
        return {}
    results = session(model, kernels="onnx").run(list(graph.outputs), {v.name: _zeros(v, lengths) for v in inputs})
    declared = {value.name: value for value in graph.model.graph.output}
    pairs = [
        pair
        for name, result in zip(graph.outputs, results, strict=True)
        if name in declared and declared[name].type.tensor_type.HasField("shape")
        for pair in zip(_dims(declared[name]), np.asarray(result).shape, strict=True)
    ]
    return {d: length for d, length in pairs if isinstance(d, str) and d not in lengths}


def _zeros(value: ValueInfoProto, lengths: Lengths) -> np.ndarray:
    shape = [lengths[d] if isinstance(d, str) else d for d in _dims(value)]
    return np.zeros(shape, helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def _dims(value: ValueInfoProto) -> Iterator[str | int]:
    """The dimensions of an input: lengths, or the names of those that are not stated."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        raise InvalidArgumentError(
            f"the graph does not state the rank of its input {value.name!r}. State it in the model"
        )
    for n, d in enumerate(kind.shape.dim):
        yield d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}.{n}"


def _step(graph: TrainingGraph, model: ModelProto, about: Mapping[str, str]) -> bytes:
    """A step without functions, its outputs being the loss, the new state, the rest; with metadata."""
    step = inlined(light(model, graph))
    outputs = {value.name: value for value in step.graph.output}
    first = [graph.loss, *graph.updates.values()]
    assign(step.graph.output, [outputs[name] for name in dict.fromkeys([*first, *outputs])])
    assign(step.graph.node, for_default_sessions(step.graph.node))  # the C table cannot ask for the file's order
    for name, text in about.items():
        step.metadata_props.add(key=name, value=text)
    return step.SerializeToString()


def _initial(graph: TrainingGraph, places: Mapping[str, int]) -> ModelProto:
    """No inputs; outputs: the state to start with, by the names of the inputs that take it.

    Metadata: where in forward.onnx the bytes of each weight begin.
    """
    declared = {value.name: value for value in graph.model.graph.input}
    model = ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 13)])
    model.graph.name = "initial"
    for slot in graph.state:
        kind = declared[slot.name].type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        model.graph.output.append(declared[slot.name])
        if slot.start is not None:
            dims = helper.make_tensor(f"{slot.name}/shape", TensorProto.INT64, [len(shape)], shape)
            value = helper.make_tensor("value", kind.elem_type, [1], [slot.start])
            model.graph.initializer.append(dims)
            model.graph.node.append(helper.make_node("ConstantOfShape", [dims.name], [slot.name], value=value))
        elif slot.role == MEAN:
            model.graph.node.append(helper.make_node("Identity", [slot.of], [slot.name]))
        else:
            tensor = TensorProto(name=slot.name, dims=shape, data_type=kind.elem_type)
            tensor.data_location = TensorProto.EXTERNAL
            size = int(np.prod(shape, dtype=np.int64)) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
            for key, entry in {"location": "forward.onnx", "offset": places[slot.name], "length": size}.items():
                tensor.external_data.add(key=key, value=str(entry))
            model.graph.initializer.append(tensor)
            model.metadata_props.add(key=slot.name, value=str(places[slot.name]))
    return model
