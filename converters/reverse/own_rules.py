"""`register_gradient`: the gradient of an operator of a user's own domain, which no schema describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.prepare.fused.table import EXPANSIONS
from onnx_backprop.converters.prepare.inference.declared import LIKE_INPUT
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError, UnsupportedError

RuleFunction = registry.RuleFunction


def register_gradient(
    operator: str,
    *,
    all_outputs: bool = False,
    broadcasts: bool = False,
    inputs: Sequence[int] | None = None,
    elementwise: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator: the function is the gradient of an operator of one's own, dx = (∂y/∂x)ᵀ · dy.

        @ob.register_gradient("my.ops::Cube", elementwise=True)
        def cube(op, node, dy):  # y = x³  =>  dx = 3x² · dy
            x = node.input(0)
            return op.Mul(dy, op.Mul(op.Mul(x, x), 3))

    Args:
        operator: "domain::Name", of a domain that is neither ONNX's nor ours. All its versions.
        all_outputs: the rule is called with a list of dy, None where no gradient arrives, not just with the first's.
        broadcasts: the gradients have the shape of the output; each is summed over the axes its input was stretched by.
        inputs: the indices of the inputs that a gradient flows to. Default: every float input.
        elementwise: the first output has the type and the shape of the first input, where the file declares none.
            Without it the declared type is believed, else the type of the first float input, and no shape.

    The function is called as rule(op, node, dy) while a graph is made. It emits nodes with op, `op.Mul(a, b)` for an
    operator of ONNX and `op.emit("CubeGrad", [x, dy], {}, domain="my.ops")[0]` for one of a domain; operands may be
    numbers. node: `input(i)`, `output(i)`, `int(name, default)`, `float(name, default)`, `string(name, default)`. It
    returns one value or None for each input; for one input the value alone will do. What it emits must be linear in dy,
    and have gradients itself for `jvp` and second derivatives.

    A second function for an operator takes the place of the first. `session` and `Trainer` run such a model with
    `session_options` in which the operator's library is registered.

    Raises: InvalidArgumentError for another domain, or an operator that has a gradient already.
    """
    domain, separator, op_type = operator.rpartition("::") if isinstance(operator, str) else ("", "", "")
    if not (separator and domain and op_type):
        raise InvalidArgumentError(f"operator: expected 'domain::Name', as 'my.ops::Cube', got {operator!r}")
    if domain in ("ai.onnx", DOMAIN) or (domain, op_type) in EXPANSIONS or (domain, op_type) in registry.NO_GRADIENT:
        raise InvalidArgumentError(f"operator: {operator} is not yours: its gradient, or that it has none, is known")

    def register(function: RuleFunction) -> RuleFunction:
        def rule(op: Builder, node: Forward, dy: Any) -> registry.Grads:
            return _answer(function, op, node, dy)

        rule.__name__, rule.__module__, rule.__doc__ = function.__name__, function.__module__, function.__doc__
        registry.RULES.pop((domain, op_type, registry.ANY_VERSION), None)
        registry.FLOWING_INPUTS.pop((domain, op_type), None)
        registry.gradient(
            op_type,
            versions=(registry.ANY_VERSION,),
            domain=domain,
            all_outputs=all_outputs,
            broadcasts=broadcasts,
            inputs=inputs,
        )(rule)
        LIKE_INPUT[domain, op_type] = elementwise
        return function

    return register


def _answer(function: RuleFunction, op: Builder, node: Forward, dy: Any) -> registry.Grads:
    """What the function returns; UnsupportedError, with the node, where it fails or returns something else."""
    name = f"its gradient rule {function.__name__}"
    try:
        grads = function(op, node, dy)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise UnsupportedError(
            f"{name} raised {type(e).__name__}: {str(e).rstrip('.')}. It emits nodes with op, as "
            "op.Mul(dy, node.input(0))",
            op_type=node.op_type,
            node=node.name,
        ) from e
    listed = [grads] if isinstance(grads, ir.Value) else list(grads) if isinstance(grads, Sequence) else [grads]
    if len(listed) > len(node.inputs) or any(g is not None and not isinstance(g, ir.Value) for g in listed):
        raise UnsupportedError(
            f"{name} returned {grads!r}, expected a value that op has emitted, or None, for each of "
            f"{len(node.inputs)} inputs",
            op_type=node.op_type,
            node=node.name,
        )
    return listed
