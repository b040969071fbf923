"""`check_gradients`: a model's gradients against its own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.check.check import check
from onnx_backprop.converters.check.report import GradientReport
from onnx_backprop.converters.prepare.fused.expand import with_expansions_written
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.opset.core.errors import require_numbers
from onnx_backprop.opset.functions.declared import OPERATORS
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.ort_ops import Named
from onnx_backprop.providers.choose import chosen
from onnx_backprop.providers.placed import session


def check_gradients(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    stop: Patterns | None = None,
    feeds: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    kernels: str | None = None,
    device: str | None = None,
    providers: Sequence[Named] | None = None,
    tolerance: float | None = None,
    nodes: bool = False,
    float64: bool = False,
    progress: Callable[[Sequence[Any]], Iterable[Any]] | None = None,
) -> GradientReport:
    """Compare the gradients of `backward` with differences of the model along random directions.

        report = ob.check_gradients("model.onnx")
        assert report.ok, report

    With L(x) = Σ_y <dy, y(x)> and random dy, the gradient g of L is right if (L(x + h·v) - L(x - h·v)) / 2h tends to
    <g, v> as h shrinks. The differences are of the model's own forward: in float64 by onnx's reference evaluator if the
    model is small and runs there as in onnxruntime, else by onnxruntime in float32. If they contradict the gradient or
    do not settle, every node on the way is checked alone at the values that reach it.

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file.
        wrt: graph inputs and initializers. Default: every float one that a gradient reaches. More than twelve are
            checked in twelve groups.
        of: graph outputs, or values inside the graph. Default: every float output that depends on `wrt`.
        stop: values that no gradient passes, as `backward` takes them. The differences keep them, and those marked in
            the file, at their values; in branches and loops that is not possible, and refused.
        feeds: values for inputs, and for initializers in `wrt`. Default: random floats; integers 0 or 1; a symbolic
            axis has length 2 if it comes first, else the shortest length that the model runs with.
        seed: of the inputs, dy and directions.
        kernels: what the gradient runs on, see `use_kernels`. Default: what `backward` attaches.
        device, providers: what the model and its gradient run on in onnxruntime, as `session` takes them.
        tolerance: of the error, relative to the size of the derivative along v. Default: 5e-4, or 1e-2 if there is only
            a float32 forward; 3e-2 in float16 and 1e-1 in bfloat16 models.
        nodes: check every node even if the whole model is right.
        float64: also compute the gradients in float64, in onnxruntime if it has the kernels, else in onnx's reference
            evaluator, which takes seconds for a small network and minutes for a large one. The report then has the
            rounding error of each gradient.
        progress: wraps the list of variables, and that of nodes, while they are checked. Default: a progress bar if a
            person is watching, on a terminal or in a notebook; `iter` for none.

    Returns: a report; `print` shows its tables, the worst node first. `ok`: the gradients are right. `repro` is the
    smallest sub-model whose gradient is wrong, with its inputs' values. If the differences settle neither for the whole
    model, as for a network of kinks in float32, nor for every node, the verdict is "undecided", and `ok` is False.

    Raises: InvalidArgumentError (unknown names, an input that needs a value in `feeds`, a seed or a tolerance that is
    negative or no finite number), InvalidModelError (also for a
    model that draws random numbers), KernelError without onnxruntime, and what `backward` raises.
    """
    target = chosen(device, providers)
    require_numbers(0, whole=True, seed=seed)
    if tolerance is not None:
        require_numbers(0, tolerance=tolerance)

    def opened(proto: ModelProto) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        proto = with_expansions_written(proto)
        declared = any((node.domain, node.op_type) in OPERATORS for node in all_nodes(proto))
        route = "numpy" if declared else None  # references, which share nothing with native kernels
        running: Any = session(proto, kernels=route if target is None else "onnx", device=device, providers=providers)
        names = [value.name for value in running.get_outputs()]
        accepted = {value.name for value in running.get_inputs()}
        accepted |= {value.name for value in running.get_overridable_initializers()}

        def run(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            fed = {name: value for name, value in values.items() if name in accepted}
            return dict(zip(names, running.run(None, fed), strict=True))

        return run

    arguments = {} if kernels is None else {"kernels": kernels}
    return check(
        model,
        opened,
        wrt=wrt,
        of=of,
        stop=stop,
        feeds=feeds,
        seed=seed,
        tolerance=tolerance,
        nodes=nodes,
        float64=float64,
        progress=progress,
        **arguments,
    )
