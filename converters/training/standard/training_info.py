"""A training graph as ONNX's own `TrainingInfoProto`, and the other way round.

    main graph                    the inference model with its weights
    training_info[0].algorithm    a step: inputs are data, targets and learning rate; what it carries over are
                                  initializers, those of the main graph and its own
    update_binding                initializer -> output of the algorithm that takes its place
    initialization                what the state starts from, bound by initialization_binding

Source: ONNX, onnx.proto, message TrainingInfoProto.
"""

import numpy as np
from onnx import GraphProto, ModelProto, TrainingInfoProto, helper, numpy_helper

from onnx_backprop.converters.training.result import METADATA, TrainingGraph
from onnx_backprop.converters.training.slots import MOMENT, PARAMETER, Slot
from onnx_backprop.converters.training.standard.gradient_operator import expand_gradients, has_training_nodes
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError
from onnx_backprop.opset.core.hints import suggest
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_nodes

_NUMBER = "onnx_backprop.number"  # metadata of an initializer that a step may be fed another value of
RATE_NAMES = ("learning_rate", "R", "lr")


def to_training_info(graph: TrainingGraph) -> ModelProto:
    """The inference model with the training step as its training_info; InvalidArgumentError without an optimizer."""
    if not graph.updates:
        raise InvalidArgumentError("the graph has no optimizer, there is no step to write. Make it with optimizer=…")
    model = graph.inference_model(outputs=graph.outputs)
    main = {tensor.name for tensor in model.graph.initializer}
    info = TrainingInfoProto()
    algorithm = info.algorithm
    algorithm.CopyFrom(graph.model.graph)
    algorithm.name = f"{graph.model.graph.name}_step"
    stored = {tensor.name for tensor in algorithm.initializer}
    assign(algorithm.initializer, [tensor for tensor in algorithm.initializer if tensor.name not in main])
    inputs = {value.name for value in algorithm.input} - graph.updates.keys()
    for tensor in algorithm.initializer:
        if tensor.name in inputs:
            tensor.metadata_props.add(key=_NUMBER)
    state = graph.initial_state()
    algorithm.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in state.items() if name not in stored
    )
    fed = {*graph.inputs, *graph.optional, graph.learning_rate}
    assign(algorithm.input, [value for value in algorithm.input if value.name in fed])
    for name, output in graph.updates.items():
        info.update_binding.add(key=name, value=output)
    _initialize(info, graph, state)
    model.training_info.append(info)
    for function in graph.model.functions:
        if all(
            (f.domain, f.name, f.overload) != (function.domain, function.name, function.overload)
            for f in model.functions
        ):
            model.functions.append(function)
    for opset in graph.model.opset_import:
        if all(o.domain != opset.domain for o in model.opset_import):
            model.opset_import.append(opset)
    model.ir_version = max(model.ir_version, graph.model.ir_version)
    metadata = next(entry for entry in graph.model.metadata_props if entry.key == METADATA)
    model.metadata_props.add(key=METADATA, value=metadata.value)
    return model


def _initialize(info: TrainingInfoProto, graph: TrainingGraph, state: dict[str, np.ndarray]) -> None:
    """A graph whose outputs are what the optimizer's state starts from; copies of weights are left to the loader."""
    start = info.initialization
    start.name = f"{graph.model.graph.name}_start"
    for name, fill in graph.fill.items():
        value = state[name]
        output = f"{name}_start"
        shape = helper.make_tensor(f"{name}_shape", 7, [value.ndim], value.shape)
        element = numpy_helper.from_array(np.array([fill], value.dtype))
        start.node.append(helper.make_node("Constant", [], [f"{name}_shape"], value=shape))
        start.node.append(helper.make_node("ConstantOfShape", [f"{name}_shape"], [output], value=element))
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        start.output.append(helper.make_tensor_value_info(output, dtype, value.shape))
        info.initialization_binding.add(key=name, value=output)


def from_training_info(
    model: ModelProto, *, loss: str | None = None, learning_rate: str | None = None
) -> TrainingGraph:
    """The training graph of a model with training_info, from this package or another.

    loss: the output of the algorithm that is the loss; default: its first output that no binding names. learning_rate:
    its input of that role; default: one called learning_rate, R or lr, if there is one. Gradient, Adam, Adagrad and
    Momentum nodes of the algorithm are expanded.

    Raises: InvalidArgumentError for no training_info or unknown names, InvalidModelError for bindings to missing
    values.
    """
    if not model.training_info:
        raise InvalidArgumentError("the model has no training_info")
    info = model.training_info[0]
    step = _step_model(model, info.algorithm)
    metadata = [entry for entry in model.metadata_props if entry.key == METADATA]
    if metadata:
        step.metadata_props.extend(metadata)
        return TrainingGraph.load(step)
    if has_training_nodes(step):
        step = expand_gradients(step)
    return _foreign(model, info, step, loss, learning_rate)


def _step_model(model: ModelProto, algorithm: GraphProto) -> ModelProto:
    """The algorithm as a model: every initializer an input with a default."""
    step = copied(model)
    for field in ("graph", "training_info", "metadata_props"):
        step.ClearField(field)
    step.graph.CopyFrom(algorithm)
    present = {tensor.name for tensor in step.graph.initializer}
    step.graph.initializer.extend(t for t in model.graph.initializer if t.name not in present)
    bound = {binding.key for binding in model.training_info[0].update_binding}
    listed = {value.name for value in step.graph.input}
    for tensor in step.graph.initializer:
        if tensor.name in listed:
            continue
        if tensor.name in bound or any(p.key == _NUMBER for p in tensor.metadata_props):
            step.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    used = {name for node in all_nodes(step.graph) for name in node.input} | bound
    assign(step.graph.initializer, [tensor for tensor in step.graph.initializer if tensor.name in used])
    return step


def _foreign(
    model: ModelProto, info: TrainingInfoProto, step: ModelProto, loss: str | None, learning_rate: str | None
) -> TrainingGraph:
    initializers = {tensor.name for tensor in step.graph.initializer}
    outputs = [value.name for value in step.graph.output]
    updates = {binding.key: binding.value for binding in info.update_binding}
    for key, value in updates.items():
        if key not in initializers or value not in outputs:
            raise InvalidModelError(
                f"update_binding: {key!r} -> {value!r}: expected an initializer and an output of the algorithm"
            )
    free = [name for name in outputs if name not in updates.values()]
    chosen = loss or (free[0] if free else None)
    if chosen is None or chosen not in outputs:
        hint = suggest(str(chosen), outputs)
        raise InvalidArgumentError(f"loss: expected the name of an output of the algorithm, got {chosen!r}{hint}")
    inputs = [value.name for value in step.graph.input if value.name not in initializers]
    rate = learning_rate or next((name for name in RATE_NAMES if name in inputs), None)
    if rate is not None and rate not in inputs:
        raise InvalidArgumentError(f"learning_rate: expected one of {', '.join(inputs)}, got {rate!r}")
    main = {tensor.name for tensor in model.graph.initializer}
    return TrainingGraph(
        model=step,
        loss=chosen,
        inputs=tuple(name for name in inputs if name != rate),
        target=None,
        parameters={name: "" for name in updates if name in main},
        outputs=tuple(name for name in free if name != chosen),
        learning_rate=rate,
        state=tuple(Slot(name, new, PARAMETER if name in main else MOMENT) for name, new in updates.items()),
    )
