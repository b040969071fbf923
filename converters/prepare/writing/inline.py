"""Models without functions, for runtimes that know no overloads or no functions at all: everything is in the graph.

Every version of onnxruntime and of other runtimes reads up to some opset and some IR version, so both are as low as
the nodes allow. An operator is the same from the version that introduced its present form (`OpSchema.since_version`)
to the next change, and a model means the same in every opset in which all its operators are the ones that it means.
An operator that onnxruntime has no kernel of for float64 or a half type needs the opset of its function body.
"""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto, TensorProto, defs, helper

from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.large_weights import set_aside
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.functions.half import holds
from onnx_backprop.opset.functions.overloads import refuse_older_runtimes
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_nodes

LEAST_OPSET = 7  # that onnxruntime promises to run
_WITHOUT_KERNELS = (TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_BODIES = ("function_opset_versions", "context_dependent_function_opset_versions")  # of a schema, which no stub has
LEAST_IR_VERSION = 7  # knows all that a model can hold but functions and the types of later opsets


def check_inline(kernels: str, *, inline: bool) -> None:
    """Raise where the bodies of a route cannot stand in a file of their own: they run operators of this package."""
    if inline and kernels != "onnx":
        raise InvalidArgumentError(
            f"inline: kernels {kernels!r} are code of this package, which no file can hold. Use kernels 'onnx' with it"
        )


def inlined(model: ModelProto) -> ModelProto:
    """A copy of a model with every function in the place of its calls, in the lowest opset and IR version.

    Names of inputs, outputs and initializers, metadata and training_info stay; imports that no node needs go. What
    the model computes does not change.
    """
    from onnx_ir.passes.common import InlinePass

    light, weights = set_aside(model)
    graph = to_ir(light)
    InlinePass()(graph)
    result = to_proto(graph)
    result.training_info.extend(model.training_info)
    del result.functions[:]  # which the pass leaves where no node calls them
    refuse_older_runtimes(result)
    _lower(result)
    return weights.put_back(result)


def _lower(model: ModelProto) -> None:
    """Set the lowest opsets and IR version in which the model says the same."""
    imported = {_domain(o.domain): o.version for o in model.opset_import}
    lowest: dict[str, int] = {}
    known, by_bodies = True, holds(model, _WITHOUT_KERNELS)
    for node in _nodes(model):
        domain = _domain(node.domain)
        if domain not in imported:  # of training_info, whose imports are the main graph's
            continue
        version = _since(node, domain, imported[domain], by_bodies=by_bodies)
        known = known and version is not None
        lowest[domain] = max(lowest.get(domain, 1), version or imported[domain])
    if "" in imported:
        lowest[""] = min(max(lowest.get("", 1), LEAST_OPSET), imported[""])
    assign(model.opset_import, [helper.make_opsetid(*pair) for pair in sorted(lowest.items())])
    if known:  # and so every type that came with a later version is read by an operator that came with it too
        needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
        model.ir_version = max(needed, LEAST_IR_VERSION)


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    yield from all_nodes(model)
    for info in model.training_info:
        yield from all_nodes(info.algorithm)
        yield from all_nodes(info.initialization)


def _domain(domain: str) -> str:
    return "" if domain in DEFAULT_DOMAINS else domain


def _since(node: NodeProto, domain: str, version: int, *, by_bodies: bool) -> int | None:
    """The version that an operator's form in an opset is from; None for an operator that onnx does not know.

    by_bodies: the first one, at least, that has a function body for it and for what this calls, if one up to the opset
    has.
    """
    try:
        schema = defs.get_schema(node.op_type, version, domain)
    except defs.SchemaError:
        return None
    bodies = [body for name in _BODIES if by_bodies for body in getattr(schema, name) if body <= version]
    within = schema.function_body.node if bodies else ()
    versions = (_since(inner, domain, version, by_bodies=True) or 0 for inner in within)
    return max(schema.since_version, min(bodies, default=0), *versions)
