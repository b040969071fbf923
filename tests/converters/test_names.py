"""No name changes what is computed: whole networks whose nodes have none, and under names that are hard to bear."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from models import digits, fpn, fsrcnn, predators, resnet, transformer, unet_conv_transpose, unet_resize
from tests.converters import test_models
from tests.support.renamed import OURS, STYLES, anonymous, clashes, renamed
from tests.support.training_models import classifier

BUILT = (digits, fpn, fsrcnn, predators, resnet, transformer, unet_conv_transpose, unet_resize)
BUILDERS = {module.__name__.rpartition(".")[2]: module.build for module in BUILT} | {"classifier": classifier}
NAMES = [*BUILDERS, *test_models.NAMES]
# all of them convert; those with other kinds of nodes train too
TRAINED = ["classifier", "digits", "predators", "transformer", "dcgan_g_nobn", "fpn_nearest_scales"]
LENGTHS = {"N": 2, "H": 16, "W": 24}


@cache
def network(name: str) -> ModelProto:
    return BUILDERS[name]() if name in BUILDERS else test_models.network(name)


def graph_of(model: ModelProto, trainable: list[str] | None) -> ob.TrainingGraph:
    return ob.training_graph(
        model,
        loss="mse",
        optimizer=ob.optimizers.AdamW(accumulate=2, ema=0.9, clip_norm=1.0),
        training_mode=any(node.op_type in ("BatchNormalization", "Dropout") for node in model.graph.node),
        trainable=trainable,
        gradient_norms=True,
    )


@cache
def plain(name: str) -> ob.TrainingGraph:
    chosen = list(ob.training_graph(network(name), loss="mse").parameters)
    return graph_of(network(name), chosen)


def ours(name: str) -> list[str]:
    """What the conversion of a network, and the native graph that is made of it, calls what it adds."""
    graph, model = plain(name).model.graph, network(name).graph
    added = [v.name for v in (*graph.output, *graph.input)]
    added += [name for node in graph.node for name in (*node.output, node.name)]
    there = {v.name for v in (*model.input, *model.output)} | {t.name for t in model.initializer}
    there |= {name for node in model.node for name in node.output}
    y = next(iter(graph.node)).output[0]
    native = [f"{y}/again", f"{y}/numbers", "update_guard", "update_guard/loss", "whole_batch/scale"]
    return list(dict.fromkeys([*OURS, *native, *(n for n in added if n and n not in there)]))


def named(name: str, style: str) -> tuple[ob.TrainingGraph, dict[str, str]]:
    model, names = renamed(network(name), style, ours(name))
    return graph_of(model, [names[x] for x in plain(name).parameters]), names


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "predators"])  # its states are in order of name
def test_the_training_graph_is_the_same(name: str, style: str) -> None:
    graph, names = named(name, style)
    assert anonymous(graph.model) == anonymous(plain(name).model)
    assert clashes(graph.model) == []
    assert list(graph.parameters) == [names[x] for x in plain(name).parameters]
    onnx.checker.check_model(graph.model)


def data(graph: ob.TrainingGraph) -> list[np.ndarray]:
    """What a step of a training graph is fed."""
    rng, kinds = np.random.default_rng(0), {v.name: v.type.tensor_type for v in graph.model.graph.input}
    arrays = []
    for name in graph.inputs:
        shape = [d.dim_value or LENGTHS.get(d.dim_param, 2) for d in kinds[name].shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kinds[name].elem_type)
        drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        arrays.append(drawn.astype(dtype))
    return arrays


@cache
def steps(name: str, kernels: str) -> tuple[list[float], list[bytes]]:
    return trained(plain(name), data(plain(name)), kernels)


def trained(graph: ob.TrainingGraph, batch: list[np.ndarray], kernels: str) -> tuple[list[float], list[bytes]]:
    """The losses of two steps, and the bits of all that they have renewed."""
    trainer = ob.Trainer(graph, kernels=kernels, seed=3)
    return [trainer.step(*batch) for _ in range(2)], [value.tobytes() for value in trainer.state().values()]


@pytest.mark.parametrize("kernels", ["onnx", "native"])
@pytest.mark.parametrize("style", ["unnamed", "ours"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_is_the_same(name: str, style: str, kernels: str) -> None:
    graph, _ = named(name, style)
    assert trained(graph, data(plain(name)), kernels) == steps(name, kernels)


def test_copies_of_nodes_without_names() -> None:
    """The native graph of a LayerNormalization in single operators computes two values again, in nodes of two names."""
    nodes = """
        a = MatMul(x, w)
        mean = ReduceMean(a, axis)
        d = Sub(a, mean)
        squares = Pow(d, two)
        variance = ReduceMean(squares, axis)
        above = Add(variance, epsilon)
        deviation = Sqrt(above)
        y = Div(d, deviation)
    """
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x) => (float[n, 4] y) {{{nodes}}}'
    )
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal((4, 4)), "two": np.float64(2), "epsilon": np.float64(1e-5)}
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in tensors.items())
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "axis"))
    graph = ob.training_graph(model, loss="mse", optimizer="adamw", trainable=["w"])
    x = rng.standard_normal((8, 4)).astype(np.float32)
    losses = [
        ob.Trainer(graph, kernels=kernels).step(x, np.zeros((8, 4), np.float32)) for kernels in ("onnx", "native")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
