"""`vector_function`: a model as a function from vectors to vectors with its Jacobian, as SciPy's solvers call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.doors import library
from onnx_backprop.doors.function import Arguments, function
from onnx_backprop.functions import Vector, joined
from onnx_backprop.opset.core.errors import InvalidArgumentError

Feeds = Mapping[str, np.ndarray]


def vector_function(
    model: ModelProto | ir.Model | str | Path, *, feeds: Feeds | None = None, **arguments: Unpack[Arguments]
) -> VectorFunction:
    """A function x -> y of vectors with y' and y'', for `least_squares`, `root` and `NonlinearConstraint`.

        r = ob.vector_function("model.onnx", wrt=["w", "bias"], of=["y"], feeds={"x": x})
        least_squares(r, r.start, jac=r.jac)
        NonlinearConstraint(r, 0, np.inf, jac=r.jac, hess=r.hess)

    Args:
        model, arguments: as of `ob.function`.
        feeds: values of the other inputs; also of a variable with unknown lengths, for its shape.

    Raises: what `ob.function` does; InvalidArgumentError for an input without a value and a variable without a shape.
    """
    return VectorFunction(model, feeds or {}, arguments)


class VectorFunction:
    """`r(x)` is y, `r.jac(x)` ∂y/∂x, `r.hess(x, v)` the Hessian of vᵀy, `r.linear(x)` ∂y/∂x as an operator.

    x and y are vectors of float64, the variables and the outputs one after the other; the model computes in its own
    type. start: the vector of the values that the variables have in the model or in `feeds`; zeros for others.
    """

    def __init__(self, model: ModelProto | ir.Model | str | Path, feeds: Feeds, arguments: Arguments) -> None:
        self.function = f = function(model, **arguments)
        known = {**f.values, **{name: np.asarray(value) for name, value in feeds.items()}}
        if unknown := [name for name in feeds if name not in f.inputs]:
            raise InvalidArgumentError(f"feeds: the model has no input {unknown[0]!r}")
        for name in f.inputs:
            shape = f.shapes[name]
            if name not in known and name in f.variables and shape is not None and None not in shape:
                known[name] = np.zeros([n or 0 for n in shape])
        if missing := [name for name in f.inputs if name not in known]:
            raise InvalidArgumentError(f"feeds: expected a value of {missing[0]!r}")
        self._known = known
        self._x = Vector({name: known[name].shape for name in f.variables})
        self.start = joined(known[name] for name in f.variables)

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """{variable: array} of a vector."""
        return self._x.split(x)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Y, all float outputs."""
        f = self.function
        results = zip(f.outputs, f(*self._arrays(x)), strict=True)
        return joined(y for name, y in results if name in f.targets)

    def jac(self, x: np.ndarray) -> np.ndarray:
        """∂y/∂x, dense."""
        return self._blocks(self.function.jacobian(*self._arrays(x)), len(self.function.variables))

    def hess(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Σ v_i ∂²y_i/∂x², dense."""
        adjoint, count = self.function.vjp, len(self.function.variables)
        blocks = adjoint.jacobian(*self._arrays(x), *self._seeds(x, v))
        width = len(adjoint.variables)
        kept = [block for at in range(0, len(blocks), width) for block in blocks[at : at + count]]
        return self._blocks(kept, count)

    def linear(self, x: np.ndarray) -> Any:
        """∂y/∂x as a `scipy.sparse.linalg.LinearOperator`, for `least_squares` with tr_solver="lsmr"."""
        operator: Any = library("scipy.sparse.linalg", package="scipy").LinearOperator
        arrays, f = self._arrays(x), self.function

        def forward(v: np.ndarray) -> np.ndarray:
            return joined(f.jvp(*arrays, *self.split(np.ravel(v)).values()))

        def reverse(u: np.ndarray) -> np.ndarray:
            return joined(f.vjp(*arrays, *self._seeds(x, np.ravel(u))))

        shape = self(x).size, self._x.size
        return operator(shape, matvec=forward, rmatvec=reverse, dtype=np.dtype(np.float64))

    def _arrays(self, x: np.ndarray) -> list[np.ndarray]:
        arrays = self._known | self.split(x)
        return [arrays[name] for name in self.function.inputs]

    def _seeds(self, x: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """A vector like y in the shapes of the outputs."""
        f = self.function
        shapes = f.lengths(*(array.shape for array in self._arrays(x)))
        y = Vector({name: shape for name, shape in zip(f.outputs, shapes, strict=True) if name in f.targets})
        return list(y.split(v).values())

    def _blocks(self, blocks: Sequence[np.ndarray], count: int) -> np.ndarray:
        """A matrix of blocks, `count` of them a row, each with the axes of a variable as its last."""
        sizes = self._x.sizes
        flat = [block.reshape(-1, sizes[at % count]) for at, block in enumerate(blocks)]
        return np.block([flat[at : at + count] for at in range(0, len(flat), count)]).astype(np.float64)
