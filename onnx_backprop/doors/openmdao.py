"""`Component`: an ONNX model as an ExplicitComponent of OpenMDAO with exact partial derivatives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.doors import library
from onnx_backprop.doors.function import Arguments, function
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import unique

om = library("openmdao.api", package="openmdao")


class Component(om.ExplicitComponent):
    """y = f(x, …) with the inputs and outputs of a model, and ∂y/∂x.

        problem.model.add_subsystem("wing", ob.openmdao.Component("wing.onnx", shapes={"x": (1, 4)}))

    Args:
        model, arguments: as of `ob.function`; initializers in `wrt` are inputs with the values that they have.
        shapes: {input: shape} where a length is a symbol; lengths that the model fixes may not differ.
        matrix_free: products with the Jacobian from both sides, in the place of whole blocks.

    Names are the model's, with "_" for what OpenMDAO does not take; `names` says which. Inputs that
    are not in `wrt` are discrete, as integers are.
    Everything is float64 outside; a float32 model rounds to 1e-7, so that `check_partials` needs a step of 1e-2 or so.

    Raises: KernelError without OpenMDAO; what `ob.function` does; InvalidArgumentError for missing and other lengths.
    """

    def __init__(
        self,
        model: ModelProto | ir.Model | str | Path,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        matrix_free: bool = False,
        **arguments: Unpack[Arguments],
    ) -> None:
        super().__init__()
        self.matrix_free = matrix_free
        self.function = f = function(model, **arguments)
        self._shapes = {name: _shape(name, f.shapes[name], (shapes or {}).get(name)) for name in f.inputs}
        self._shapes |= dict(zip(f.outputs, f.lengths(*self._shapes.values()), strict=True))
        taken: set[str] = set()
        self.names = {name: unique(re.sub(r"\W", "_", name), taken) for name in (*f.inputs, *f.outputs)}

    def setup(self) -> None:
        """Declare inputs, outputs and, of floats, partial derivatives."""
        f = self.function
        for names, floats, add, add_discrete in (
            (f.inputs, f.variables, self.add_input, self.add_discrete_input),
            (f.outputs, f.targets, self.add_output, self.add_discrete_output),
        ):
            for name in names:
                if name in floats:
                    add(self.names[name], val=f.values.get(name, 1.0), shape=self._shapes[name])
                else:
                    add_discrete(self.names[name], val=np.zeros(self._shapes[name], f.types[name]))
        if f.variables and f.targets:
            self.declare_partials([self.names[y] for y in f.targets], [self.names[x] for x in f.variables])

    def _arrays(self, inputs: Any, discrete: Any) -> list[np.ndarray]:
        f = self.function
        return [(inputs if x in f.variables else discrete)[self.names[x]] for x in f.inputs]

    def compute(self, inputs: Any, outputs: Any, discrete_inputs: Any = None, discrete_outputs: Any = None) -> None:
        """Run the model."""
        f = self.function
        for name, y in zip(f.outputs, f(*self._arrays(inputs, discrete_inputs)), strict=True):
            (outputs if name in f.targets else discrete_outputs)[self.names[name]] = y

    def compute_partials(self, inputs: Any, partials: Any, discrete_inputs: Any = None) -> None:
        """All blocks ∂y/∂x, (elements of y, elements of x)."""
        f = self.function
        pairs = [(y, x) for y in f.targets for x in f.variables]
        for (y, x), block in zip(pairs, f.jacobian(*self._arrays(inputs, discrete_inputs)), strict=True):
            shape = tuple(int(np.prod(self._shapes[name])) for name in (y, x))
            partials[self.names[y], self.names[x]] = block.reshape(shape)

    def compute_jacvec_product(
        self, inputs: Any, d_inputs: Any, d_outputs: Any, mode: str, discrete_inputs: Any = None
    ) -> None:
        """Add Jv to d_outputs (mode "fwd") or Jᵀu to d_inputs ("rev")."""
        f = self.function
        forward = mode == "fwd"
        derivative, directions, results = (f.jvp, d_inputs, d_outputs) if forward else (f.vjp, d_outputs, d_inputs)
        seeded, computed = (f.variables, f.targets) if forward else (f.targets, f.variables)
        seeds = [
            directions[self.names[n]] if self.names[n] in directions else np.zeros(self._shapes[n]) for n in seeded
        ]
        for name, product in zip(computed, derivative(*self._arrays(inputs, discrete_inputs), *seeds), strict=True):
            if self.names[name] in results:
                results[self.names[name]] += product


def _shape(name: str, declared: tuple[int | None, ...] | None, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of an input."""
    if shape is None and declared is not None and None not in declared:
        return tuple(n for n in declared if n is not None)
    if shape is None:
        raise InvalidArgumentError(f"{name!r} has the shape {declared}. Give all its lengths: shapes={{{name!r}: (…)}}")
    fits = declared is None or (
        len(declared) == len(shape) and all(length in (None, n) for length, n in zip(declared, shape, strict=True))
    )
    if not fits:
        raise InvalidArgumentError(f"shapes: {name!r} has the shape {declared}, got {tuple(shape)}")
    return tuple(shape)
