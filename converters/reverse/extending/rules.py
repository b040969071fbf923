"""Operators of a user's own domain: their gradients, and what they stand for."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.prepare.fused.composer import Composer, Expansion
from onnx_backprop.converters.prepare.fused.table import EXPANSIONS, REGISTERED
from onnx_backprop.converters.prepare.inference.declared import LIKE_INPUT
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.extending.arithmetic import arithmetic
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError, UnsupportedError
from onnx_backprop.opset.core.hints import complaint_of, complaint_of_nodes

RuleFunction = registry.RuleFunction


def register_gradient(
    domain: str,
    operator: str | None = None,
    *,
    versions: Sequence[int] | None = None,
    all_outputs: bool = False,
    broadcasts: bool = False,
    inputs: Sequence[int] | None = None,
    elementwise: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator: the function is the gradient of an operator of your own, dx = (∂y/∂x)ᵀ · dy.

        @ob.register_gradient("my.ops", "Cube", elementwise=True)
        def cube(op, node, dy):  # y = x³  =>  dx = 3x² · dy
            x = node.input(0)
            return 3 * x * x * dy

    Args:
        domain, operator: of an operator that is neither ONNX's nor ours; "my.ops::Cube" as one argument works too.
        versions: of its opset that the rule serves: `since_version` if onnx has a schema of it, else the versions that
            models import. A model with another one is refused. Default: all.
        all_outputs: the rule gets a list of dy, None where no gradient arrives, not just the first output's.
        broadcasts: the gradients have the shape of the output; each is summed over the axes its input was stretched by.
        inputs: the indices of the inputs that a gradient flows to. Default: every float input.
        elementwise: the first output has the type and the shape of the first input, if the file declares none. By
            default it has the declared type, else the type of the first float input, and no shape.

    The function is called as rule(op, node, dy) while a graph is built. Values support +, -, * and /, also with
    numbers; other operators of ONNX are `op.Sin(x)`, those of a domain `op.emit("CubeGrad", [x, dy], {},
    domain="my.ops")[0]`. node has `input(i)`, `output(i)`, `int(name, default)`, `float(name, default)`, `string(name,
    default)`. The function returns one value or None for each input; for one input the value alone will do, and
    trailing Nones may be left out. What it emits must be linear in dy, and needs gradients itself for `jvp` and second
    derivatives.

    Register it before or after loading a model. A second function for an operator replaces the first. If a model has a
    function of that name, this rule is used instead of its inside. To run such a model, use `register_kernel`, or
    `session_options` with the operator's library.

    Raises: InvalidArgumentError for another domain, or an operator that has a gradient already.
    """
    domain, op_type = _named(domain, operator)
    if (domain, op_type) in REGISTERED:
        raise InvalidArgumentError(f"operator: {domain}::{op_type} has an expansion, through which gradients flow")
    numbers = _versions(versions)

    def register(function: RuleFunction) -> RuleFunction:
        @wraps(function)
        def rule(op: Builder, node: Forward, dy: Any) -> registry.Grads:
            return _answer(function, op, node, dy, inputs)

        for key in [key for key in registry.RULES if key[:2] == (domain, op_type)]:
            if not numbers or key[2] in (*numbers, registry.ANY_VERSION):
                del registry.RULES[key]
        registry.FLOWING_INPUTS.pop((domain, op_type), None)
        registry.gradient(
            op_type,
            versions=numbers or (registry.ANY_VERSION,),
            domain=domain,
            all_outputs=all_outputs,
            broadcasts=broadcasts,
            inputs=inputs,
        )(rule)
        LIKE_INPUT[domain, op_type] = elementwise
        return function

    return register


def register_expansion(
    domain: str, operator: str | None = None, *, versions: Sequence[int] | None = None
) -> Callable[[Expansion], Expansion]:
    """A decorator: the function writes an operator of your own in standard ones, which replace it in the graph.

        @ob.register_expansion("acme", "Snake")
        def snake(op):  # y = x + sin²(αx) / α
            x, alpha = op.input(0), op.attribute("alpha", 1.0)
            s = op.Sin(op.Mul(x, alpha))
            return op.Add(x, op.Div(op.Mul(s, s), alpha))

    Args:
        domain, operator: of an operator that is neither ONNX's nor ours; "acme::Snake" as one argument works too.
        versions: of the domain that models may import. Default: all.

    The function gets the node as `op`: `op.input(i)` is the name of an input, "" if it is left out, `op.attribute(name,
    default)` an attribute, `op.wants(i)` whether anything reads an output. `op.Mul(a, b)` emits a node, whose operands
    may be numbers and arrays, and returns the name of its output. The function returns the name of the output, or a
    list with one for each output. Attributes and inputs that it does not read are refused; `raise op.refuse("…")`
    refuses a form.

    Forward and backward then run in stock onnxruntime, without the operator's library. If the model has a function of
    that name, it is used instead. A second expansion replaces the first.

    Raises: InvalidArgumentError for another domain, or an operator that has a gradient rule.
    """
    domain, op_type = _named(domain, operator)
    if any(key[:2] == (domain, op_type) for key in registry.RULES):
        raise InvalidArgumentError(f"operator: {domain}::{op_type} has a gradient rule. Register one of both")
    numbers = _versions(versions)

    def register(function: Expansion) -> Expansion:
        @wraps(function)
        def expansion(op: Composer) -> str | Sequence[str | None] | None:
            return _expanded(function, op, numbers)

        EXPANSIONS[domain, op_type] = expansion
        REGISTERED.add((domain, op_type))
        return function

    return register


def _named(domain: str, operator: str | None) -> tuple[str, str]:
    """An operator's domain and name, given apart or as one; InvalidArgumentError for one that is not a user's."""
    shown = f"{domain}::{operator}" if operator is not None else domain
    domain, separator, op_type = shown.rpartition("::") if isinstance(shown, str) else ("", "", "")
    if not (separator and domain and op_type) or "::" in domain:
        raise InvalidArgumentError(f"operator: expected 'domain', 'Name', as 'my.ops', 'Cube', got {shown!r}")
    known = (domain, op_type) in EXPANSIONS and (domain, op_type) not in REGISTERED
    if domain in ("ai.onnx", DOMAIN) or known or (domain, op_type) in registry.NO_GRADIENT:
        raise InvalidArgumentError(f"operator: {shown} is not yours: its gradient, or that it has none, is known")
    return domain, op_type


def _versions(versions: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of versions, none for all; InvalidArgumentError for something else."""
    if versions is None:
        return ()
    numbers = tuple(versions) if isinstance(versions, Sequence) and not isinstance(versions, str) else ()
    if not numbers or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise InvalidArgumentError(f"versions: expected a list of whole numbers of 1 or more, got {versions!r}")
    return numbers


def _answer(
    function: RuleFunction, op: Builder, node: Forward, dy: Any, inputs: Sequence[int] | None
) -> registry.Grads:
    """What the function returns; UnsupportedError, with the node, where it fails or returns something else.

    So it is where an input that a gradient is wanted of is left out: None says that it has none.
    """
    name, before = f"its gradient rule {function.__name__}", len(op.nodes)
    try:
        with arithmetic(op):
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
    emitted = ((n.op_type, n.attributes) for n in op.nodes[before:] if not n.domain)
    if words := next(filter(None, (complaint_of(*each) for each in emitted)), None):
        raise UnsupportedError(f"{name}: {words}", op_type=node.op_type, node=node.name)
    left = [n for n in range(len(listed), len(node.inputs)) if node.wants(n) and (inputs is None or n in inputs)]
    if left:
        raise UnsupportedError(
            f"{name} returned {len(listed)} of {len(node.inputs)} gradients, and that of input {left[0]} "
            f"({node.input(left[0]).name!r}) is wanted. Return one for each input, None where it has none",
            op_type=node.op_type,
            node=node.name,
        )
    return listed


def _expanded(function: Expansion, op: Composer, versions: Sequence[int]) -> str | Sequence[str | None]:
    """What the function returns; UnsupportedError, with the node, where it fails or returns something else."""
    name = f"its expansion {function.__name__}"
    imported = op.known.version(op.node.domain)
    if versions and imported not in versions:
        served = ", ".join(map(str, versions))
        raise op.refuse(f"{name} is for version {served} of its domain, and the model imports version {imported}")
    try:
        results = function(op)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise op.refuse(
            f"{name} raised {type(e).__name__}: {str(e).rstrip('.')}. It emits nodes with op, as op.Mul(op.input(0), 2)"
        ) from e
    if words := complaint_of_nodes(op.nodes):
        raise op.refuse(f"{name}: {words}")
    listed = [results] if isinstance(results, str) else list(results) if isinstance(results, Sequence) else [results]
    emitted = {name for node in op.nodes for name in node.output} | {*op.node.input}
    if len(listed) > len(op.node.output) or any(r is not None and r not in emitted for r in listed) or not listed[0]:
        raise op.refuse(
            f"{name} returned {results!r}, expected the name of a value that op has emitted for each of "
            f"{len(op.node.output)} outputs"
        )
    return [str(r) if r else None for r in listed]
