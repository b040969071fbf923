"""Functions of one name: what an onnxruntime that does not know them is told.

Before 1.27 onnxruntime takes no notice of `overload` (IR version 10): of several functions of one name it runs the last
for every node, which fails somewhere, or gives wrong numbers where the shapes happen to fit. So the last one is never
a body: it calls an operator that nobody has and whose name says what is needed. Runtimes that know overloads never
look at it, for no node calls it.
"""

from collections import defaultdict

from onnx import FunctionProto, ModelProto, helper

from onnx_backprop.opset.core.op import DOMAIN
from onnx_backprop.opset.graphs.edit import add_import, assign, without_imports

LEAST_ONNXRUNTIME = "1.27"  # that tells overloads apart
REQUIREMENT = (
    "onnx_backprop.onnxruntime"  # key of a model's metadata: the versions that run it, where not every one does
)
NEEDS_DOMAIN = f"{DOMAIN}.needs"
NEEDED = "onnxruntime_1_27_or_a_file_converted_with_inline"
REFUSAL = "older"  # the overload of the function that nobody calls


def refuse_older_runtimes(model: ModelProto) -> None:
    """Let older versions of onnxruntime refuse a model with overloads, by a message that names what they lack.

    The metadata say it too. A model without overloads, or that has lost them, gets neither.
    """
    functions = [f for f in model.functions if f.overload != REFUSAL]
    bodies: defaultdict[tuple[str, str], list[FunctionProto]] = defaultdict(list)
    for function in functions:
        bodies[function.domain, function.name].append(function)
    several = [same for same in bodies.values() if len(same) > 1]
    assign(model.functions, [*functions, *map(_refusal, several)])
    without_imports(model, NEEDS_DOMAIN)
    assign(model.metadata_props, [entry for entry in model.metadata_props if entry.key != REQUIREMENT])
    if several:
        add_import(model, NEEDS_DOMAIN)
        model.metadata_props.add(key=REQUIREMENT, value=f">={LEAST_ONNXRUNTIME}")


def _refusal(bodies: list[FunctionProto]) -> FunctionProto:
    """A function that every call of the others fits."""
    widest = max(bodies, key=lambda body: (len(body.output), len(body.input)))
    inputs = max((list(body.input) for body in bodies), key=len)
    node = helper.make_node(NEEDED, inputs, list(widest.output), domain=NEEDS_DOMAIN)
    return helper.make_function(
        widest.domain,
        widest.name,
        inputs,
        list(widest.output),
        [node],
        [*(o for o in widest.opset_import if not o.domain), helper.make_opsetid(NEEDS_DOMAIN, 1)],
        attributes=list(widest.attribute),
        attribute_protos=list(widest.attribute_proto),
        overload=REFUSAL,
    )
