"""What a producer is asked of a case: five questions, each a model, what is fed, by what it is differentiated.

inputs     Jᵀu by every input that the case differentiates by; what it does not differentiate by is an initializer
weights    the same by initializers: of an operator all floats but the first; where that is all, a bias before it
symbolic   inputs (for who trains weights alone: weights), the length of every axis of every input unknown
jvp        J·v along one v of all inputs
second     H·v of the number Σ u·y² of all outputs
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_gradient_scoreboard.cases import Arrays, Case, at

KINDS = ("inputs", "weights", "symbolic", "jvp", "second")
BIAS, LOSS = "bias_of_case", "loss_of_case"


@dataclass
class Question:
    """seeds: by output what gradients start from (inputs, weights, symbolic), by input a direction (jvp, second)."""

    kind: str
    model: ModelProto
    feeds: Arrays
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    seeds: Arrays

    def with_loss(self) -> tuple[ModelProto, str]:
        """For producers that differentiate one number: the model with Σ seed·y as its output, and its name."""
        return with_loss(self.model, self.seeds, squared=False), LOSS


def ask(case: Case, kind: str, opset: int, seeds: Arrays, *, by_weights: bool = False) -> Question:
    """A question at an opset. seeds: see `Question`; by_weights: `symbolic` is about weights."""
    weights = kind == "weights" or (kind == "symbolic" and by_weights)
    wrt, feeds, model = case.weights if weights else case.inputs, dict(case.feeds), at(case.model, opset)
    if weights and not wrt:
        wrt, feeds = _biased(model, case.inputs[0], feeds)
    fed = set(case.inputs) - set(wrt if weights else ())
    _name_nodes(model)
    _set_io(model, {n: a for n, a in feeds.items() if n not in fed}, case.outputs)
    if kind == "symbolic":
        _forget_lengths(model)
    outputs = case.outputs
    if kind == "second":
        model, outputs = with_loss(model, cotangents(case, seeds), squared=True), (LOSS,)
        seeds = {n: seeds[n] for n in wrt}
    return Question(kind, model, {n: feeds[n] for n in fed}, tuple(wrt), outputs, seeds)


def cotangents(case: Case, seeds: Arrays) -> Arrays:
    """Of the outputs, among the seeds of a case."""
    return {n: seeds[n] for n in case.outputs}


def draw(case: Case, outputs: Arrays) -> Arrays:
    """Cotangents of the outputs and directions of the inputs of a case, the same in every run."""
    rng = np.random.default_rng(zlib.crc32(f"seeds of {case.name}".encode()))
    seeds = {n: rng.uniform(0.5, 1.5, a.shape) * rng.choice([-1, 1], a.shape) for n, a in outputs.items()}
    seeds |= {n: rng.uniform(-1, 1, case.feeds[n].shape) for n in case.inputs}
    return {n: np.asarray(a, np.float32) for n, a in seeds.items()}


def _biased(model: ModelProto, name: str, feeds: Arrays) -> tuple[tuple[str, ...], Arrays]:
    """The first input with a bias added to it, which is the weight; the sum is what the case was fed."""
    bias = np.asarray(np.random.default_rng(0).choice([-0.5, 0.25, 0.5], feeds[name].shape), np.float32)
    for node in model.graph.node:
        node.input[:] = ["biased_of_case" if n == name else n for n in node.input]
    model.graph.node.insert(0, helper.make_node("Add", [name, BIAS], ["biased_of_case"]))
    model.graph.input.append(helper.make_tensor_value_info(BIAS, TensorProto.FLOAT, bias.shape))
    return (BIAS,), feeds | {name: feeds[name] - bias, BIAS: bias}


def _name_nodes(model: ModelProto) -> None:
    """Names are optional in ONNX; there are importers that tell nodes apart by them."""
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{number}_{node.op_type}"


def _set_io(model: ModelProto, constants: Arrays, outputs: tuple[str, ...]) -> None:
    """Constants as initializers; no other outputs than those asked for."""
    graph = model.graph
    inputs = [value for value in graph.input if value.name not in constants]
    kept = [value for value in graph.output if value.name in outputs]
    del graph.input[:], graph.output[:]
    graph.input.extend(inputs)
    graph.output.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())


def _forget_lengths(model: ModelProto) -> None:
    for value in [*model.graph.input, *model.graph.output]:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.Clear()
            dim.dim_param = f"{value.name}_{axis}"


def with_loss(model: ModelProto, seeds: Arrays, *, squared: bool) -> ModelProto:
    """Σ u·y or Σ u·y² of all outputs, as the only output."""
    result = ModelProto()
    result.CopyFrom(model)
    graph, total = result.graph, ""

    def emit(op_type: str, *inputs: str, **attributes: int) -> str:
        name = f"{op_type.lower()}_{len(graph.node)}_of_case"
        graph.node.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    for number, (name, seed) in enumerate(seeds.items()):
        graph.initializer.append(numpy_helper.from_array(seed, f"seed_{number}_of_case"))
        value = emit("Mul", name, name) if squared else name
        term = emit("ReduceSum", emit("Mul", value, f"seed_{number}_of_case"), keepdims=0)
        total = emit("Add", total, term) if total else term
    graph.node.append(helper.make_node("Identity", [total], [LOSS], "loss"))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))
    return result
