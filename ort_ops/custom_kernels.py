"""`register_kernel`: operators of somebody's own domain, which run as ours do."""

import re
from collections.abc import Callable
from typing import Any

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.op import DOMAIN, Op
from onnx_backprop.opset.functions.declared import PLANS, declare
from onnx_backprop.ort_ops.sessions import default_options

_DOMAIN = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def register_kernel(operator: Op, plan: Callable[[Any], Any] | None = None) -> None:
    """Let sessions and trainers run an operator of your own domain from its declaration.

        from onnx_backprop.opset.core.op import Input, Op, Output

        SQUARE = Op(
            name="Square", domain="acme", doc="y = x², of any shape.",
            inputs=(Input("x", "T1", "Any shape."),), outputs=(Output("y", "As x."),),
            shape=lambda attributes, args: args[0].dims,
            reference=lambda attributes, shape, x: x * x,
        )
        ob.register_kernel(SQUARE)

    Args:
        operator: its domain, name and version, attributes, inputs and outputs; `shape`, which checks a call and returns
            the output's shape, for model checkers and for runs; `reference`, the Python kernel, NumPy on float64
            arrays; optionally `body`, the same in standard operators.
        plan: the native kernel: a function from a `runtime.bridge.Request` (attributes, lengths) to a
            `runtime.stages.Plan`, the stages of compiled code. Without it the reference runs on the route "native" too.

    The schema is registered with onnx. float32, float16 and bfloat16 work alike, results are rounded once, and an error
    of `shape` fails the run with its message. Route "onnx", devices and files for others need a body: without it the
    node stays as it is there. `register_gradient` adds the gradient.

    Call it before you create sessions with shared options: options that `register_ops` has seen before lack the
    operator.

    Errors: InvalidArgumentError for a domain that is not yours, or none; RegistrationError for an operator that has a
    schema or a kernel already.
    """
    if not isinstance(operator, Op):
        raise InvalidArgumentError(f"expected an Op, which declares the operator, got {operator!r}", "operator")
    if operator.domain in ("ai.onnx", DOMAIN) or not _DOMAIN.fullmatch(operator.domain):
        raise InvalidArgumentError(
            f"expected an operator of a domain of your own, Op(domain='acme', …), got {operator.domain!r}", "operator"
        )
    if plan is not None and not callable(plan):
        raise InvalidArgumentError(f"expected a function from a Request to a Plan, got {plan!r}", "plan")
    declare(operator)
    if plan is not None:
        PLANS[operator.key] = plan
    default_options.cache_clear()  # what was registered with options before lacks it
