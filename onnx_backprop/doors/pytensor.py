"""`op`: an ONNX model as an Op of PyTensor, for PyMC's samplers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.doors import library
from onnx_backprop.doors.function import Arguments, Function, function
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError

pt = library("pytensor.tensor", package="pytensor")
_graph = library("pytensor.graph", package="pytensor")
_gradient = library("pytensor.gradient", package="pytensor")


def op(model: ModelProto | ir.Model | str | Path, **arguments: Unpack[Arguments]) -> Model:
    """An Op (x, …) -> y, or a list of several outputs, with its gradient and tangent, to any order.

        loglikelihood = ob.pytensor.op("lan.onnx", free={"x": {0: "trials"}})
        with pm.Model():
            drift, bound = pm.Normal("drift"), pm.HalfNormal("bound")
            rows = pt.stack([drift * ones, bound * ones, times], axis=1)
            pm.Potential("data", loglikelihood(rows).sum())
            pm.sample(cores=1)

    Arguments: as of `ob.function`, `free` making a function of rows of a file of one row. Floats are cast to the
    model's type, through which PyTensor differentiates; integers have no gradient.

    Raises: KernelError without PyTensor; what `ob.function` does; UnsupportedError for an output of unknown rank.
    """
    return Model(function(model, **arguments))


class Model(_graph.Op):
    """What `op` makes; `function` is what it calls."""

    __props__ = ("function",)

    def __init__(self, function: Function) -> None:
        self.function = function

    def make_node(self, *inputs: Any) -> Any:
        """Raises: InvalidArgumentError for other inputs than the model's."""
        f = self.function
        if len(inputs) != len(f.inputs):
            raise InvalidArgumentError(f"expected {', '.join(f.inputs)}, got {len(inputs)} arguments")
        variables = []
        for name, argument in zip(f.inputs, inputs, strict=True):
            variable, lengths = pt.as_tensor_variable(argument), f.shapes[name]
            if lengths is not None and variable.ndim != len(lengths):
                raise InvalidArgumentError(f"{name!r} has {len(lengths)} axes, got a tensor of {variable.ndim}")
            if (variable.dtype[0] == "f") != (f.types[name].kind == "f"):
                raise InvalidArgumentError(f"{name!r} has type {f.types[name]}, got a tensor of {variable.dtype}")
            variables.append(variable.astype(f.types[name].name))
        return _graph.Apply(self, variables, [self._output(name) for name in f.outputs])

    def _output(self, name: str) -> Any:
        lengths = self.function.shapes[name]
        if lengths is None:
            raise UnsupportedError(f"the rank of {name!r} is not known. Run onnx's shape inference on the model")
        return pt.TensorType(self.function.types[name].name, shape=lengths)()

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Any) -> None:
        """Run the model."""
        for storage, y, output in zip(output_storage, self.function(*inputs), node.outputs, strict=True):
            storage[0] = output.type.filter(y)  # which checks lengths that the model declares

    def connection_pattern(self, _: Any) -> list[list[bool]]:
        """Floats depend on floats."""
        f = self.function
        return [[f.types[x].kind == "f" and y in f.targets for y in f.outputs] for x in f.inputs]

    def pullback(self, inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Jᵀu, by the Op of `function.vjp`."""
        f = self.function
        pairs = zip(f.outputs, outputs, cotangents, strict=True)
        seeds = [_filled(seed, y) for name, y, seed in pairs if name in f.targets]
        gradients = dict(zip(f.variables, Model(f.vjp)(*inputs, *seeds, return_list=True), strict=True))
        for place, (name, x) in enumerate(zip(f.inputs, inputs, strict=True)):
            if name not in gradients:
                unasked = x.dtype[0] == "f"
                undefined = _gradient.grad_undefined(self, place, x, f"{name!r} is not among those to differentiate by")
                gradients[name] = undefined if unasked else _gradient.DisconnectedType()()
        return [gradients[name] for name in f.inputs]

    def pushforward(self, inputs: Sequence[Any], _: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Jv, by the Op of `function.jvp`."""
        f = self.function
        filled = [_filled(v, x) for name, x, v in zip(f.inputs, inputs, tangents, strict=True) if name in f.variables]
        results = dict(zip(f.targets, Model(f.jvp)(*inputs, *filled, return_list=True), strict=True))
        return [results.get(name, _gradient.DisconnectedType()()) for name in f.outputs]

    L_op = pullback  # as PyTensor 2 calls them

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:  # noqa: N802
        """`pushforward`, with None where nothing depends."""
        f = self.function
        results = self.pushforward(inputs, (), eval_points)
        return [y if name in f.targets else None for name, y in zip(f.outputs, results, strict=True)]


def _filled(value: Any, like: Any) -> Any:
    """Zeros in the place of what nothing depends on."""
    return like.zeros_like() if value is None or isinstance(value.type, _gradient.DisconnectedType) else value
